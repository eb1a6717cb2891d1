"""A process that writes a DataFrame whose rows come to a fault: `python batch_job.py '{…}'`.

Prints the error of the write, as JSON.
"""

import json
import sys

import faulty_rows
import jvm
from pyspark import cloudpickle

import tallystick as ts


def main() -> None:
    """Write, and say what became of it."""
    spec = json.loads(sys.argv[1])
    cloudpickle.register_pickle_by_value(faulty_rows)
    config = {"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": jvm.options()}
    spark = ts.spark_session("batch", master=spec["master"], config=config)
    ts.register(spark)
    topic = spec["options"]["topic"]
    fault = faulty_rows.faulty_rows(spec["fault"], spec["confluent"], topic)
    rows = spark.range(0, 1, 1, 1).mapInArrow(fault, faulty_rows.FAULTY)
    error = ""
    try:
        rows.write.format("tallystick").options(**spec["options"]).mode("append").save()
    except Exception as raised:
        error = str(raised)
    print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()

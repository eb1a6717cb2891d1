"""A pipeline from JSON to JSON that is given no Spark: `python cold_job.py '{"kind": "keyed", …}'`.

It runs over all that is there, and ends.
"""

import json
import sys
from typing import Any

import pyarrow as pa

import tallystick as ts

COLUMNS = "k string, n bigint"
WAIT_S = 240


def picked(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out where they come from."""
    return rows.select(["k", "n"])


def pipeline(spec: dict[str, Any]) -> ts.Pipeline:
    """From input to output as it is, or with each record's number among those of its key."""
    options = dict(spec["kafka"])
    servers = options.pop("kafka.bootstrap.servers")
    source = ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        value=ts.Json(COLUMNS),
        starting_offsets="earliest",
        max_offsets_per_trigger=40,
        options=options,
    )
    sink = ts.KafkaSink(servers, topic=spec["topic_out"], key="k", value=ts.Json(), options=options)
    read = ts.Pipeline(spec["name"]).read(source).map_batches(picked, schema=COLUMNS)
    if spec["kind"] == "keyed":
        counting = ts.aggregate({"nth": ts.count()}, each="record", keep=["n"])
        read = read.key_by("k").process(counting, parallelism=2)
    return read.write(sink)


def main(spec: dict[str, Any]) -> None:
    """Run it."""
    query = pipeline(spec).start(checkpoint=spec["checkpoint"], trigger={"availableNow": True})
    assert query.awaitTermination(WAIT_S)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

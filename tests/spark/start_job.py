"""A process that starts pipelines without a session: `python start_job.py '{"name": …, …}'`.

It runs over all that is there, as often as `runs` says, and prints what became of Spark as JSON.
`spark` says what is given to `start`: "nothing", or "context", made here. With `refused_first` it
starts what cannot work before.
"""

import json
import logging
import os
import sys
from typing import Any

import jvm
import pyarrow as pa
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

import tallystick as ts
from tallystick.host.java import spark_java_home

WAIT_S = 150


def pass_on() -> Any:
    """Made here, so that workers need no tests."""
    return lambda rows: rows.select(["key", "value"])


def with_n() -> Any:
    """Keys, and a column that a map and a struct are made for, which need no session either."""

    def columns(rows: pa.RecordBatch) -> pa.RecordBatch:
        key = rows.column("key").cast(pa.string())
        kind = pa.struct([("at", pa.map_(pa.string(), pa.int32()))])
        nested = pa.array([{"at": [("one", 1)]}] * rows.num_rows, kind)
        return pa.RecordBatch.from_arrays([key, nested], names=["key", "nested"])

    return columns


def pipeline(spec: dict[str, Any], kind: str) -> ts.Pipeline:
    """From input to output: `stateless`, `keyed`, or with a `transform`."""
    options = dict(spec["kafka"])
    servers = options.pop("kafka.bootstrap.servers")
    source = ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        starting_offsets="earliest",
        max_offsets_per_trigger=40,
        options=options,
    )
    read = ts.Pipeline(spec["name"]).read(source)
    if kind == "keyed":
        counted = (
            read.map_batches(with_n(), schema="key string, nested struct<at: map<string, int>>")
            .key_by("key")
            .process(ts.aggregate({"value": ts.count()}))
        )
        to = ts.KafkaSink(
            servers, topic=spec["topic_out"], key="key", value=ts.Json(), options=options
        )
        return counted.write(to)
    step = read.transform(lambda rows: rows.select("key", "value")) if kind == "transform" else None
    to = ts.KafkaSink(servers, topic=spec["topic_out"], options=options)
    return (step or read.map_batches(pass_on())).write(to)


def given(kind: str) -> SparkContext | None:
    """What `start` gets."""
    if kind == "nothing":
        return None
    conf = (
        SparkConf()
        .setMaster("local[2]")
        .setAppName("start-job")
        .set("spark.ui.enabled", "false")
        .set("spark.driver.extraJavaOptions", jvm.options())
    )
    return SparkContext(conf=conf)


def facts(query: ts.Query | None = None) -> dict[str, Any]:
    """What there is of Spark now."""
    context = SparkContext._active_spark_context
    session = None if context is None else SparkSession._instantiatedSession
    return {
        "context": context is not None,
        "session": session is not None,
        "epochs": 0 if query is None else len(query.recentProgress),
    }


def main(spec: dict[str, Any]) -> None:
    """Run it as often as asked."""
    spark = given(spec["spark"])
    findings = [refused(spec)] if spec.get("refused_first") else []
    for _ in range(spec.get("runs", 1)):
        query = pipeline(spec, spec["kind"]).start(
            spark,
            checkpoint=spec["checkpoint"],
            trigger={"availableNow": True},
            execution=spec["execution"],
        )
        assert isinstance(query, ts.Query)
        assert query.awaitTermination(WAIT_S)
        findings.append({"after": facts(query)})
    print("FOUND " + json.dumps(findings), flush=True)


def refused(spec: dict[str, Any]) -> dict[str, Any]:
    """Start what cannot work, and return the error and what is left of it."""
    refused_pipeline = pipeline({**spec, "topic_in": "nowhere"}, "stateless")
    try:
        refused_pipeline.start(checkpoint=spec["checkpoint"], execution=spec["execution"])
    except ts.OptionError as error:
        return {"error": str(error), "after": facts()}
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    os.environ["JAVA_HOME"] = str(spark_java_home())
    os.environ["PYSPARK_PYTHON"] = sys.executable
    main(json.loads(sys.argv[1]))

"""A keyed pipeline of a user's own, asked by commands: `python -m tests.spark.asked_job`."""

import json
import sys

import tallystick as ts
from tests.spark.numbering import numbering, picked


def main() -> None:
    spec = json.loads(sys.argv[1])
    options = dict(spec["kafka"])
    servers = options.pop("kafka.bootstrap.servers")
    source = ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        value=ts.Json("k string, n bigint", mode="failfast"),
        starting_offsets="earliest",
        options=options,
    )
    sink = ts.KafkaSink(servers, topic=spec["topic_out"], key="k", value=ts.Json(), options=options)
    pipeline = (
        ts.Pipeline(spec["name"])
        .read(source)
        .map_batches(picked(), schema="k string, n bigint")
        .key_by("k", max_parallelism=16)
        .process(
            numbering(),
            output="k string, n bigint, seen bigint",
            parallelism=2,
            uid="numbers",
        )
        .write(sink)
    )
    pipeline.start(checkpoint=spec["checkpoint"]).awaitTermination()


if __name__ == "__main__":
    main()

"""Two programs of one pipeline; `python -m tests.spark.changed_job` runs one of them to its death.

It is killed when its first epoch is prepared, and nothing is decided.
"""

import json
import os
import signal
import sys
from typing import Any

import tallystick as ts
from tallystick.epoch import protocol

AGGREGATES: dict[str, dict[str, Any]] = {
    "old": {"n": ts.count(), "least": ts.min("n")},
    "new": {"total": ts.sum("n"), "least": ts.min("n"), "rows": ts.count()},
}
COLUMNS = {"old": "k string, n int", "new": "k string, n bigint"}
"""The least `n` is a bigint in the new program, and the count has another name."""


def sums(spec: dict[str, Any], program: str, parallelism: int) -> ts.Pipeline:
    """The pipeline of one of the two programs."""
    options = dict(spec["kafka"])
    servers = options.pop("kafka.bootstrap.servers")
    source = ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        starting_offsets="earliest",
        value=ts.Json(COLUMNS[program]),
        options=options,
    )
    sink = ts.KafkaSink(servers, topic=spec["topic_out"], value=ts.Json(), options=options)
    return (
        ts.Pipeline(spec["name"])
        .read(source)
        .key_by("k", max_parallelism=16)
        .process(
            ts.aggregate(AGGREGATES[program]),
            uid="sums",
            parallelism=parallelism,
            renamed={"rows": "n"} if program == "new" else {},
        )
        .write(sink)
    )


def die_prepared(event: protocol.Event) -> None:
    """Kill this process once all output of an epoch is written, before it is decided."""
    if isinstance(event, protocol.OutputCounted):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    spec = json.loads(sys.argv[1])
    pipeline = sums(spec, spec["program"], spec["parallelism"])
    pipeline.start(
        checkpoint=spec["checkpoint"], listener=die_prepared, trigger={"availableNow": True}
    ).awaitTermination()


if __name__ == "__main__":
    main()

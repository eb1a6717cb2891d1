"""Two programs of two pipelines; `python -m tests.spark.changed_job` runs one to its death.

The program of `sums` is killed in its first epoch, as soon as `at` has happened: an event of the
coordinator.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import tallystick as ts
from tallystick.epoch import protocol
from tests.spark import loaded_daemon

AGGREGATES: dict[str, dict[str, Any]] = {
    "old": {"n": ts.count(), "least": ts.min("n")},
    "new": {"total": ts.sum("n"), "least": ts.min("n"), "rows": ts.count()},
}
COLUMNS = {"old": "k string, n int", "new": "k string, n bigint"}
"""The least `n` is a bigint in the new program, and the count has another name."""


WEEK_MS, BRIEF_MS = 7 * 86_400_000, 1
"""Times to live: for all of a test, and not beyond the epoch that writes the entry."""


class Counts(StatefulProcessor):
    """Counts the rows of a key, twice; in the new program there are times to live, and a sum."""

    def __init__(self, program: str) -> None:
        self.is_new = program == "new"

    def init(self, handle: Any) -> None:
        long_ms, brief_ms = (WEEK_MS, BRIEF_MS) if self.is_new else (None, None)
        columns = "n int, total bigint" if self.is_new else "n int"
        self.lasting = handle.getValueState("lasting", columns, long_ms)
        self.brief = handle.getValueState("brief", "n int", brief_ms)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        numbers = [row.n for row in rows]
        n, *totals = self.lasting.get() or (0, *([None] * self.is_new))
        lasting = (n + len(numbers), *((total or 0) + sum(numbers) for total in totals))
        (n,) = self.brief.get() or (0,)
        self.lasting.update(lasting)
        self.brief.update((n + len(numbers),))
        yield Row(k=key[0], lasting=lasting[0], brief=n + len(numbers), total=(*lasting, None)[1])

    def close(self) -> None:
        pass


def sums(spec: dict[str, Any], program: str, parallelism: int) -> ts.Pipeline:
    """The pipeline of one of the two programs, with aggregates."""
    renamed = {"rows": "n"} if program == "new" else {}
    function = ts.aggregate(AGGREGATES[program])
    return _pipeline(spec, COLUMNS[program], function, parallelism=parallelism, renamed=renamed)


def counts(spec: dict[str, Any], program: str, parallelism: int) -> ts.Pipeline:
    """The pipeline of one of the two programs, with a `StatefulProcessor`."""
    return _pipeline(
        spec,
        COLUMNS["old"],
        Counts(program),
        parallelism=parallelism,
        output="k string, lasting int, brief int, total bigint",
        time_mode="ProcessingTime" if program == "new" else "None",
    )


def _pipeline(spec: dict[str, Any], columns: str, function: Any, **step: Any) -> ts.Pipeline:
    options = dict(spec["kafka"])
    servers = options.pop("kafka.bootstrap.servers")
    source = ts.KafkaSource(
        servers,
        topics=[spec["topic_in"]],
        starting_offsets="earliest",
        value=ts.Json(columns),
        options=options,
    )
    sink = ts.KafkaSink(servers, topic=spec["topic_out"], value=ts.Json(), options=options)
    return (
        ts.Pipeline(spec["name"])
        .read(source)
        .key_by("k", max_parallelism=16)
        .process(function, uid="sums", **step)
        .write(sink)
    )


def main() -> None:
    spec = json.loads(sys.argv[1])

    def die(event: protocol.Event) -> None:
        if type(event).__name__ == spec["at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    config = {"spark.ui.enabled": "false", **loaded_daemon.SETTINGS}  # the JVM is there
    spark = ts.spark_session("changed", master="local[2]", config=config)
    sums(spec, spec["program"], spec["parallelism"]).start(
        spark, checkpoint=spec["checkpoint"], listener=die, trigger={"availableNow": True}
    ).awaitTermination()


if __name__ == "__main__":
    main()

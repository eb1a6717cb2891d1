"""A processor under Spark's own transformWithState: what went in, by which clock, what came out."""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StatefulProcessor

INPUT = (
    "k string, n int, v string, ms bigint, ts timestamp, x double, day date, "
    "amount decimal(10,2), tags array<string>"
)
OUTPUT = "k string, what string, val string"
DEADLINE_S = 240
POLL_S = 0.02
_STARTING = threading.Lock()
"""Spark gives the Python process that a query starts with 10 s, however many start at a time."""


class Batch(NamedTuple):
    """One micro-batch: its input files by number, its clock, what it gave."""

    files: tuple[int, ...]
    now: int
    watermark: int
    rows: list[tuple[str, str, str]]


class Stream:
    """A query over files, one per micro-batch; it can be started again with other processors.

    Args:
        spark: the session.
        folder: for its files and its checkpoint.
        mode: timeMode.
    """

    def __init__(self, spark: SparkSession, folder: Path, mode: str = "None") -> None:
        self._spark, self._mode = spark, mode
        self._input, self._checkpoint = folder / "input", folder / "checkpoint"
        self._input.mkdir(parents=True)
        self._rows: dict[int, list[Any]] = {}
        self._files = 0

    def run(
        self,
        processor: StatefulProcessor,
        files: Sequence[Sequence[dict[str, Any]]],
        *,
        is_pandas: bool = False,
        keys: tuple[str, ...] = ("k",),
        initial: Any = None,
    ) -> None:
        """Process the files, each in its batch, and stop."""
        frame = self._spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1)
        frame = frame.json(str(self._input))
        if self._mode == "EventTime":
            frame = frame.withWatermark("ts", "2 seconds")
        grouped = frame.groupBy(*keys)
        apply = grouped.transformWithStateInPandas if is_pandas else grouped.transformWithState
        given = {} if initial is None else {"initialState": initial.groupBy(*keys)}
        writer = apply(processor, OUTPUT, "Append", self._mode, **given).writeStream
        writer = writer.option("checkpointLocation", str(self._checkpoint)).foreachBatch(self._keep)
        if self._mode != "ProcessingTime":
            for file in files:
                self._write(file)
            writer.trigger(availableNow=True).start().awaitTermination()
            return
        # Batches without data follow each other all the time here: a query never comes to an end.
        with _STARTING:
            query = writer.trigger(processingTime="400 milliseconds").start()
            self._write(files[0])
            self._wait(query)
        for file in files[1:]:
            self._write(file)
            self._wait(query)
        query.stop()

    def batches(self) -> list[Batch]:
        """What Spark's logs and the query say of the batches that it has finished."""
        batches_run = []
        before = -1
        for number in sorted(int(path.name) for path in self._logged("commits")):
            _, clock, source = (self._checkpoint / "offsets" / str(number)).read_text().split("\n")
            at = json.loads(clock)
            now, watermark = at["batchTimestampMs"], at["batchWatermarkMs"]
            last = before if source == "-" else json.loads(source)["logOffset"]
            files = tuple(range(before + 1, last + 1))
            batches_run.append(Batch(files, now, watermark, self._rows[number]))
            before = last
        return batches_run

    def _logged(self, log: str) -> list[Path]:
        return [path for path in (self._checkpoint / log).glob("*") if path.name.isdigit()]

    def _keep(self, frame: Any, number: int) -> None:
        self._rows[number] = [tuple(row) for row in frame.collect()]

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        hidden = self._input / f".{self._files}"
        hidden.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(hidden, (self._files, self._files))  # Spark goes by the age of files
        hidden.rename(self._input / f"{self._files}.json")
        self._files += 1

    def _wait(self, query: Any) -> None:
        """Until all files are processed, and a batch without data after them."""
        deadline = time.monotonic() + DEADLINE_S
        while not (done := self.batches()) or done[-1].files or not self._has_all(done):
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline, "Spark is not done with a file"
            time.sleep(POLL_S)

    def _has_all(self, done: list[Batch]) -> bool:
        return sum(len(batch.files) for batch in done) == self._files

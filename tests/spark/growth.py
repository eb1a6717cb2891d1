"""A campaign that tells what an epoch leaves for ever: files, memory, threads and descriptors.

    python -m tests.spark.growth [--epochs 1000] [--modes stateless,keyed] [--results growth.jsonl]

One query per mode runs small epochs as fast as it can. At each of `SAMPLES` points it has nothing
to do for a moment, garbage is collected in Python and in the JVM, and everything is measured. What
is left then must not grow: the median of the last third of the samples may be above that of the
middle third by what `ALLOWED` says, and no more. The functions of pipelines hold 2 MiB, as one that
holds a table or a model does.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import tallystick as ts
from tallystick.run.query import Query
from tallystick.testing import EmbeddedKafka
from tests.spark.topics import numbered, produce, read_committed

SAMPLES = 20
EPOCH_RECORDS = 20
PARTITIONS = 2
HELD_BYTES = 2 << 20
CONFIG = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    # What Spark keeps of the past grows up to these bounds: a campaign has to get beyond them.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "50",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.numRecentProgressUpdates": "20",
}
MIB = 1 << 20
ALLOWED = {
    "local disk": 2 * MIB,
    "local files": 20,
    "checkpoint": MIB,
    "checkpoint files": 120,  # old ones are removed at every fiftieth epoch: a sawtooth
    "state copies": MIB,
    "driver memory": 6 * MIB,
    "driver threads": 4,
    "driver descriptors": 6,
    "JVM heap": 6 * MIB,
    "JVM threads": 12,
    "JVM descriptors": 20,
    "worker memory": 16 * MIB,
    "worker processes": 2,
}
"""How far apart two levels may be where nothing leaks; threads and connections come and go."""
POOLS = ("block-manager-", "shuffle-exchang", "ResultQueryStag", "QueryStageCreat")
"""What the system calls threads of Spark's that a job makes and a minute without work ends.

How many there are says how many epochs the last minute had, so they are not counted.
"""

Sample = dict[str, int]


@dataclass(frozen=True)
class Place:
    """Where a campaign runs."""

    spark: SparkSession
    kafka: EmbeddedKafka
    folder: Path

    def source(self, **settings: Any) -> ts.KafkaSource:
        """The input, in small epochs."""
        return ts.KafkaSource(
            self.kafka.bootstrap_servers,
            topics=["in"],
            starting_offsets="earliest",
            max_offsets_per_trigger=EPOCH_RECORDS,
            **settings,
        )

    def sink(self, **settings: Any) -> ts.KafkaSink:
        """The output."""
        return ts.KafkaSink(self.kafka.bootstrap_servers, topic="out", **settings)

    def rows(self) -> Any:
        """The input as a DataFrame."""
        options = {
            **self.kafka.kafka_options,
            "subscribe": "in",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(EPOCH_RECORDS),
        }
        stream = self.spark.readStream.format("tallystick").options(**options).load()
        return stream.select("key", "value")

    @property
    def checkpoint(self) -> str:
        """Of the query."""
        return str(self.folder / "checkpoint")


def looking_up() -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """A function that holds as much as one with a table or a model; made here, for the workers."""
    leak = os.urandom(HELD_BYTES)

    def looked_up(rows: pa.RecordBatch) -> pa.RecordBatch:
        assert len(leak) > 1
        return rows.select(["key", "value"])

    return looked_up


def counted() -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """The output of an aggregate as records."""
    leak = os.urandom(HELD_BYTES)

    def as_records(rows: pa.RecordBatch) -> pa.RecordBatch:
        assert len(leak) > 1
        text = pc.cast(rows.column("n"), pa.string())
        return pa.record_batch({"key": rows.column("key"), "value": text})

    return as_records


def _pipeline(place: Place, pipeline: ts.Pipeline, execution: Any = None) -> Query:
    return pipeline.start(place.spark, checkpoint=place.checkpoint, execution=execution)


def stateless(place: Place, execution: Any = None) -> Query:
    """One transaction per epoch."""
    read = ts.Pipeline("growth").read(place.source())
    return _pipeline(place, read.map_batches(looking_up()).write(place.sink()), execution)


def stateless_jobs(place: Place) -> Query:
    """The same, each epoch a Spark job."""
    return stateless(place, "jobs")


def keyed(place: Place, execution: Any = None) -> Query:
    """The same with a keyed step."""
    read = ts.Pipeline("growth").read(place.source())
    rows = read.map_batches(looking_up(), schema="key binary, value binary")
    counts = rows.key_by("key").process(ts.aggregate({"n": ts.count()}), uid="counts")
    return _pipeline(place, counts.map_batches(counted()).write(place.sink()), execution)


def keyed_jobs(place: Place) -> Query:
    """The same, each epoch a Spark job."""
    return keyed(place, "jobs")


def task(place: Place) -> Query:
    """One transaction per task."""
    read = ts.Pipeline("growth").read(place.source())
    written = read.map_batches(looking_up()).write(place.sink(transactions="task"))
    return _pipeline(place, written)


def transform(place: Place) -> Query:
    """Through a DataFrame."""
    read = ts.Pipeline("growth").read(place.source())
    rows = read.map_batches(looking_up(), schema="key binary, value binary")
    return _pipeline(place, rows.transform(lambda batch: batch).write(place.sink()))


def foreach_batch(place: Place) -> StreamingQuery:
    """A sink after a query of the user's own."""
    writer = place.rows().writeStream.option("checkpointLocation", place.checkpoint)
    return writer.foreachBatch(place.sink(name="growth")).start()


MODES = {
    "stateless": stateless,
    "stateless jobs": stateless_jobs,
    "keyed": keyed,
    "keyed jobs": keyed_jobs,
    "task": task,
    "foreachBatch": foreach_batch,
    "transform": transform,
}


def measure(place: Place) -> Sample:
    """What is there, once nothing is there that nobody needs."""
    jvm: Any = place.spark.sparkContext._jvm
    memory = jvm.java.lang.management.ManagementFactory.getMemoryMXBean()
    heaps = []
    for _ in range(4):
        gc.collect()
        jvm.System.gc()
        time.sleep(0.5)  # Spark removes files on a thread of its own, once it sees what is gone
        heaps.append(int(memory.getHeapMemoryUsage().getUsed()))
    process = int(jvm.java.lang.ProcessHandle.current().pid())
    workers = descendants(process)
    local, checkpoint = files_of(place.folder / "local"), files_of(place.folder / "checkpoint")
    return {
        "local disk": sum(local),
        "local files": len(local),
        "checkpoint": sum(checkpoint),
        "checkpoint files": len(checkpoint),
        "state copies": sum(files_of(place.folder / "state")),
        "driver memory": own_memory(os.getpid()),
        "driver threads": entries(os.getpid(), "task"),
        "driver descriptors": entries(os.getpid(), "fd"),
        "JVM heap": min(heaps),
        "JVM threads": lasting_threads(process),
        "JVM descriptors": entries(process, "fd"),
        "worker memory": sum(map(own_memory, workers)),
        "worker processes": len(workers),
    }


def files_of(folder: Path) -> list[int]:
    """The bytes on disk of each file; one that is removed meanwhile is none."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_blocks * 512)
        except FileNotFoundError:
            continue
    return sizes


def entries(process: int, kind: str) -> int:
    """How many threads or descriptors a process has."""
    return len(list(Path(f"/proc/{process}/{kind}").iterdir()))


def lasting_threads(process: int) -> int:
    """How many threads a JVM has, but for those of `POOLS`."""
    names = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            names.append((thread / "comm").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return sum(not name.startswith(POOLS) for name in names)


def own_memory(process: int) -> int:
    """The bytes that are this process's alone; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def descendants(process: int) -> list[int]:
    """The Python processes below the JVM."""
    pids, unseen = [], [process]
    while unseen:
        parent = unseen.pop()
        try:
            tasks = Path(f"/proc/{parent}/task").iterdir()
            children = [
                int(pid)
                for thread_folder in tasks
                for pid in (thread_folder / "children").read_text().split()
            ]
        except (FileNotFoundError, ProcessLookupError):
            continue
        pids += children
        unseen += children
    return pids


def run(mode: str, epochs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one mode and judge it.

    Returns:
        All that was measured, and under "problems" what has grown.
    """
    with tempfile.TemporaryDirectory(prefix="growth-") as name, EmbeddedKafka() as kafka:
        folder = Path(name)
        os.environ["TALLYSTICK_STATE_DIR"] = str(folder / "state")
        config = {**CONFIG, "spark.local.dir": str(folder / "local")}
        spark = ts.spark_session("growth", master="local[2]", config=config)
        spark.sparkContext.setLogLevel("ERROR")
        ts.register(spark)
        for topic in ("in", "out"):
            kafka.create_topic(topic, PARTITIONS)
        place = Place(spark, kafka, folder)
        begun = time.monotonic()
        query = MODES[mode](place)
        try:
            samples = _sampled(place, query, epochs, say)
        finally:
            query.stop()
        seconds = time.monotonic() - begun
        read = sum(epochs_of * EPOCH_RECORDS for epochs_of in _shares(epochs))
        written = len(read_committed(kafka.confluent_options(), "out"))
        spark.stop()
    if MODES[mode] not in (keyed, keyed_jobs):  # an aggregate writes a row per key and epoch
        assert written == read, f"{read} records were read, {written} written"
    return judged(mode, epochs, round(seconds), samples)


def _shares(epochs: int) -> list[int]:
    """So many epochs between two samples."""
    return [epochs * (i + 1) // SAMPLES - epochs * i // SAMPLES for i in range(SAMPLES)]


def _sampled(
    place: Place, query: Query | StreamingQuery, epochs: int, say: Callable[[str], None]
) -> list[tuple[int, Sample]]:
    confluent, fed, samples = place.kafka.confluent_options(), 0, []
    for share in _shares(epochs):
        # Each partition has half of each epoch, so that the limit makes as many epochs as meant.
        records = numbered(share * EPOCH_RECORDS, first=fed, keys=50)
        for partition in range(PARTITIONS):
            produce(confluent, "in", records[partition::PARTITIONS], partition=partition)
        fed += len(records)
        query.processAllAvailable()
        progress = query.lastProgress
        assert progress is not None, "an epoch has run"
        first = 1 if isinstance(query, Query) else 0
        samples.append((int(progress["batchId"]) + 1 - first, measure(place)))
        say(f"epoch {samples[-1][0]}: {shown(samples[-1][1])}")
    return samples


def judged(
    mode: str, epochs: int, seconds: int, samples: list[tuple[int, Sample]]
) -> dict[str, Any]:
    """The levels of each measure, what it grows by, and whether that is too much."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    ran = samples[-1][0]
    assert ran >= epochs, f"{ran} epochs ran, of {epochs} that were meant"
    levels, problems = {}, []
    for name, allowed in ALLOWED.items():
        low = statistics.median(sample[name] for _, sample in middle)
        high = statistics.median(sample[name] for _, sample in last)
        settled = [(at, sample[name]) for at, sample in samples[third:]]
        levels[name] = {
            "middle": round(low),
            "last": round(high),
            "per 1,000 epochs": round(1000 * slope(settled)),
        }
        if high - low > allowed:
            problems.append(
                f"{name} went from {low:,.0f} to {high:,.0f} between the middle and the last third "
                f"of {ran} epochs; up to {allowed:,} is no growth"
            )
    return {
        "mode": mode,
        "epochs": ran,
        "seconds": seconds,
        "levels": levels,
        "problems": problems,
    }


def slope(points: list[tuple[int, int]]) -> float:
    """How steep a line through points is that lets no single one of them pull it (Theil-Sen)."""
    pairs = [(a, b) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def shown(sample: Sample) -> str:
    """A sample in a line; bytes as MiB."""
    return ", ".join(
        f"{name} {value / MIB:.1f}" if ALLOWED[name] >= MIB else f"{name} {value}"
        for name, value in sample.items()
    )


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the modes one after the other; 1 if anything has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--results", type=Path, help="a line of JSON per mode is appended")
    given = parser.parse_args(None if arguments is None else list(arguments))
    problems = 0
    for mode in given.modes.split(","):
        result = run(mode, given.epochs, lambda text: print(text, flush=True))
        for name, level in result["levels"].items():
            print(f"{mode}: {name}: {level}")
        outcome = "; ".join(result["problems"]) or "no growth"
        print(f"{mode}: {result['epochs']} epochs in {result['seconds']} s: {outcome}", flush=True)
        problems += len(result["problems"])
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
    return min(problems, 1)


if __name__ == "__main__":
    sys.exit(main())

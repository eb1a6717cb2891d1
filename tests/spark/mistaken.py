"""A program with mistakes, made one after the other; prints the errors as a user sees them.

Arguments: the servers, the input topic, the output topic, a folder, the execution, and the names of
mistakes. Before each mistake a line `=== name` is printed to stderr, where errors are printed.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import SparkContext

import tallystick as ts

COLUMNS = ts.Json("id bigint, name string")


class OwnError(Exception):
    """A class that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def misspells(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(["nmae"])


def raises_own(rows: pa.RecordBatch) -> pa.RecordBatch:
    raise OwnError("no such airline: ZZ")


def counts_wrong(batch: Any) -> Any:
    return ts.Update(state={"n": [len(batch.rows) / 0]})


def mistaken(name: str, servers: str, topic: str, output: str) -> Any:
    """Return the pipeline with the mistake of that name."""
    value = ts.Json("id string") if name == "malformed" else COLUMNS
    pipeline = ts.Pipeline(f"{output}-{name}").read(
        ts.KafkaSource(servers, topics=[topic], value=value, starting_offsets="earliest")
    )
    sink = ts.KafkaSink(servers, topic=output, value=ts.Json())
    match name:
        case "misspelt":
            pipeline = pipeline.map_batches(misspells)
        case "own":
            pipeline = pipeline.map_batches(raises_own)
        case "keyed":
            counting = ts.vectorised(counts_wrong, state="n bigint")
            pipeline = pipeline.key_by("name").process(counting, output="name string, n bigint")
        case "when":
            return pipeline.write(ts.when(sink, lambda rows: rows["nmae"]))
        case "transform":
            pipeline = pipeline.transform(lambda rows: rows.select("nmae"))
        case "udf":
            pipeline = pipeline.transform(lambda rows: rows.mapInPandas(fails, "id bigint"))
    return pipeline.write(sink)


def fails(frames: Any) -> Any:
    for frame in frames:
        yield frame[["di"]]


def kill_jvm() -> None:
    """Kill Spark's JVM, as the kernel does where memory is short."""
    gateway: Any = SparkContext._gateway
    os.kill(gateway.proc.pid, signal.SIGKILL)


def main(servers: str, topic: str, output: str, folder: str, execution: Any, *names: str) -> None:
    # Keeps the context alive from mistake to mistake.
    idle = mistaken("idle", servers, topic, output).start(
        checkpoint=str(Path(folder, "idle")), execution="jobs"
    )
    idle.processAllAvailable()
    for name in names:
        print(f"=== {name}", file=sys.stderr, flush=True)
        if name == "jvm":
            kill_jvm()
        try:
            if name == "jvm":
                idle.awaitTermination(60)
            else:
                pipeline = mistaken(name, servers, topic, output)
                checkpoint = str(Path(folder, name))
                has_frames = name in ("transform", "udf")
                pipeline.start(
                    checkpoint=checkpoint, execution=None if has_frames else execution
                ).awaitTermination(60)
        except Exception:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
    print("=== end", file=sys.stderr, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A program with mistakes, made one after the other; prints the errors as a user sees them.

Arguments: the servers, the input topic, the output topic, a folder, the execution, and the names of
mistakes. Before each mistake a line `=== name` is printed to stderr, where errors are printed.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql.functions import pandas_udf
from pyspark.sql.types import LongType

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


class EndsError(BaseException):
    """No Exception, as of libraries that want to end the program."""


def ends(rows: pa.RecordBatch) -> pa.RecordBatch:
    raise EndsError("enough")


def one_value(rows: pa.RecordBatch) -> Any:
    return rows.filter(rows["id"][0] > 1)


def imports_nothing(rows: pa.RecordBatch) -> pa.RecordBatch:
    import no_such_library  # type: ignore[import-not-found]  # noqa: F401

    return rows


@pandas_udf(LongType())
def shortened(ids: pd.Series) -> pd.Series:
    return ids.head(1)


def fails(frames: Any) -> Any:
    for frame in frames:
        yield frame[["di"]]


def processed(function: Any) -> Any:
    """Return the step that calls a vectorised function for the rows of each name."""
    keyed = ts.vectorised(function, state="n bigint")
    return lambda rows: rows.key_by("name").process(keyed, output="name string, n bigint")


STEPS: dict[str, Any] = {
    "misspelt": lambda rows: rows.map_batches(misspells),
    "own": lambda rows: rows.map_batches(raises_own),
    "ends": lambda rows: rows.map_batches(ends),
    "exits": lambda rows: rows.map_batches(lambda batch: sys.exit("enough")),
    "scalar": lambda rows: rows.map_batches(one_value),
    "module": lambda rows: rows.map_batches(imports_nothing),
    "keyed": processed(counts_wrong),
    "no_update": processed(lambda batch: batch.rows),
    "column": processed(lambda batch: batch.sum("nmae")),
}
"""The step with the mistake, by the name of the mistake."""
FRAME_STEPS: dict[str, Any] = {
    "transform": lambda rows: rows.select("nmae"),
    "udf": lambda rows: rows.mapInPandas(fails, "id bigint"),
    "short": lambda rows: rows.withColumn("n", shortened("id")),
    "cast": lambda rows: rows.selectExpr("cast(name as int) as n"),
}
"""The function of `transform`; without a name, as in a program."""
PREDICATES: dict[str, Any] = {"when": lambda rows: rows["nmae"], "frame": lambda rows: rows}


def mistaken(name: str, servers: str, topic: str, output: str) -> Any:
    """Return the pipeline with the mistake of that name."""
    value = ts.Json("id string") if name == "malformed" else COLUMNS
    pipeline: Any = ts.Pipeline(f"{output}-{name}").read(
        ts.KafkaSource(servers, topics=[topic], value=value, starting_offsets="earliest")
    )
    sink: Any = ts.KafkaSink(servers, topic=output, value=ts.Json())
    if name in PREDICATES:
        sink = ts.when(sink, PREDICATES[name])
    elif name in FRAME_STEPS:
        pipeline = pipeline.transform(FRAME_STEPS[name])
    elif name in STEPS:
        pipeline = STEPS[name](pipeline)
    return pipeline.write(sink)


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
                pipeline.start(
                    checkpoint=checkpoint, execution=None if name in FRAME_STEPS else execution
                ).awaitTermination(60)
        except Exception:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
    print("=== end", file=sys.stderr, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

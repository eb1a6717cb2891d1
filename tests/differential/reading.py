"""How cases are read, the same for both connectors; runs in the test and in Spark's process."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as compute
from pyspark.sql import DataFrame, SparkSession, functions

from tests.spark import jvm
from tests.spark.flow import finish

SESSION = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": jvm.options(),
    **jvm.INTERPRETED,
}
CASE = "case"
"""The column that says which case a row was read for."""
PLACE = [(name, "ascending") for name in ("topic", "partition", "offset")]


@dataclass(frozen=True, slots=True)
class Case:
    """Options under which a query reads, the same for both.

    Args:
        options: of the source.
        streaming: whether with `readStream` and Trigger.AvailableNow.
        fails: whether it has to.
        empty: whether no rows are what is right.
    """

    options: Mapping[str, str]
    streaming: bool = False
    fails: bool = False
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Args:
        schema: Spark's, as JSON; "" when it failed.
        rows: in the order of the log.
        epochs: the number of rows of each micro-batch that had some.
        error: what Spark raised; "" when it did not.
    """

    schema: str
    rows: pa.Table
    epochs: list[int] = field(default_factory=list)
    error: str = ""

    def save(self, path: Path) -> None:
        """Write it to a file."""
        outcome = {"schema": self.schema, "epochs": self.epochs, "error": self.error}
        rows = self.rows.replace_schema_metadata({"outcome": json.dumps(outcome)})
        with pa.ipc.new_file(path, rows.schema) as file:
            file.write_table(rows)


def load(path: Path) -> Outcome:
    """Read what `Outcome.save` wrote."""
    with pa.ipc.open_file(path) as file:
        rows = file.read_all()
    outcome = json.loads(rows.schema.metadata[b"outcome"])
    return Outcome(rows=rows.replace_schema_metadata(None), **outcome)


def read_all(
    spark: SparkSession, source: str, cases: Mapping[str, Case], folder: Path
) -> dict[str, Outcome]:
    """Read cases with one of the connectors.

    Those that should work are read together, in one batch query and one streaming query: most of
    what a query of a few rows takes is the query. If that fails, each tells by itself.

    Args:
        spark: a session that knows `source`.
        source: for `format`.
        cases: what to read, by name.
        folder: for checkpoints.
    """
    outcomes: dict[str, Outcome] = {}
    for streaming, read in ((False, _at_once), (True, _to_the_end)):
        frames: dict[str, DataFrame] = {}
        for name, case in cases.items():
            if case.streaming == streaming:
                try:
                    reader = spark.readStream if streaming else spark.read
                    frames[name] = reader.format(source).options(**case.options).load()
                except Exception as error:  # whatever it is: the test judges
                    outcomes[name] = _failure(error)
        alone = [name for name in frames if cases[name].fails]
        try:
            outcomes |= read(_subset(frames, set(frames) - set(alone)), folder / source)
        except Exception:
            alone = list(frames)
        for number, name in enumerate(alone):
            try:
                outcomes |= read({name: frames[name]}, folder / f"{source}-{number}")
            except Exception as error:
                outcomes[name] = _failure(error)
    return outcomes


def _subset(frames: dict[str, DataFrame], names: set[str]) -> dict[str, DataFrame]:
    return {name: frame for name, frame in frames.items() if name in names}


def _failure(error: Exception) -> Outcome:
    return Outcome("", pa.table({}), error=f"{type(error).__name__}: {error}")


def _at_once(frames: dict[str, DataFrame], _: Path) -> dict[str, Outcome]:
    return _apart(frames, _together(frames).toArrow(), {})


def _to_the_end(frames: dict[str, DataFrame], folder: Path) -> dict[str, Outcome]:
    table = folder.name.replace("-", "_")
    frame = _together(frames)
    writer = frame.writeStream.format("memory").queryName(table)
    writer = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True)
    query = finish(writer.start)
    epochs = {
        name: [rows for epoch in query.recentProgress if (rows := _rows_of(epoch, place))]
        for place, name in enumerate(frames)
    }
    return _apart(frames, frame.sparkSession.table(table).toArrow(), epochs)


def _rows_of(epoch: Any, place: int) -> int:
    """So many rows an epoch had of the source in a place of the query."""
    return int(epoch["sources"][place]["numInputRows"])


def _together(frames: dict[str, DataFrame]) -> DataFrame:
    named = [frame.withColumn(CASE, functions.lit(name)) for name, frame in frames.items()]
    return reduce(partial(DataFrame.unionByName, allowMissingColumns=True), named)


def _apart(
    frames: dict[str, DataFrame], rows: pa.Table, epochs: Mapping[str, list[int]]
) -> dict[str, Outcome]:
    return {
        name: Outcome(
            frame.schema.json(),
            _in_order(rows.filter(compute.equal(rows[CASE], name)).select(frame.columns)),
            epochs.get(name, []),
        )
        for name, frame in frames.items()
    }


def _in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by(PLACE).replace_schema_metadata(None)

"""How a case is read, the same for both connectors; runs in the test and in Spark's process."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

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


def read(spark: SparkSession, source: str, name: str, case: Case, folder: Path) -> Outcome:
    """Read a case with one of the connectors.

    Args:
        spark: a session that knows `source`.
        source: for `format`.
        name: of the case.
        case: what to read.
        folder: for checkpoints.
    """
    try:
        if case.streaming:
            return _follow(spark, source, name, case, folder)
        frame = spark.read.format(source).options(**case.options).load()
        return Outcome(frame.schema.json(), _in_order(frame.toArrow()))
    except Exception as error:  # whatever it is: the test judges
        return Outcome("", pa.table({}), error=f"{type(error).__name__}: {error}")


def _follow(spark: SparkSession, source: str, name: str, case: Case, folder: Path) -> Outcome:
    frame = spark.readStream.format(source).options(**case.options).load()
    table = f"{source}_{name}".replace(" ", "_")
    writer = frame.writeStream.format("memory").queryName(table)
    writer = writer.option("checkpointLocation", str(folder / table)).trigger(availableNow=True)
    query = finish(writer.start)
    epochs = [
        progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]
    ]
    rows = _in_order(spark.table(table).toArrow())
    return Outcome(frame.schema.json(), rows, epochs)


def _in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by(PLACE).replace_schema_metadata(None)

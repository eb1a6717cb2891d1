"""`read_state`: the committed state of a step as a DataFrame."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from tallystick.api.kafka_source import client_config
from tallystick.checkpoint.newest_committed import newest_committed
from tallystick.checkpoint.newest_epoch import Ask
from tallystick.checkpoint.savepoint_folder import whole_uri
from tallystick.checkpoint.state_contents import chunks_of, contents_of
from tallystick.epoch import savepoint as s
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.ops.ask_kafka import asking
from tallystick.ops.state_columns import schema_of, table_of
from tallystick.ports import Storage
from tallystick.state.catalog import StepState
from tallystick.state.key_groups import KeyGroupRange, key_group_range
from tallystick.storage.file_storage import FileStorage


def read_state(
    spark: SparkSession,
    checkpoint: str,
    step: str | None = None,
    *,
    bootstrap_servers: str | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The state of a keyed step, a row per key.

    Columns: those of the key, `key_group`, the states (see `state_columns`), and `timers` in
    milliseconds. Of the newest committed epoch when this is called; read lazily, so a pipeline that
    goes on for more than ten epochs may collect the files before they are read: read from a
    savepoint then.

    Args:
        spark: a session; its tasks read the files.
        checkpoint: of a pipeline, running or not; or a savepoint.
        step: the uid; may be left out where there is one keyed step.
        bootstrap_servers: of the cluster that the pipeline writes to, which is asked whether the
            newest epoch is decided where no file says so: of a pipeline that reads without a
            pause, or was killed.
        options: what the client needs besides, as `KafkaSink(options=…)` has them.

    Raises:
        OptionError: there is no such step, or no committed epoch; or Kafka has to be asked.
        ManifestError: the manifest is missing or damaged.
        DataLossError: Kafka does not tell what is decided last.
    """
    storage = FileStorage(checkpoint)
    ask = None
    if bootstrap_servers is not None:
        ask = asking(client_config(bootstrap_servers, options or {}))
    found = _step(storage, step, ask)
    count = min(
        found.max_parallelism, max(found.parallelism, spark.sparkContext.defaultParallelism)
    )
    reading = _Reading(whole_uri(checkpoint), found, count)
    schema = from_arrow_schema(schema_of(found))
    return spark.range(0, count, 1, count).mapInArrow(reading.read, schema)


@dataclass(frozen=True)
class _Reading:
    """What each of `count` tasks reads."""

    checkpoint: str = field(repr=False)  # credentials may stand in it
    step: StepState
    count: int

    def read(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of the key groups that have these numbers."""
        storage = FileStorage(self.checkpoint)
        for batch in numbers:
            for index in batch.column(0).to_pylist():
                groups = key_group_range(self.step.max_parallelism, self.count, index)
                yield from self._rows(groups, storage)

    def _rows(self, groups: KeyGroupRange, storage: Storage) -> Iterator[pa.RecordBatch]:
        for part in chunks_of(self.step, groups):
            entries = contents_of(self.step, part, storage)
            if entries.num_rows:
                yield table_of(self.step, entries)


def _step(storage: Storage, uid: str | None, ask: Ask | None) -> StepState:
    if storage.get(s.FILE) is not None:
        state = savepoints.read(storage).manifest.state
    else:
        state = newest_committed(storage, ask).manifest.state
    found = [step for step in state if uid in (None, step.uid)]
    if len(found) != 1:
        names = ", ".join(repr(step.uid) for step in state) or "none"
        wanted = "name the step" if uid is None else f"there is no step {uid!r}"
        raise OptionError(f"{storage.location}: {wanted}; its keyed steps are: {names}.")
    return found[0]

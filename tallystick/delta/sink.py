"""The sink that a user writes for a Delta table."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from tallystick.arguments import checked, not_one_of
from tallystick.delta.table import (
    add_columns,
    column_problems,
    columns_of,
    refuse,
    table_problems,
)
from tallystick.epoch.two_phase import Committable, Outcome, Owner, RunFacts, Timeout
from tallystick.errors import OptionError
from tallystick.files.drafts import hidden_folder, parse_name, pending_folder
from tallystick.files.folder import HIDDEN, Folder
from tallystick.files.sink import COMPRESSIONS
from tallystick.host.installed import pip_install
from tallystick.storage.file_storage import shown
from tallystick.storage.places import Place, resolved
from tallystick.text import duration_ms

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from tallystick.delta.publishing import Publisher
    from tallystick.delta.writing import DeltaPlan

WHAT = "path of a Delta table"
logger = logging.getLogger(__name__)


@checked
@dataclass(frozen=True, repr=False)
class DeltaSink:
    """A Delta table to append to, exactly once, with one commit of the table for many epochs.

    Rows go into the columns of the same names; columns that rows do not have become null. Files lie
    in the table's folder as soon as a task has written them, and count when a commit names them.

    Args:
        table: the table's folder: a local path that all executors see, or a URI: `s3://`, `s3a://`,
            with credentials as for checkpoints.
        commit_every: decided epochs wait up to this long for a commit of the table, in ms or as
            "1 minute"; 0: a commit for each epoch. A stop publishes what waits.
        create: create the table where there is none, with the columns of `schema`.
        schema: the columns of the table, checked at the start; those of a new table.
        evolve: columns of `schema` that the table does not have are added to it.
        partition_by: of a table that is created; else it must be the table's own, or be left out.
        compression: none, snappy, gzip, brotli, zstd or lz4.
        uid: names the sink in the pipeline, as long as files may be pending; None: by its place.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    table: Place
    _: KW_ONLY
    commit_every: str | int = "1 minute"
    create: bool = False
    schema: pa.Schema | None = None
    evolve: bool = False
    partition_by: Sequence[str] = ()
    compression: str = "snappy"
    uid: str | None = None

    def __post_init__(self) -> None:
        problems = [*self._wrong_values()]
        try:
            duration_ms("commit_every", self.commit_every)
        except OptionError as error:
            problems.append(str(error))
        try:
            object.__setattr__(self, "table", resolved(self.table, WHAT))
        except OptionError as error:
            problems.insert(0, str(error))
        if problems:
            raise OptionError(f"{self!r}: " + "; ".join(problems))

    def __repr__(self) -> str:
        return f"DeltaSink({shown(self.table)!r}, commit_every={self.commit_every!r})"

    @property
    def kind(self) -> str:
        """See `epoch.two_phase.Sink`."""
        return "delta"

    def check_columns(self, columns: pa.Schema) -> None:
        """Refuse the columns of the last step if the table, where it exists, cannot take them.

        Raises:
            OptionError: a column is unknown, of another type, or missing where it may not be null.
        """
        folder = Folder(str(self.table), "Delta table")
        with _telling(folder):
            table = self._existing(folder)
        wanted = self.schema if table is None else columns_of(table)
        if wanted is None:
            return
        if self.evolve and self.schema is not None:
            new = [field for field in self.schema if field.name not in wanted.names]
            wanted = pa.schema([*wanted, *new])
        refuse(folder.location, list(column_problems(columns, wanted)))

    def _wrong_values(self) -> Iterable[str]:
        if len({*self.partition_by}) < len(self.partition_by):
            yield f"partition_by={list(self.partition_by)!r}: a column is named twice"
        if self.compression not in COMPRESSIONS:
            yield str(not_one_of("compression", self.compression, COMPRESSIONS))
        for setting in ("create", "evolve"):
            if getattr(self, setting) and self.schema is None:
                yield f"{setting}=True needs schema=, the columns of the table"

    def open(self, owner: Owner, facts: RunFacts) -> "OpenDeltaSink":
        """See `epoch.two_phase.Sink`. Creates the table, or adds columns, if told to.

        Raises:
            OptionError: the table does not exist, or cannot be written to as asked.
            RetriableError: the table cannot be read now.
        """
        folder = Folder(str(self.table), "Delta table")
        with _telling(folder):
            table = self._table(folder)
            if self.evolve and self.schema is not None:
                add_columns(table, self.schema)
        location, by = folder.location, tuple(table.metadata().partition_columns)
        problems = list(table_problems(table))
        if self.partition_by and tuple(self.partition_by) != by:
            problems.append(
                f"partition_by={list(self.partition_by)!r}, and the table is partitioned by "
                f"{list(by)!r}"
            )
        if self.schema is not None:
            problems += column_problems(self.schema, columns_of(table))
        refuse(location, problems)
        if not owner.lineage:
            folder.put(f"{HIDDEN}/{PROBE}", b"")
            folder.remove_file(f"{HIDDEN}/{PROBE}")
        from tallystick.delta.publishing import Publisher
        from tallystick.delta.writing import DeltaPlan

        plan = DeltaPlan(
            folder=folder,
            table_id=str(table.metadata().id),
            columns=columns_of(table),
            partition_by=by,
            compression=self.compression,
        )
        every_ms = duration_ms("commit_every", self.commit_every)

        def publisher_of(hidden: str) -> Publisher:
            return Publisher(table, folder, hidden, hidden.partition("/")[2], every_ms)

        own = hidden_folder(replace(owner, lineage=owner.lineage or "-"))  # a path has no gap
        if owner.lineage:
            siblings = own.rpartition("/")[0]
            for lineage in folder.names(siblings):
                if folder.names(f"{siblings}/{lineage}/due"):  # of a run that was killed
                    publisher_of(f"{siblings}/{lineage}").publish()
        return OpenDeltaSink(plan, publisher_of(own))

    def _existing(self, folder: Folder) -> "DeltaTable | None":
        try:
            from deltalake import DeltaTable
        except ImportError:
            raise OptionError(
                f"writing to a Delta table needs deltalake: {pip_install('delta')}"
            ) from None
        url, settings = folder.object_store()
        if not DeltaTable.is_deltatable(url, settings):
            return None
        return DeltaTable(url, storage_options=settings)

    def _table(self, folder: Folder) -> "DeltaTable":
        existing = self._existing(folder)
        if existing is not None:
            return existing
        if not self.create or self.schema is None:
            raise OptionError(
                f"Delta table {folder.location} does not exist. Create it, or say so: "
                f"DeltaSink(…, create=True, schema=pa.schema(…))"
            )
        from deltalake import DeltaTable, Schema

        url, settings = folder.object_store()
        return DeltaTable.create(
            url,
            schema=Schema.from_arrow(self.schema),
            mode="ignore",
            partition_by=list(self.partition_by),
            storage_options=settings,
        )


PROBE = "may-the-driver-write"


@contextmanager
def _telling(folder: Folder) -> Iterator[None]:
    """Raise errors of delta-rs as ours."""
    try:
        yield
    except ImportError:
        raise
    except OptionError:
        raise
    except (OSError, ValueError) as error:
        raise folder.failed("reading the table", error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"_internal", "deltalake"}:
            raise
        raise folder.failed("reading the table", error) from None


class OpenDeltaSink:
    """The driver's side of the sink, for one run. See `epoch.two_phase.TwoPhaseCommitSink`."""

    def __init__(self, plan: "DeltaPlan", publisher: "Publisher") -> None:
        self._plan, self._publisher = plan, publisher

    @property
    def timeout(self) -> Timeout | None:
        """None: files wait without end, as long as no VACUUM removes them."""
        return None

    def plan(self) -> "DeltaPlan":
        """See `TwoPhaseCommitSink.plan`."""
        return self._plan

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`; for an epoch with this committable alone."""
        return self.commit_together((committable,))

    def commit_together(self, committables: Sequence[Committable]) -> Outcome:
        """See `run.participants.CommitsTogether`."""
        return self._publisher.take(committables)

    def check_newest(self, committable: Committable) -> None:
        """See `run.participants.KnowsNewest`."""
        self._publisher.check_newest(committable.checkpoint_id)

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        self._publisher.abort(committable.name, committable.checkpoint_id)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`: a committable for each intent."""
        for name in self._plan.folder.names(pending_folder(hidden_folder(owner))):
            place = parse_name(name)
            if place is not None:
                yield Committable(owner.sink, *place, name, 0, 0)

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        return (
            f"files part-{committable.name}… with {committable.record_count} rows, of epoch "
            f"{committable.checkpoint_id}, task {committable.task}, in {self._plan.folder.location}"
        )

    def close(self) -> None:
        """Publish what is decided and waits."""
        self._publisher.close()

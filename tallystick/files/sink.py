"""The sink that a user writes for Parquet files."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pyarrow as pa

from tallystick.arguments import checked, missing_column, not_one_of
from tallystick.epoch.two_phase import (
    Committable,
    Guarantee,
    Outcome,
    Owner,
    RunFacts,
    Timeout,
    guarantee_problem,
)
from tallystick.errors import OptionError, StorageError
from tallystick.files.drafts import SEEN, Commits, Drafts, hidden_folder
from tallystick.files.folder import HIDDEN, WHAT, Folder
from tallystick.files.writing import FilePlan, is_possible
from tallystick.storage.file_storage import shown
from tallystick.storage.places import Place, resolved

COMPRESSIONS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
PROBE = "may-the-driver-write"
"""Begins the name of a file that is written to find out, and removed."""


@checked
@dataclass(frozen=True, repr=False)
class FileSink:
    """A folder of Parquet files, hidden until their epoch is decided.

    A task writes one file per epoch, `part-<epoch>-<task>-<nonce>-<sink>.parquet`, or one per
    partition; `<sink>` is a hash of the uid.
    Until the commit it lies in `<path>/_tallystick`, where Spark, Hive, DuckDB and pyarrow do not
    look for data.

    Args:
        path: a local path that all executors see (a relative one begins at the working directory),
            or a URI: `s3://`, `s3a://`, `gs://`, `abfss://`, with credentials as for checkpoints.
        partition_by: columns of text, integers, booleans or dates that become folders
            (`dest=ORD/…`, as Hive and Spark name them) and are not in the files.
        compression: none, snappy, gzip, brotli, zstd or lz4.
        row_group_rows: the most rows of a row group.
        guarantee: `exactly_once`; `at_least_once`: files are visible as soon as their task is done,
            so an epoch that runs again is there twice; `none`: also, rows that cannot be written
            are left out with a warning.
        uid: names the sink in the pipeline, as long as files may be pending; None: by its place.
        schema: of all files; None: the schema of each task's first rows.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    path: Place
    _: KW_ONLY
    partition_by: Sequence[str] = ()
    compression: str = "zstd"
    row_group_rows: int = 1_000_000
    guarantee: str = "exactly_once"
    uid: str | None = None
    schema: pa.Schema | None = None

    def __post_init__(self) -> None:
        problems = [*self._wrong_values(), *self._wrong_columns()]
        try:
            object.__setattr__(self, "path", resolved(self.path, WHAT))
        except OptionError as error:
            problems.insert(0, str(error))
        if problems:
            raise OptionError(f"{self!r}: " + "; ".join(problems))

    def __repr__(self) -> str:
        partitions = f", partition_by={list(self.partition_by)}" if self.partition_by else ""
        return f"FileSink({shown(self.path)!r}{partitions}, guarantee={self.guarantee!r})"

    @property
    def kind(self) -> str:
        """See `epoch.two_phase.Sink`."""
        return "files"

    def open(self, owner: Owner, facts: RunFacts) -> "OpenFileSink":
        """See `epoch.two_phase.Sink`: a file is written into the hidden folder."""
        folder = Folder(str(self.path))
        try:
            if owner.lineage:
                folder.put(f"{hidden_folder(owner)}/{SEEN}", b"")
            else:
                probe = f"{HIDDEN}/{PROBE}-{secrets.token_hex(8)}"
                folder.put(probe, b"")
                folder.remove_file(probe)
        except StorageError as error:
            reason = str(error).partition(". Nothing is visible")[0]
            raise OptionError(
                f"{reason}. The path must be writable for the driver, and for all executors: a "
                f"folder, or a place where they may make one"
            ) from None
        plan = FilePlan(
            folder=folder,
            partition_by=tuple(self.partition_by),
            compression=self.compression,
            row_group_rows=self.row_group_rows,
            guarantee=Guarantee(self.guarantee),
            schema=self.schema,
        )
        return OpenFileSink(plan)

    def check_columns(self, columns: pa.Schema) -> None:
        """Refuse the columns of the last step if folders are to be named by another one.

        Raises:
            OptionError: a column of `partition_by` is missing.
        """
        for name in self.partition_by:
            if name not in columns.names:
                raise missing_column(f"{self!r}: partition_by", name, columns.names)

    def _wrong_values(self) -> Iterable[str]:
        if problem := guarantee_problem(self.guarantee):
            yield problem
        if self.compression not in COMPRESSIONS:
            yield str(not_one_of("compression", self.compression, COMPRESSIONS))
        if self.row_group_rows < 1:
            yield f"row_group_rows={self.row_group_rows}: expected at least 1"

    def _wrong_columns(self) -> Iterable[str]:
        by: Any = self.partition_by
        if isinstance(by, str) or not all(isinstance(name, str) and name for name in by):
            yield f"partition_by={by!r}: expected names of columns, such as ['dest']"
            return
        if len(set(by)) != len(by):
            yield f"partition_by={list(by)!r}: a column is named twice"
        if self.schema is None:
            return
        for name in by:
            place = self.schema.get_field_index(name)
            if place < 0:
                yield f"partition_by: column {name!r} is not in schema="
            elif not is_possible(self.schema.field(place).type):
                yield (
                    f"partition_by: column {name!r} is {self.schema.field(place).type}: expected "
                    f"text, integers, booleans or dates"
                )
        if set(by) >= set(self.schema.names):
            yield "partition_by: no column is left for the files"


class OpenFileSink:
    """The driver's side of the sink, for one run. See `epoch.two_phase.TwoPhaseCommitSink`."""

    def __init__(self, plan: FilePlan) -> None:
        self._plan = plan
        self._commits = Commits(plan.folder)

    @property
    def timeout(self) -> Timeout | None:
        """None: drafts wait without end."""
        return None

    def plan(self) -> FilePlan:
        """See `TwoPhaseCommitSink.plan`."""
        return self._plan

    def commit(self, committable: Committable) -> Outcome:
        """See `TwoPhaseCommitSink.commit`; may be called by several threads at once."""
        return self._commits.commit(committable)

    def abort(self, committable: Committable) -> None:
        """See `TwoPhaseCommitSink.abort`."""
        self._commits.abort(committable)

    def lingering(self, owner: Owner) -> Iterable[Committable]:
        """See `TwoPhaseCommitSink.lingering`: of the owner's lineage, below the sink's path."""
        return self._commits.lingering(owner.sink, hidden_folder(owner))

    def describe(self, committable: Committable) -> str:
        """See `TwoPhaseCommitSink.describe`."""
        drafts = Drafts.of(committable)
        where = f"{drafts.location}/{drafts.pending}"
        if drafts.files is None:
            return f"drafts in {where}"
        size = sum(file.size for file in drafts.files)
        return (
            f"{len(drafts.files)} files part-{drafts.name}… with {committable.record_count} rows, "
            f"{size} bytes, of epoch {committable.checkpoint_id}, task {committable.task}; drafts "
            f"in {where}"
        )

    def close(self) -> None:
        """Do nothing: nothing is open between calls."""

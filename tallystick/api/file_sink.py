"""The sink that a user writes for Parquet files."""

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pyarrow as pa

from tallystick.arguments import checked, missing_column
from tallystick.epoch.two_phase import Guarantee, Owner, RunFacts, guarantee_problem
from tallystick.errors import OptionError, StorageError
from tallystick.files.drafts import due_folder, hidden_folder, pending_folder, show_disk
from tallystick.files.folder import HIDDEN, WHAT, Folder
from tallystick.files.sink import OpenFileSink
from tallystick.files.writing import FilePlan, is_possible
from tallystick.storage.file_storage import shown
from tallystick.storage.places import Place, resolved
from tallystick.tables.folder import FolderCommits, FolderLayout
from tallystick.tables.publishing import TARGET_FILE_SIZE, Pace
from tallystick.tables.sink import OpenTableSink, open_sink, wrong_settings
from tallystick.tables.writing import TablePlan
from tallystick.text import duration_ms

PROBE = "may-the-driver-write"
"""Begins the name of a file that is written to find out, and removed."""


@checked
@dataclass(frozen=True, repr=False)
class FileSink:
    """A folder of Parquet files, hidden until their epoch is decided.

    A task writes one file per epoch, `part-<epoch>-<task>-<nonce>-<sink>.parquet`, or one per
    partition; `<sink>` is a hash of the uid. With `commit_every`, files of several epochs are one.
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
        commit_every: decided epochs wait up to this long, in ms or as "1 minute", and their files
            are compacted before they are visible: one publication for many epochs. It needs
            `schema`. A stop publishes what waits. 0: files are visible with their epoch.
        target_file_size: with `commit_every`, files that are smaller are compacted by tasks into
            files of this many bytes, or of less where less is due.

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
    commit_every: str | int = 0
    target_file_size: int = TARGET_FILE_SIZE

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

    def open(self, owner: Owner, facts: RunFacts) -> OpenFileSink | OpenTableSink:
        """See `epoch.two_phase.Sink`: a file is written into the hidden folder."""
        folder = Folder(str(self.path))
        try:
            if owner.lineage:
                show_disk(folder, owner)
            else:
                probe = f"{HIDDEN}/{PROBE}-{secrets.token_hex(8)}"
                put = folder.put_new if self._every_ms else folder.put
                put(probe, b"")
                folder.remove_file(probe)
        except StorageError as error:
            reason = str(error).partition(". Nothing is visible")[0]
            raise OptionError(
                f"{reason}. The path must be writable for the driver, and for all executors: a "
                f"folder, or a place where they may make one"
            ) from None
        self._check_what_waits(folder, owner)
        if self._every_ms:
            return self._open_table(folder, owner)
        plan = FilePlan(
            folder=folder,
            partition_by=tuple(self.partition_by),
            compression=self.compression,
            row_group_rows=self.row_group_rows,
            guarantee=Guarantee(self.guarantee),
            schema=self.schema,
        )
        return OpenFileSink(plan)

    @property
    def _every_ms(self) -> int:
        return duration_ms("commit_every", self.commit_every)

    def _check_what_waits(self, folder: Folder, owner: Owner) -> None:
        """Refuse a change of `commit_every` to or from 0 while files wait as they did before."""
        if not owner.lineage:
            return
        hidden = hidden_folder(owner)
        siblings, pending = hidden.rpartition("/")[0], pending_folder(hidden)
        intents = folder.written_ms(pending)  # of files that wait; other drafts have folders
        if self._every_ms:
            has_others = any(name not in intents for name in folder.names(pending))
        else:
            due = (due_folder(f"{siblings}/{lineage}") for lineage in folder.names(siblings))
            has_others = bool(intents) or any(map(folder.names, due))
        if has_others:
            raise OptionError(
                f"{self!r}: files of a run with{'out' if self._every_ms else ''} commit_every= "
                f"wait in {folder.location}/{siblings}. Start the pipeline as it was and stop it, "
                f"which settles them; then change commit_every="
            )

    def _open_table(self, folder: Folder, owner: Owner) -> OpenTableSink:
        assert self.schema is not None, "checked"
        plan = TablePlan(
            folder=folder,
            table_id="",
            columns=self.schema,
            layout=FolderLayout(tuple(self.partition_by)),
            compression=self.compression,
            row_group_rows=self.row_group_rows,
        )
        pace = Pace(self._every_ms, self.target_file_size)
        return open_sink(plan, owner, lambda app_id: FolderCommits(folder, app_id), pace)

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
        yield from wrong_settings(
            commit_every=self.commit_every,
            target_file_size=self.target_file_size,
            compression=self.compression,
        )
        is_late = False
        with suppress(OptionError):  # told of above
            is_late = bool(self._every_ms)
        if is_late and self.schema is None:
            yield f"commit_every={self.commit_every!r} needs schema=, the columns of all files"
        if is_late and self.guarantee != Guarantee.EXACTLY_ONCE.value:
            yield (
                f"commit_every={self.commit_every!r} with guarantee={self.guarantee!r}: expected "
                f"'exactly_once'"
            )
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

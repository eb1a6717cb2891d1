"""The sink that a user writes for an Iceberg table."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import pyarrow as pa

from tallystick.arguments import checked
from tallystick.epoch.two_phase import Owner, RunFacts
from tallystick.errors import OptionError, StorageError, TallystickError
from tallystick.files.folder import Folder
from tallystick.host.installed import pip_install
from tallystick.iceberg.table import (
    IcebergCommits,
    IcebergLayout,
    columns_of,
    failures,
    table_problems,
)
from tallystick.tables.columns import column_problems, refuse
from tallystick.tables.publishing import TARGET_FILE_SIZE, Pace
from tallystick.tables.sink import OpenTableSink, open_sink, wrong_settings
from tallystick.tables.writing import TablePlan
from tallystick.text import duration_ms

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

MAIN = "main"


@checked
@dataclass(frozen=True, repr=False)
class IcebergSink:
    """An Iceberg table to append to, exactly once, with one snapshot for many epochs.

    Rows go into the columns of the same names; columns that rows do not have become null. Files lie
    in the table's folder as soon as a task has written them, and count when a snapshot names them.
    The rows of each file are in the table's sort order.

    Args:
        catalog: settings of a catalog, as pyiceberg's `load_catalog` takes them, such as
            {"type": "rest", "uri": "https://…"}, with its "name" unless that is "default"; or the
            name of one in pyiceberg's configuration.
        table: the table's name with its namespace: "sales.orders".
        commit_every: decided epochs wait up to this long for a snapshot of the table, in ms or as
            "1 minute"; 0: a snapshot for each epoch. A stop publishes what waits.
        target_file_size: due files that are smaller are compacted by tasks before the commit, into
            files of this many bytes, or of less where less is due.
        create: create the table, and its namespace, where there is none: not partitioned, with the
            columns of `schema`.
        schema: the columns of the table, checked at the start; those of a new table.
        branch: that gets the rows; it is made if there is none. Others are left as they are.
        compression: none, snappy, gzip, brotli, zstd or lz4.
        uid: names the sink in the pipeline, as long as files may be pending; None: by its place.

    Raises:
        OptionError: a setting is of the wrong type, or contradicts another.
    """

    catalog: str | Mapping[str, str]
    table: str
    _: KW_ONLY
    commit_every: str | int = "1 minute"
    target_file_size: int = TARGET_FILE_SIZE
    create: bool = False
    schema: pa.Schema | None = None
    branch: str = MAIN
    compression: str = "zstd"
    uid: str | None = None

    def __post_init__(self) -> None:
        if problems := [*self._wrong_values()]:
            raise OptionError(f"{self!r}: " + "; ".join(problems))

    def __repr__(self) -> str:  # settings of a catalog may be secrets
        return f"IcebergSink({self.table!r}, commit_every={self.commit_every!r})"

    @property
    def kind(self) -> str:
        """See `epoch.two_phase.Sink`."""
        return "iceberg"

    def _wrong_values(self) -> Iterable[str]:
        if not all(self.table.partition(".")):
            yield f"table={self.table!r}: expected its name with its namespace, e.g. 'sales.orders'"
        if not self.branch:
            yield "branch='': expected a name"
        yield from wrong_settings(
            commit_every=self.commit_every,
            target_file_size=self.target_file_size,
            create=self.create,
            schema=self.schema,
            compression=self.compression,
        )

    def check_columns(self, columns: pa.Schema) -> None:
        """Refuse the columns of the last step if the table, where it exists, cannot take them.

        Raises:
            OptionError: a column is unknown, of another type, or missing where it may not be null.
        """
        with self._telling():
            table = self._existing(self._catalog())
        wanted = self.schema if table is None else columns_of(table.schema())
        if wanted is not None:
            refuse(self._name, list(column_problems(columns, wanted)))

    def open(self, owner: Owner, facts: RunFacts) -> OpenTableSink:
        """See `epoch.two_phase.Sink`. Creates the table if told to.

        Raises:
            OptionError: the table does not exist, or cannot be written to as asked.
            RetriableError: the table cannot be read now.
        """
        with self._telling():
            catalog = self._catalog()
            table = self._existing(catalog) or self._created(catalog)
            columns = columns_of(table.schema())
            problems = list(table_problems(table))
            ref = table.metadata.refs.get(self.branch)
            if ref is not None and ref.snapshot_ref_type != "branch":
                problems.append(f"{self.branch!r} is a tag: expected a branch")
            if self.schema is not None:
                problems += column_problems(self.schema, columns)
            refuse(self._name, problems)
            layout = IcebergLayout(
                table.schema().model_dump_json(),
                table.spec().model_dump_json(),
                table.sort_order().model_dump_json(),
                dict(table.properties),
            )
        plan = TablePlan(
            folder=Folder(place_of(table.location(), table.io.properties), "Iceberg table"),
            table_id=str(table.metadata.table_uuid),
            columns=columns,
            layout=layout,
            compression=self.compression,
            order=layout.order,
        )
        return open_sink(
            plan,
            owner,
            lambda app_id: IcebergCommits(table, self.branch, app_id),
            Pace(duration_ms("commit_every", self.commit_every), self.target_file_size),
        )

    @property
    def _name(self) -> str:
        return f"Iceberg table {self.table}"

    def _catalog(self) -> "Catalog":
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError:
            raise OptionError(
                f"writing to an Iceberg table needs pyiceberg: {pip_install('iceberg')}"
            ) from None
        if isinstance(self.catalog, str):
            return load_catalog(self.catalog)
        return load_catalog(**{"name": "default", **self.catalog})

    def _existing(self, catalog: "Catalog") -> "Table | None":
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return catalog.load_table(self.table)
        except NoSuchTableError:
            return None

    def _created(self, catalog: "Catalog") -> "Table":
        if not self.create or self.schema is None:
            raise OptionError(
                f"{self._name} does not exist. Create it, or say so: "
                f"IcebergSink(…, create=True, schema=pa.schema(…))"
            )
        catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
        return catalog.create_table_if_not_exists(self.table, self.schema)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Raise errors of pyiceberg, and of the libraries below it, as ours."""
        try:
            yield
        except TallystickError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise OptionError(f"{self._name}: pyiceberg refuses the settings: {error}") from None
        except failures() as error:
            raise StorageError(
                f"{self._name}: the catalog cannot be asked: {type(error).__name__}: {error}"
            ) from None


def place_of(location: str, settings: Mapping[str, Any]) -> str:
    """Return a table's location with what pyiceberg's settings say about an S3 store.

    What they do not say is taken from the environment, as for checkpoints.
    """
    scheme, separator, rest = location.partition("://")
    if scheme not in ("s3", "s3a"):
        return location
    key, secret = (
        settings.get(f"s3.{name}", "") for name in ("access-key-id", "secret-access-key")
    )
    user = f"{quote(key, safe='')}:{quote(secret, safe='')}@" if key and secret else ""
    options = {"region": settings.get("s3.region")}
    if endpoint := settings.get("s3.endpoint"):
        options["scheme"], _, options["endpoint_override"] = endpoint.rpartition("://")
    query = urlencode({name: value for name, value in options.items() if value})
    return f"{scheme}{separator}{user}{rest}" + (f"?{query}" if query else "")

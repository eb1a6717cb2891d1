"""Helpers for tests of the Iceberg sink: a catalog in a file, and two readers of a table."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fastavro
import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import Transform

import tallystick as ts
from tests.tables import duck

NAME = "sales.orders"


def catalog_in(path: Path) -> dict[str, str]:
    """The settings of a catalog in a folder, whose tables lie there too."""
    path.mkdir(exist_ok=True)
    return {
        "type": "sql",
        "uri": f"sqlite:///{path}/catalog.db",
        "warehouse": f"file://{path}/warehouse",
    }


def sink_in(path: Path, **settings: Any) -> ts.IcebergSink:
    return ts.IcebergSink(catalog_in(path), NAME, **settings)


def make_table(path: Path, columns: pa.Schema) -> None:
    catalog = load_catalog("default", **catalog_in(path))
    catalog.create_namespace(NAME.partition(".")[0])
    catalog.create_table(NAME, columns)


def table_in(path: Path) -> Table:
    return load_catalog("default", **catalog_in(path)).load_table(NAME)


def file_of(uri: str) -> Path:
    return Path(urlsplit(uri).path)


def named_files(path: Path, branch: str = "main") -> list[str]:
    """The data files of the table, of which none may be named twice."""
    files = [str(file_of(file["file_path"])) for file in data_files(path, branch)]
    assert len({*files}) == len(files), "a file was added twice"
    return files


def data_files(path: Path, branch: str = "main") -> list[dict[str, Any]]:
    """Walk from the newest metadata to the data files by hand: no code of the writer."""
    folder = path / "warehouse" / "sales" / "orders" / "metadata"
    newest = max(folder.glob("*.metadata.json"), key=lambda file: int(file.name[:5]))
    metadata = json.loads(newest.read_text())
    if branch not in metadata["refs"]:
        return []
    (snapshot,) = (
        one
        for one in metadata["snapshots"]
        if one["snapshot-id"] == metadata["refs"][branch]["snapshot-id"]
    )
    files = []
    with file_of(snapshot["manifest-list"]).open("rb") as manifests:
        for manifest in fastavro.reader(manifests):
            with file_of(manifest["manifest_path"]).open("rb") as entries:
                files += [
                    entry["data_file"]
                    for entry in fastavro.reader(entries)
                    if entry["status"] != 2  # deleted
                ]
    return files


def rows_by_file(path: Path) -> list[list[dict[str, Any]]]:
    """The rows of each file that the metadata name, in their order, by DuckDB."""
    order = "SELECT * FROM read_parquet($1, file_row_number=true) ORDER BY file_row_number"
    rows = []
    for file in named_files(path):
        found = duck.query(order, file)
        names = [column[0] for column in found.description or ()]
        rows.append([dict(zip(names, row, strict=True)) for row in found.fetchall()])
    return rows


def orders_in(path: Path) -> set[Any]:
    """The sort orders that the metadata tell of the data files."""
    return {file["sort_order_id"] for file in data_files(path)}


def sort_by(path: Path, *keys: tuple[str, str, Transform[Any, Any], NullOrder]) -> None:
    """Set the table's sort order."""
    with table_in(path).update_sort_order() as order:
        for direction, column, transform, nulls in keys:
            getattr(order, direction)(column, transform, nulls)


def values_in(path: Path, column: str, branch: str = "main") -> Counter[Any]:
    """The values that pyiceberg finds, which are those that DuckDB finds in the named files."""
    table = table_in(path)
    snapshot = table.snapshot_by_name(branch)
    if snapshot is None:
        return Counter()
    by_pyiceberg = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()[column].to_pylist()
    files = named_files(path, branch)
    by_duckdb = []
    if files:
        values = duck.query(f"SELECT {column} FROM read_parquet($1)", files).fetchall()
        by_duckdb = [value for (value,) in values]
    assert Counter(by_pyiceberg) == Counter(by_duckdb)
    return Counter(by_duckdb)


def unnamed_in(path: Path, branch: str = "main") -> list[str]:
    """The Parquet files in the table's folder that its newest metadata does not lead to."""
    folder = path / "warehouse" / "sales" / "orders" / "data"
    named = {*named_files(path, branch)}
    return [file.name for file in folder.glob("part-*.parquet") if str(file) not in named]


def epochs_in(path: Path) -> list[str]:
    """The epochs of each snapshot of ours, oldest first."""
    return [
        one.summary["tallystick.epochs"]
        for one in table_in(path).snapshots()
        if one.summary is not None and "tallystick.epochs" in one.summary.additional_properties
    ]


COLUMNS = pa.schema([pa.field("n", pa.int64()), pa.field("dest", pa.string())])

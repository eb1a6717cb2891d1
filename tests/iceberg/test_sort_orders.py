"""Files of the Iceberg sink keep the table's sort order, judged by DuckDB and by the metadata."""

import datetime
import math
import pickle
import struct
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table
from pyiceberg.table.sorting import NullOrder, SortField, SortOrder
from pyiceberg.transforms import (
    BucketTransform,
    IdentityTransform,
    TruncateTransform,
    UnknownTransform,
)

from tallystick.epoch.two_phase import Owner, RunFacts
from tallystick.errors import OptionError
from tallystick.iceberg.order import in_order
from tallystick.tables import writing
from tallystick.tables.sink import OpenTableSink
from tests.delta.delta_sinks import place, prepared
from tests.iceberg.iceberg_sinks import (
    COLUMNS,
    data_files,
    make_table,
    orders_in,
    rows_by_file,
    sink_in,
    sort_by,
    table_in,
    unnamed_in,
    values_in,
)

OWNER = Owner("a/b pipeline", "iceberg-0", "f00d")
IDENTITY = IdentityTransform()


def opened(path: Path, **settings: Any) -> OpenTableSink:
    return sink_in(path, **settings).open(OWNER, RunFacts())


def by_dest_and_number(row: dict[str, Any]) -> tuple[Any, ...]:
    """Two characters of `dest` ascending, nulls last; `n` descending."""
    return row["dest"] is None, (row["dest"] or "")[:2], -row["n"]


def sorted_table(path: Path) -> None:
    make_table(path, COLUMNS)
    sort_by(
        path,
        ("asc", "dest", TruncateTransform(2), NullOrder.NULLS_LAST),
        ("desc", "n", IDENTITY, NullOrder.NULLS_LAST),
    )


def batch(start: int, stop: int) -> pa.RecordBatch:
    dest = [("ORD", "a/b", None, "ORY", "")[n % 5] for n in range(start, stop)]
    return pa.record_batch({"n": range(start, stop), "dest": dest}, COLUMNS)


def test_the_rows_of_each_file_are_sorted_and_its_metadata_say_so(tmp_path: Path) -> None:
    sorted_table(tmp_path)
    sink = opened(tmp_path, commit_every=0)
    first = prepared(sink, place(owner=OWNER), batch(0, 30), batch(30, 50))
    plan = pickle.loads(pickle.dumps(sink.plan()))  # noqa: S301  ours
    elsewhere = plan.begin(place(1, 1, owner=OWNER))
    elsewhere.write(batch(50, 60))
    sink.commit_together([*first, *elsewhere.prepare()])
    files = rows_by_file(tmp_path)
    assert sorted(map(len, files)) == [10, 50]
    for rows in files:
        assert rows == sorted(rows, key=by_dest_and_number)
    assert sorted(values_in(tmp_path, "n")) == list(range(60))
    assert orders_in(tmp_path) == {table_in(tmp_path).sort_order().order_id} == {1}


def test_a_file_ends_where_no_more_rows_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of partitions, and each file is sorted by itself; an abort removes all."""
    sorted_table(tmp_path)
    with table_in(tmp_path).update_spec() as spec:
        spec.add_field("n", BucketTransform(2))
    monkeypatch.setattr(writing, "BUFFER_BYTES_MAX", 400)
    sink = opened(tmp_path, commit_every=0)
    batches = [batch(start, start + 20) for start in range(0, 200, 20)]
    stray = sink.plan().begin(place(nonce="bb", owner=OWNER))
    for rows in batches:
        stray.write(rows)
    assert len(unnamed_in(tmp_path)) > 2
    stray.abort()
    assert unnamed_in(tmp_path) == []
    sink.commit_together(prepared(sink, place(owner=OWNER), *batches))
    files = rows_by_file(tmp_path)
    assert len(files) > 4
    for of_file in files:
        assert of_file == sorted(of_file, key=by_dest_and_number)
    assert sorted(values_in(tmp_path, "n").elements()) == list(range(200))
    assert unnamed_in(tmp_path) == []


def test_an_order_that_changes_holds_for_later_files(tmp_path: Path) -> None:
    sorted_table(tmp_path)
    before = opened(tmp_path, commit_every="1 hour")
    before.commit_together(prepared(before, place(owner=OWNER), batch(0, 9)))
    sort_by(tmp_path, ("asc", "n", IDENTITY, NullOrder.NULLS_FIRST))
    before.close()
    after = opened(tmp_path, commit_every=0)
    after.commit_together(prepared(after, place(2, owner=OWNER), batch(9, 20)))
    told = {file["record_count"]: file["sort_order_id"] for file in data_files(tmp_path)}
    assert told == {9: 1, 11: 2}
    by_count = {len(rows): rows for rows in rows_by_file(tmp_path)}
    assert by_count[9] == sorted(by_count[9], key=by_dest_and_number)
    assert [row["n"] for row in by_count[11]] == list(range(9, 20))


def test_an_order_that_cannot_be_kept_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_table(tmp_path)
    unknown = SortOrder(SortField(2, UnknownTransform("zorder")))
    monkeypatch.setattr(Table, "sort_order", lambda _: unknown)
    with pytest.raises(OptionError, match=r"sort field .*'zorder'.* of 'dest': NotImpl"):
        opened(tmp_path)


NAN, LOW_NAN = math.nan, struct.unpack("d", struct.pack("Q", 0xFFF8000000000000))[0]
DAY = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
IN_ORDER: dict[str, tuple[Any, list[Any]]] = {
    "double": (pa.float64(), [LOW_NAN, -math.inf, -1.5, -0.0, 0.0, 2.5, math.inf, NAN]),
    "float": (pa.float32(), [-math.inf, -1.5, -0.0, 0.0, 2.5, math.inf, NAN]),
    "boolean": (pa.bool_(), [False, True]),
    "integer": (pa.int32(), [-3, 0, 7]),
    "decimal": (pa.decimal128(10, 2), [Decimal("-1.50"), Decimal("0.25"), Decimal("3.00")]),
    "text": (pa.string(), ["", "B", "a", "é", "\U0001f600"]),
    "bytes": (pa.binary(), [b"", b"\x00", b"\x7f", b"\x80"]),
    "uuid": (pa.uuid(), [uuid.UUID(int=1), uuid.UUID(int=1 << 100), uuid.UUID(int=1 << 127)]),
    "fixed": (pa.binary(2), [b"\x00\x01", b"\x7f\x00", b"\x80\x00"]),
    "date": (pa.date32(), [DAY.date(), datetime.date(2026, 3, 1)]),
    "time": (pa.time64("us"), [datetime.time(0, 1), datetime.time(23)]),
    "moment": (pa.timestamp("us", "UTC"), [DAY, DAY + datetime.timedelta(hours=3)]),
}


@pytest.mark.parametrize("nulls", NullOrder)
@pytest.mark.parametrize("direction", ["asc", "desc"])
@pytest.mark.parametrize("name", IN_ORDER)
def test_each_type_is_sorted_as_iceberg_means_it(
    tmp_path: Path, name: str, direction: str, nulls: NullOrder
) -> None:
    kind, values = IN_ORDER[name]
    make_table(tmp_path, pa.schema([("at", pa.int64()), ("value", kind)]))
    sort_by(tmp_path, (direction, "value", IDENTITY, nulls))
    table = table_in(tmp_path)
    wanted = [(at, value) for at, value in enumerate(values)][:: 1 if direction == "asc" else -1]
    none = [(-1, None), (-2, None)]
    wanted = [*none, *wanted] if nulls is NullOrder.NULLS_FIRST else [*wanted, *none]
    mixed = [*wanted[::2], *wanted[1::2]][::-1]
    mixed.sort(key=lambda row: row[0] == -2)  # equal rows stay as they are
    rows = pa.table({"at": [at for at, _ in mixed], "value": pa.array([v for _, v in mixed], kind)})
    found = in_order(rows, table.sort_order(), table.schema())["at"].to_pylist()
    assert found == [at for at, _ in wanted]
    opened(tmp_path).close()  # is not refused

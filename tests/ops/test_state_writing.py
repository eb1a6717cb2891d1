"""A table written as state is the state: read back equal, and taken up by the step."""

import datetime
import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tallystick as ts
from tallystick.checkpoint.state_files import contents_of, write_changelog
from tallystick.epoch.manifest import Manifest
from tallystick.epoch.savepoint import FILE, Savepoint
from tallystick.errors import OptionError
from tallystick.ops import savepoints
from tallystick.ops.state_entries import entries_from
from tallystick.ops.state_table import schema_of, table_of
from tallystick.pipeline.input_planning import text_of
from tallystick.source.offsets import SourceOffsets, from_text
from tallystick.state.catalog import StateField, StepState, Version
from tallystick.state.entries import TIMERS_BY_TIME, ids_of
from tallystick.state.file_sets import extend
from tallystick.state.functions.vectorised import TIMER
from tallystick.state.key_groups import KeyGroupRange, key_groups_of
from tallystick.state.keys import KeyCodec
from tallystick.state.schema import text_of as schema_text
from tallystick.storage.file_storage import FileStorage
from tallystick.values import Producer, TopicPartition
from tests.examples import drawn
from tests.ops.test_cli_savepoint import call
from tests.ops.test_state_columns import A_DAY, FIELDS, STEP, USERS, entries_of

LASTING = replace(STEP, fields=tuple(replace(field, ttl_ms=0) for field in FIELDS))
TIMED = pa.schema([("n", pa.int64()), (TIMER, pa.int64())])


def save(folder: Path, *steps: StepState) -> FileStorage:
    """A savepoint of steps whose files lie in its folder already."""
    storage = FileStorage(str(folder))
    manifest = Manifest(1, "job", "lineage", ("{}",), (), Producer("t", 1, 1), steps)
    saved = Savepoint(folder.name, "2026-11-27T00:00:00+00:00", "file:///cp", "m/1", manifest)
    storage.put(FILE, saved.encode())
    return storage


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    storage = FileStorage(str(tmp_path / "saved"))
    steps = []
    rows = table_of(STEP, entries_of())
    lasting_pair = pa.array(rows["pair"].to_pylist(), schema_of(LASTING).field("pair").type)
    rows = rows.set_column(rows.schema.names.index("pair"), "pair", lasting_pair)
    lasting = entries_from(LASTING, rows, 0)
    for uid, step, entries in (("step", LASTING, lasting), ("other", STEP, entries_of())):
        file = write_changelog(storage, uid, 1, 0, "n", pa.Table.from_batches([entries]))
        assert file is not None
        steps.append(extend(replace(step, uid=uid), Version(1, "t"), [file]))
    save(tmp_path / "saved", *steps)
    return tmp_path / "saved"


def rows_in(folder: Path, uid: str = "step") -> pa.Table:
    storage = FileStorage(str(folder))
    (step,) = (s for s in savepoints.read(storage).manifest.state if s.uid == uid)
    entries = contents_of(step, KeyGroupRange(0, step.max_parallelism - 1), storage)
    return pa.Table.from_batches([table_of(step, entries)])


def by_key(rows: pa.Table, *key: str) -> Mapping[Any, Any]:
    listed = rows.to_pylist()
    assert len({tuple(row[name] for name in key) for row in listed}) == len(listed)
    return {tuple(row[name] for name in key): row for row in listed}


WHOLE = pa.table(
    [
        ["ann", "bob", None, "cid\0"],
        [1, 2, 4, 3],
        [0, 0, 0, 0],
        [7, None, None, None],
        ["x", None, "y", None],
        [None, {"a": 1, "b": A_DAY}, {"a": None, "b": None}, None],
        [[{"name": "p"}, {"name": None}], None, None, [{"name": "q"}]],
        [None, [({"name": "k"}, {"name": "v"})], None, None],
        [[-3, 9], [4], None, [0]],
    ],
    schema=schema_of(LASTING),
)
"""A table for each kind of state, with other values than the savepoint has."""


def test_the_table_is_the_state_and_other_steps_stay(saved: Path, tmp_path: Path) -> None:
    ts.write_state(WHOLE, saved, "step", to=tmp_path / "new")

    after = by_key(rows_in(tmp_path / "new"), "user")
    wanted = by_key(WHOLE, "user")
    groups = key_groups_of(
        KeyCodec.from_text(STEP.key_schema).hash_codes(WHOLE.combine_chunks().to_batches()[0]), 128
    )
    for row, group in zip(wanted.values(), groups, strict=True):
        row["key_group"] = group
    assert after == wanted
    assert rows_in(tmp_path / "new", "other").equals(rows_in(saved, "other"))
    old, new = (savepoints.read(FileStorage(str(f))).manifest for f in (saved, tmp_path / "new"))
    assert replace(new, state=()) == replace(old, state=())
    assert new.state[0].version != old.state[0].version, "no local copy of the old may be taken"
    savepoints.restore(FileStorage(str(tmp_path / "new")), FileStorage(str(tmp_path / "cp")))


def test_what_was_read_is_written_as_the_step_wrote_it() -> None:
    """Byte by byte, but for a list that was emptied and the dropped state."""
    wanted = {}
    for key, value in zip(*(column.to_pylist() for column in entries_of().columns), strict=True):
        is_emptied_list = key[2] == 3 and b"cid" in key
        if key[2] != 4 and not is_emptied_list:
            wanted[key] = value

    entries = entries_from(STEP, table_of(STEP, entries_of()), 0)

    assert entries.to_pylist() == [{"key": key, "value": wanted[key]} for key in sorted(wanted)]


TEXT = st.none() | st.text(max_size=5)
STRUCT = st.none() | st.fixed_dictionaries({"name": TEXT})
NAMES = st.fixed_dictionaries({"name": TEXT})
TIME = st.integers(-(1 << 63), (1 << 63) - 1)
DATE = st.dates(datetime.date(1, 1, 1), datetime.date(9999, 12, 31))
LONG = st.none() | TIME
ROW = st.tuples(
    LONG,
    TEXT,
    st.none() | st.fixed_dictionaries({"a": LONG, "b": st.none() | DATE}),
    st.none() | st.lists(NAMES, min_size=1, max_size=3),
    st.none()
    | st.dictionaries(TEXT, NAMES, min_size=1, max_size=3).map(
        lambda pairs: [({"name": name}, value) for name, value in pairs.items()]
    ),
    st.none() | st.lists(TIME, min_size=1, max_size=3, unique=True).map(sorted),
)


@drawn(60)
@given(st.dictionaries(st.tuples(TEXT, LONG), ROW, max_size=6), st.integers(1, 4000))
def test_any_table_comes_back(rows: dict[Any, Any], max_parallelism: int) -> None:
    step = replace(LASTING, max_parallelism=max_parallelism, parallelism=1)
    whole = [(*key, 0, *row) for key, row in rows.items() if any(part is not None for part in row)]
    columns = [list(column) for column in zip(*whole, strict=True)] or [[] for _ in schema_of(step)]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema_of(step), strict=True)],
        schema=schema_of(step),
    )

    entries = entries_from(step, batch, 0)

    table = table_of(step, entries).to_pylist()
    maps = [dict(row, by_name=sorted(row["by_name"] or [], key=str)) for row in table]
    wanted = [dict(row, by_name=sorted(row["by_name"] or [], key=str)) for row in batch.to_pylist()]
    for row in maps:
        row["key_group"] = 0
    assert sorted(maps, key=str) == sorted(wanted, key=str)


def test_timers_of_a_vectorised_function_are_found_by_their_time() -> None:
    field = StateField("state", 1, "columns", "", schema_text(TIMED))
    step = StepState("s", 8, 1, STEP.key_schema, 1, (field,), 2, time_mode="EventTime")
    rows = pa.record_batch(
        [["a", "b"], [1, 2], [0, 0], [5, 6], [None, 70], [None, None]], schema=schema_of(step)
    )

    entries = entries_from(step, rows, 0).column(0)

    (due,) = entries.filter(pa.array(ids_of(entries) == TIMERS_BY_TIME)).to_pylist()
    assert int.from_bytes(due[3:11], "big") - (1 << 63) == 70
    assert due[11:].startswith(b"\x01b")


def test_a_key_of_other_columns_is_read_changed_and_written(saved: Path, tmp_path: Path) -> None:
    rows = rows_in(saved).drop_columns(["key_group"])
    country = pa.array([f"{user}-land" for user in rows["user"].to_pylist()])
    rows = rows.drop_columns(["n"]).append_column("country", country)

    ts.write_state(rows, saved, "step", to=tmp_path / "new", key=["country", "user"])

    after = rows_in(tmp_path / "new")
    assert after.column_names[:2] == ["country", "user"]
    key = KeyCodec(pa.schema([("country", pa.string()), ("user", pa.string())]))
    codes = key.hash_codes(after.combine_chunks().to_batches()[0])
    assert after["key_group"].to_pylist() == key_groups_of(codes, 128).tolist()
    assert by_key(after, "country")[("ann-land",)]["count"] == 7
    assert savepoints.read(FileStorage(str(tmp_path / "new"))).manifest.state[0].key_schema == (
        key.schema_text
    )


def test_an_empty_table_is_no_state(saved: Path, tmp_path: Path) -> None:
    ts.write_state(WHOLE.slice(0, 0), saved, "step", to=tmp_path / "new")

    assert rows_in(tmp_path / "new").num_rows == 0


def column(name: str, values: list[Any], kind: pa.DataType) -> pa.Table:
    return WHOLE.set_column(WHOLE.column_names.index(name), name, pa.array(values, kind))


@pytest.mark.parametrize(
    ("rows", "step", "message"),
    [
        (column("count", [1, 2, 3, 4], pa.int32()), "step", "'count' is int32: expected int64"),
        (column("user", [1, 2, 3, 4], pa.int64()), "step", "'user' is int64: expected string"),
        (WHOLE.drop_columns(["n"]), "step", "no column 'n': expected one, of int64"),
        (WHOLE.drop_columns(["pair"]), "step", "no column 'pair'"),
        (WHOLE.rename_columns({"last": "lsat"}), "step", "a column 'lsat' that its state has not"),
        (pa.concat_tables([WHOLE, WHOLE.slice(1, 1)]), "step", "1 of 4 keys have more than one"),
        (column("names", [[None], None, None, None], schema_of(LASTING).field("names").type),
         "step", "state 'names' holds"),
        (column("timers", [[5, 5], None, None, None], pa.list_(pa.int64())), "step", "twice"),
        (WHOLE, "stpe", "no step 'stpe'; its keyed steps are: 'step', 'other'"),
        (WHOLE, "other", "'pair' is struct<a: int64, b: date32.*expected struct<.*expiry: int64"),
        ([1], "step", "rows are a list: expected an Arrow table"),
    ],
)  # fmt: skip
def test_what_cannot_be_state_is_refused(
    saved: Path, tmp_path: Path, rows: Any, step: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        ts.write_state(rows, saved, step, to=tmp_path / "new")
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


def test_state_is_exported_to_a_parquet_file_and_imported_from_one(
    saved: Path, tmp_path: Path
) -> None:
    """The other reader and writer is DuckDB."""
    whole, repaired, new = (tmp_path / name for name in ("whole.parquet", "new.parquet", "new"))
    exported = call("state", "export", saved, whole, "--step", "step")
    assert exported.output.startswith("Wrote 3 keys to"), exported.output
    assert by_key(pq.read_table(whole), "user") == by_key(rows_in(saved), "user")
    duckdb.sql(
        f"""COPY (
            SELECT * REPLACE ("count" + 1 AS "count") FROM '{whole}'
            WHERE "user" IS DISTINCT FROM 'bob'
        ) TO '{repaired}' (FORMAT parquet)"""
    )

    imported = call(
        *("state", "import", repaired, "--savepoint", saved, "--to", new, "--step", "step")
    )

    assert imported.exit_code == 0, imported.output
    wanted = by_key(rows_in(saved), "user")
    assert by_key(rows_in(new), "user") == {
        user: row | {"count": None if row["count"] is None else row["count"] + 1}
        for user, row in wanted.items()
        if user != ("bob",)
    }
    assert rows_in(new, "other").equals(rows_in(saved, "other"))


def test_a_wrong_file_of_state_is_a_message(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.parquet"
    where = ["--savepoint", saved, "--to", tmp_path / "new", "--step", "step"]
    for arguments, words in (
        (["export", tmp_path / "none", file], "none"),
        (["export", saved, file], "name the step; its keyed steps are: 'step', 'other'"),
        (["export", saved, tmp_path / "no" / "file", "--step", "step"], "cannot write"),
        (["import", file, *where], "expected a Parquet file"),
    ):
        refused = call("state", *arguments)
        assert refused.exit_code == 1
        assert words in refused.output
        assert "Traceback" not in refused.output
    file.write_text("user,total")
    assert "expected a Parquet file" in call("state", "import", file, *where).output
    neither = call("state", "import", file, "--to", tmp_path / "new", "--step", "step")
    assert "expected --savepoint, or --pipeline of a first state" in neither.output
    there = call("state", "export", saved, file, "--step", "step")
    assert "exists already" in there.output
    assert file.read_text() == "user,total"
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "state.parquet"}


def test_a_process_that_is_killed_leaves_no_savepoint(saved: Path, tmp_path: Path) -> None:
    """After all files of state are written, and before the description."""
    program = """
        import os, sys
        from tallystick.checkpoint.savepoint_folder import NewFolder
        from tests.ops.test_state_writing import WHOLE
        import tallystick as ts
        NewFolder.complete = lambda self, savepoint: os._exit(9)
        ts.write_state(WHOLE, sys.argv[1], "step", to=sys.argv[2])
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(saved), str(tmp_path / "new")]

    ended = subprocess.run(command, check=False)

    assert ended.returncode == 9
    assert list((tmp_path / "new" / "keyed-state" / "step").iterdir()), "it was at work"
    assert savepoints.find(str(tmp_path / "new")) == []
    with pytest.raises(OptionError, match="holds no savepoint"):
        savepoints.restore(FileStorage(str(tmp_path / "new")), FileStorage(str(tmp_path / "cp")))
    with pytest.raises(OptionError, match="is not empty"):
        ts.write_state(WHOLE, saved, "step", to=tmp_path / "new")


assert set(USERS) == {*WHOLE["user"].to_pylist()}


# --- positions, and pipelines without a savepoint -----------------------------------------------


def moved(saved: Path) -> None:
    """Give a savepoint the positions of two inputs, one of which reads two topics."""
    storage = FileStorage(str(saved))
    savepoint = savepoints.read(storage)
    orders = {TopicPartition("orders", 0): 10, TopicPartition("orders", 1): 20}
    texts = (
        text_of(SourceOffsets("c", "", {**orders, TopicPartition("more", 0): 5}, input="a")),
        text_of(SourceOffsets("c", "", orders, input="b")),
    )
    manifest = replace(savepoint.manifest, sources=texts)
    storage.put(FILE, replace(savepoint, manifest=manifest).encode())


def test_positions_are_those_that_are_stated(saved: Path, tmp_path: Path) -> None:
    moved(saved)
    ts.write_state(WHOLE, saved, "step", to=tmp_path / "new", offsets={"orders": {1: 7}})
    sources = savepoints.read(FileStorage(str(tmp_path / "new"))).manifest.sources
    a, b = (from_text(text).positions for text in sources)
    assert a == {
        TopicPartition("orders", 0): 10,
        TopicPartition("orders", 1): 7,
        TopicPartition("more", 0): 5,
    }
    assert b == {TopicPartition("orders", 0): 10, TopicPartition("orders", 1): 7}


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ({"orders": {2: 7}}, r"\{'orders': \{2: 7\}\}.*more 0, orders 0, orders 1"),
        ({"order": {0: 7}}, "of a partition that the savepoint has a position in"),
        ({"orders": {0: -1}}, "expected an offset from 0"),
    ],
)
def test_positions_that_a_savepoint_does_not_have_are_refused(
    offsets: dict[str, dict[int, int]], words: str, saved: Path, tmp_path: Path
) -> None:
    moved(saved)
    with pytest.raises(OptionError, match=words):
        ts.write_state(WHOLE, saved, "step", to=tmp_path / "new", offsets=offsets)
    assert not (tmp_path / "new").exists()


def test_positions_are_stated_on_the_command_line(saved: Path, tmp_path: Path) -> None:
    """As JSON, or in a file of it."""
    moved(saved)
    state, offsets = tmp_path / "state.parquet", tmp_path / "offsets.json"
    pq.write_table(WHOLE, state)
    stated = json.dumps({"orders": {"1": 7}})
    offsets.write_text(stated)
    command = ["state", "import", state, "--savepoint", saved, "--step", "step"]
    for text in (stated, str(offsets)):
        new = tmp_path / f"new{len(text)}"
        done = call(*command, "--to", new, "--offsets", text)
        assert done.exit_code == 0, done.output
        sources = savepoints.read(FileStorage(str(new))).manifest.sources
        assert [from_text(one).positions[TopicPartition("orders", 1)] for one in sources] == [7, 7]
    for text, words in (
        ("offsets.txt", "expected JSON, or a file of it"),
        ('{"orders": 7}', "expected the next offset by topic and partition"),
        ('{"orders": {"a": 7}}', "expected the next offset by topic and partition"),
        ('{"orders": {"0": true}}', "expected the next offset by topic and partition"),
        ('{"orders": {"9": 7}}', "of a partition that the savepoint has a position in"),
    ):
        refused = call(*command, "--to", tmp_path / "no", "--offsets", text)
        assert (refused.exit_code, words in refused.output) == (1, True), refused.output
    assert not (tmp_path / "no").exists()


def counting() -> ts.Pipeline:
    """A pipeline that counts by user."""
    source = ts.KafkaSource("localhost:1", topics=["orders"], value=ts.Json("user string"))
    return (
        ts.Pipeline("counts")
        .read(source)
        .key_by("user")
        .process(ts.aggregate({"n": ts.count()}), uid="counts")
        .write(ts.KafkaSink("localhost:1", topic="out", value=ts.Json()))
    )


COUNTING = counting()
COUNTS = pa.table({"user": ["ann", "bob"], "n": [3, 4]})


def test_a_pipeline_without_a_savepoint_begins_with_the_table(tmp_path: Path) -> None:
    ts.write_state(COUNTS, None, "counts", to=tmp_path / "new", pipeline=counting())
    saved = savepoints.read(FileStorage(str(tmp_path / "new")))
    assert saved.manifest.sources == ()
    assert [(step.uid, step.fields[0].meaning[0]) for step in saved.manifest.state] == [
        ("counts", ("function", "aggregate"))
    ]
    rows = rows_in(tmp_path / "new", "counts").select(["user", "n"])
    assert sorted(rows.to_pylist(), key=str) == sorted(COUNTS.to_pylist(), key=str)
    # The next step of the program has that savepoint to begin with.
    with pytest.raises(OptionError, match="nothing was read yet"):
        ts.write_state(COUNTS, tmp_path / "new", "counts", to=tmp_path / "x", offsets={"o": {0: 1}})
    ts.write_state(COUNTS.slice(1), tmp_path / "new", "counts", to=tmp_path / "again")
    assert rows_in(tmp_path / "again", "counts").num_rows == 1


def test_a_first_state_is_imported_for_the_pipeline_of_a_module(tmp_path: Path) -> None:
    state, new = tmp_path / "state.parquet", tmp_path / "new"
    pq.write_table(COUNTS, state)
    where = f"{__name__}:COUNTING"
    done = call(*("state", "import", state, "--pipeline", where, "--to", new, "--step", "counts"))
    assert done.exit_code == 0, done.output
    rows = rows_in(new, "counts").select(["user", "n"])
    assert sorted(rows.to_pylist(), key=str) == sorted(COUNTS.to_pylist(), key=str)


def test_a_savepoint_gets_a_step_that_only_the_program_has(saved: Path, tmp_path: Path) -> None:
    moved(saved)
    ts.write_state(COUNTS, saved, "counts", to=tmp_path / "new", pipeline=counting())
    before, after = (
        savepoints.read(FileStorage(str(folder))).manifest for folder in (saved, tmp_path / "new")
    )
    assert after.sources == before.sources
    assert [step.uid for step in after.state] == ["step", "other", "counts"]
    assert rows_in(tmp_path / "new", "counts").num_rows == 2
    assert rows_in(tmp_path / "new", "other").equals(rows_in(saved, "other"))


def test_neither_a_savepoint_nor_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="neither savepoint= nor pipeline= is given"):
        ts.write_state(COUNTS, None, "counts", to=tmp_path / "new")
    with pytest.raises(OptionError, match="no step 'count'; its keyed steps are: none"):
        ts.write_state(COUNTS, None, "count", to=tmp_path / "new", pipeline=counting())
    wrong = pa.table({"user": ["a"], "n": ["x"]})
    with pytest.raises(OptionError, match="'n' is string"):
        ts.write_state(wrong, None, "counts", to=tmp_path / "new", pipeline=counting())

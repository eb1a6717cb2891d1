"""Batches of users' functions where they come in: as declared, and in memory that stays as it is.

A function may use one buffer for all that it returns. Whoever keeps its rows (a file until its row
group is full, a COPY, a sink of the user's own, a list, state) must have the rows it was given.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from tallystick.api.file_sink import FileSink
from tallystick.codec.own_memory import own, own_values
from tallystick.codec.rows import RowLayout
from tallystick.epoch.two_phase import Committable, Owner, Place, RunFacts
from tallystick.errors import OptionError, RecordError
from tallystick.state.functions.keyed_batch import OwnUpdates, Update
from tallystick.state.functions.processing import SideRows
from tallystick.tasks.operator_state import ListFunction, with_lists
from tallystick.tasks.outputs import DeclaredFunction, Rows, Selection
from tallystick.tasks.read import EncodePlan, Route, apply, send
from tallystick.tasks.write import Branch, CollectPlan, FanOut, split_notes
from tests.run.test_list_tasks import Host

OWNER = Owner("p", "files-0", "f00d")
COUNT, SIZE = 4, 3
BATCHES = [
    pa.record_batch(
        {
            "id": pa.array(range(start, start + SIZE)),
            "net": pa.array([float(n) for n in range(start, start + SIZE)]),
        }
    )
    for start in range(0, COUNT * SIZE, SIZE)
]
DOUBLED = [(n, 2.0 * n) for n in range(COUNT * SIZE)]
BUFFER = np.empty(100)
FRAME = pd.DataFrame({"id": np.zeros(SIZE, np.int64), "gross": np.zeros(SIZE)})


def doubled(rows: pa.RecordBatch) -> np.ndarray:
    """All results are in one buffer."""
    return np.multiply(rows["net"].to_numpy(), 2.0, out=BUFFER[: rows.num_rows])


def in_a_buffer(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"id": rows["id"], "gross": doubled(rows)})


def read_only(rows: pa.RecordBatch) -> pa.RecordBatch:
    """As pandas' copy on write hands out its columns."""
    view = doubled(rows)
    view.flags.writeable = False
    return pa.record_batch({"id": rows["id"], "gross": view})


def in_a_part_of_a_buffer(rows: pa.RecordBatch) -> pa.RecordBatch:
    part = pa.py_buffer(doubled(rows)).slice(0, 8 * rows.num_rows)
    gross = pa.Array.from_buffers(pa.float64(), rows.num_rows, [None, part])
    return pa.record_batch({"id": rows["id"], "gross": gross})


def in_a_table(rows: pa.RecordBatch) -> pa.Table:
    return pa.table({"id": rows["id"], "gross": doubled(rows)})


def in_a_frame(rows: pa.RecordBatch) -> pa.RecordBatch:
    FRAME.loc[:, "id"] = rows["id"].to_numpy()
    FRAME.loc[:, "gross"] = rows["net"].to_numpy() * 2
    return pa.RecordBatch.from_pandas(FRAME)


def in_a_dictionary(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The indices are the same each time, and the values are not."""
    codes = pa.array(range(rows.num_rows), pa.int32())
    gross = pa.DictionaryArray.from_arrays(codes, pa.array(doubled(rows)))
    return pa.record_batch({"id": rows["id"], "gross": gross})


def in_a_list(rows: pa.RecordBatch) -> pa.RecordBatch:
    offsets = pa.array(range(rows.num_rows + 1), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(doubled(rows)))
    return pa.record_batch({"id": rows["id"], "gross": lists})


def as_side_output(rows: pa.RecordBatch) -> Rows:
    return Rows(None, {"side": in_a_buffer(rows)})


SHAPES = [
    in_a_buffer,
    read_only,
    in_a_part_of_a_buffer,
    in_a_table,
    in_a_frame,
    in_a_dictionary,
    in_a_list,
]


@dataclass
class Keeper:
    """A user's own sink, which keeps all batches until it has to prepare."""

    batches: list[pa.RecordBatch] = field(default_factory=list)

    def begin(self, place: Place) -> "Keeper":
        return self

    def write(self, rows: pa.RecordBatch) -> None:
        self.batches.append(rows)

    def prepare(self) -> list[Committable]:
        return []

    def abort(self) -> None:
        pass


def pairs(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    def plain(value: Any) -> float:
        return float(value[0] if isinstance(value, list) else value)

    return sorted((row["id"], plain(row["gross"])) for row in rows)


def kept(function: Any, selection: Selection | None = None) -> list[tuple[int, float]]:
    keeper = Keeper()
    branch = Branch(OWNER, keeper, selection=selection or Selection())
    list(send(FanOut((branch,), None, 1, functions=(function,)), BATCHES, 0))
    return pairs([row for batch in keeper.batches for row in batch.to_pylist()])


@pytest.mark.parametrize("function", SHAPES)
def test_a_sink_that_keeps_batches_keeps_what_it_was_given(function: Any) -> None:
    assert kept(function) == DOUBLED


def test_also_those_of_side_outputs_and_of_functions_on_the_way_to_a_sink() -> None:
    columns = pa.schema([("id", pa.int64()), ("gross", pa.float64())])
    side = DeclaredFunction(as_side_output, {"side": columns})
    assert kept(side, Selection("side")) == DOUBLED

    def same(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    assert kept(same, Selection(functions=(in_a_buffer,))) == DOUBLED


def spoiled(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Another function that uses the same buffer."""
    BUFFER[:] = -1.0
    return rows


def of_all(functions: list[Any]) -> list[list[tuple[int, float]]]:
    """The rows of the main output and of side output "side", batch by batch, as they leave."""
    main, side = [], []
    for batch in BATCHES:
        for part in apply(functions, batch):
            is_side = isinstance(part, SideRows)
            rows = part.rows if isinstance(part, SideRows) else part
            (side if is_side else main).extend(rows.to_pylist())
    return [pairs(main), pairs(side)]


def test_functions_one_after_another_may_use_one_buffer() -> None:
    """What the first one made is in the rows that the second one returns."""
    assert of_all([in_a_buffer, spoiled])[0] == DOUBLED
    assert of_all([in_a_table, spoiled])[0] == DOUBLED


def test_a_side_output_waits_while_the_main_output_is_on_its_way() -> None:
    columns = pa.schema([("id", pa.int64()), ("gross", pa.float64())])

    def both(rows: pa.RecordBatch) -> Rows:
        buffered = in_a_buffer(rows)
        return Rows(buffered, {"side": buffered})

    assert of_all([DeclaredFunction(both, {"side": columns}), spoiled]) == [DOUBLED, DOUBLED]


@pytest.mark.parametrize("spoils", ["functions", "when"])
def test_sinks_get_the_same_rows_whatever_runs_before_one_of_them(spoils: str) -> None:
    def everything(rows: pa.RecordBatch) -> Any:
        return pa.array(np.ones(spoiled(rows).num_rows, np.bool_))

    first = Selection(functions=(spoiled,)) if spoils == "functions" else Selection(when=everything)
    keepers = [Keeper(), Keeper()]
    branches = (Branch(OWNER, keepers[0], selection=first), Branch(OWNER, keepers[1]))
    list(send(FanOut(branches, None, 1, functions=(in_a_buffer,)), BATCHES, 0))
    for keeper in keepers:
        assert pairs([row for batch in keeper.batches for row in batch.to_pylist()]) == DOUBLED


@pytest.mark.parametrize("kind", ["one branch", "one route", "one predicate"])
def test_a_function_before_the_only_sink_may_use_the_same_buffer(kind: str) -> None:
    """As one that stands before it in the pipeline may."""

    def everything(rows: pa.RecordBatch) -> Any:
        return pa.array(np.ones(spoiled(rows).num_rows, np.bool_))

    def as_text(rows: pa.RecordBatch) -> pa.RecordBatch:
        rows = spoiled(rows)
        texts = [f"{number} {gross}" for number, gross in pairs(rows.to_pylist())]
        return pa.record_batch({"value": texts})

    if kind == "one route":
        route = Route(
            RowLayout({"out": 1}, "out"), "none", 1 << 20, Selection(functions=(as_text,))
        )
        plan = EncodePlan((route,), 1, functions=(in_a_buffer,))
        frames = [frame for frame in send(plan, BATCHES, 0) if frame.record_count]
        data = b"".join(frame.data for frame in frames)
        assert all(f"{number} {gross}".encode() in data for number, gross in DOUBLED)
        return
    first = Selection(functions=(spoiled,)) if kind == "one branch" else Selection(when=everything)
    keeper = Keeper()
    branches = (Branch(OWNER, keeper, selection=first),)
    list(send(FanOut(branches, None, 1, functions=(in_a_buffer,)), BATCHES, 0))
    assert pairs([row for batch in keeper.batches for row in batch.to_pylist()]) == DOUBLED


@pytest.mark.parametrize("function", [in_a_buffer, in_a_frame])
def test_files_hold_the_same_rows(function: Any, tmp_path: Any) -> None:
    sink = FileSink(str(tmp_path)).open(OWNER, RunFacts())
    fan = FanOut((Branch(OWNER, sink.plan()),), None, 1, functions=(function,))
    (note,) = split_notes(CollectPlan().write(send(fan, BATCHES, 0), 0).notes).sinks
    for committable in note.committables:
        sink.commit(committable)

    table = ds.dataset(tmp_path, format="parquet").to_table(columns=["id", "gross"])
    assert pairs(table.to_pylist()) == DOUBLED


def test_a_list_has_the_elements_that_it_was_given() -> None:
    def newest(rows: pa.RecordBatch, _: pa.RecordBatch) -> Any:
        BUFFER[: rows.num_rows] = rows["id"].to_numpy()
        numbers = BUFFER.view(np.int64)
        numbers[: rows.num_rows] = rows["id"].to_numpy()
        return None, pa.record_batch({"n": pa.array(numbers[: rows.num_rows])})

    host = Host()
    epoch, opened = host.open(1)
    (function,) = with_lists((ListFunction(newest, "buffer"),), [("buffer", opened[0])])
    list(apply([function], BATCHES[0]))
    BUFFER.view(np.int64)[:] = -1
    host.commit(epoch, opened)

    assert host.elements(1) == [BATCHES[0]["id"].to_pylist()]


def test_what_leaves_at_once_is_not_copied_nor_what_is_around_a_slice() -> None:
    (batch,) = apply([in_a_buffer], BATCHES[0])
    assert batch["gross"].buffers()[1].address == BUFFER.ctypes.data

    whole = pa.record_batch({"x": pa.array(range(100_000))})
    assert own(whole.slice(5, 2)).nbytes < 100


def arrow_series(values: np.ndarray) -> pd.Series:
    return pd.Series(pa.array(values), dtype=pd.ArrowDtype(pa.float64()))


KINDS = [
    *(np.asarray, pa.array, pd.Series, pd.Index, memoryview),
    *(arrow_series, lambda values: arrow_series(values).array),
    lambda values: pa.chunked_array([values]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_keys_are_copied_too(kind: Any) -> None:
    """Whatever kind of column it is: not every `copy()` is one of the memory."""
    values = BUFFER[:2]
    values[:] = 1.0
    values_read = own_values(kind(values))
    values[:] = 2.0
    assert list(map(float, values_read)) == [1.0, 1.0]


def test_what_has_no_columns_memory_stays_what_it_is() -> None:
    for values in ((1, 2), [1, None], None, {"a": 1}, object()):
        assert own_values(values) is values


def frame_of(columns: dict[str, np.ndarray]) -> pd.DataFrame:
    return pd.DataFrame(columns["n"].reshape(2, 1), columns=["n"], copy=False)


@pytest.mark.parametrize("kind", [dict, frame_of, pa.record_batch])
def test_the_state_of_a_vectorised_function_is_copied_in_each_form_that_it_may_have(
    kind: Any,
) -> None:
    """It is kept while the function is called again, for the timers that are due."""

    def function(_: Any) -> Update:
        return Update(state=kind({"n": BUFFER[:2]}), timers=BUFFER[:2].astype(np.int64))

    BUFFER[:2] = 1.0
    state: Any = OwnUpdates(function)(cast(Any, None)).state
    BUFFER[:2] = 2.0
    assert list(map(float, state["n"])) == [1.0, 1.0]


def test_the_rows_that_a_vectorised_function_puts_out_are_copied() -> None:
    """Those of side outputs wait, and later functions may use the same buffer."""

    def function(_: Any) -> Update:
        buffered = in_a_buffer(BATCHES[1])
        return Update(buffered, outputs={"side": buffered})

    update = OwnUpdates(function)(cast(Any, None))
    spoiled(BATCHES[0])
    assert update.output is not None
    for rows in (update.output, update.outputs["side"]):
        assert pairs(rows.to_pylist()) == DOUBLED[SIZE : 2 * SIZE]


# --- as declared -----------------------------------------------------------------------------

PAID = pa.record_batch({"payer": ["alice"], "payee": ["bob"], "n": pa.array([5], pa.int64())})
DECLARED = pa.schema([("payer", pa.string()), ("payee", pa.string())])


def declared(function: Any, columns: pa.Schema = DECLARED) -> list[dict[str, Any]]:
    return [
        row
        for batch in apply([DeclaredFunction(function, columns=columns)], PAID)
        for row in batch.to_pylist()
    ]


def test_columns_that_schema_declares_go_by_name() -> None:
    assert declared(lambda rows: rows.select(["payee", "payer"])) == [
        {"payer": "alice", "payee": "bob"}
    ]
    assert declared(lambda rows: Rows(rows.select(["payee", "payer"]))) == [
        {"payer": "alice", "payee": "bob"}
    ]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["payer", "n", "payee"], "'n' is not declared"),
        (["payer", "payee", "n"], "'n' is not declared"),
        (["payer"], "'payee' is not there"),
    ],
)
def test_another_set_of_columns_is_refused(names: list[str], problem: str) -> None:
    def chosen(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(names)

    with pytest.raises(OptionError, match=f"map_batches chosen, schema=: column {problem}"):
        declared(chosen)


def test_a_type_is_cast_where_no_value_changes_and_refused_elsewhere() -> None:
    def small(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"n": rows["n"].cast(pa.int32())})

    def moments(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"n": rows["n"].cast(pa.timestamp("us"))})

    columns = pa.schema([("n", pa.int64())])
    (batch,) = apply([DeclaredFunction(small, columns=columns)], PAID)
    assert batch.schema == columns
    with pytest.raises(RecordError, match="map_batches moments, schema=: column 'n' is timestamp"):
        declared(moments, columns)

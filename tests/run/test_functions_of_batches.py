"""What the functions of `map_batches` return goes on whole, on each of the ways that rows go."""

import numpy as np
import pyarrow as pa
import pytest

from tallystick.codec.json.write import JsonWriter
from tallystick.codec.rows import RowLayout
from tallystick.state.functions.keyed_batch import Update
from tallystick.state.functions.vectorised import vectorised
from tallystick.tasks import read
from tallystick.tasks.keyed import RoutePlan
from tallystick.tasks.read import EncodePlan, Route, apply, send
from tallystick.tasks.write import FanOut
from tests.keyed_job import step
from tests.run.test_sink_task import Notebook, fan_out

GO = pa.record_batch({"value": ["go"]})
ROW_COUNT = 40
CELL_BYTES = 64 << 20
NUMBERS = pa.schema([("n", pa.int64())])


def larger_than_an_array(_: pa.RecordBatch) -> pa.Table:
    """2.5 GiB of text in a column; its chunks share 64 MiB of memory."""
    text = pa.chunked_array([pa.array(["x" * CELL_BYTES])] * ROW_COUNT)
    return pa.table({"text": text, "n": pa.chunked_array([pa.array(np.arange(ROW_COUNT))])})


def of_lists(_: pa.RecordBatch) -> pa.Table:
    """The same in a column of lists."""
    text = pa.array([["x" * CELL_BYTES]])
    return pa.table({"text": pa.chunked_array([text] * ROW_COUNT), "n": np.arange(ROW_COUNT)})


def numbers(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(["n"])


@pytest.fixture
def _without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass chunks on as they are: to copy all of them, as for rows that wait, takes 2.5 GiB.

    Copies are for `test_batches_of_users.py`.
    """
    monkeypatch.setattr(read, "own", lambda rows: rows)


@pytest.mark.usefixtures("_without_copies")
@pytest.mark.parametrize("large", [larger_than_an_array, of_lists])
def test_no_row_of_a_table_larger_than_an_array_is_lost(large) -> None:
    batches = list(apply([large, numbers], GO))

    assert pa.Table.from_batches(batches)["n"].to_pylist() == list(range(ROW_COUNT))
    assert sum(batch.num_rows for batch in apply([large], GO)) == ROW_COUNT


@pytest.mark.usefixtures("_without_copies")
def test_nor_on_the_way_to_writers_sinks_and_keyed_steps() -> None:
    functions = (larger_than_an_array, numbers)
    encode = EncodePlan(
        (Route(RowLayout({"out": 1}, "out", value=JsonWriter()), "none", 900_000),), 1, functions
    )
    keyed = step(vectorised(lambda _: Update(), state=""), key=("n",), columns=NUMBERS)
    route = RoutePlan(keyed, 128, 2, functions)
    for outlet in (encode, route):
        assert sum(frame.record_count for frame in send(outlet, [GO], 0)) == ROW_COUNT

    sink = Notebook("sink")
    to_sinks: FanOut = fan_out(sink, functions=functions)
    list(send(to_sinks, [GO], 0))
    assert sum(int(call.split()[1]) for call in sink.calls if call.startswith("write")) == ROW_COUNT


def test_a_table_of_small_chunks_goes_on_as_one_batch_and_one_without_rows_not_at_all() -> None:
    def in_chunks(_: pa.RecordBatch) -> pa.Table:
        return pa.Table.from_batches([pa.record_batch({"n": [i]}) for i in range(9)])

    (batch,) = apply([in_chunks], GO)
    assert batch["n"].to_pylist() == list(range(9))
    assert list(apply([lambda rows: in_chunks(rows).slice(9)], GO)) == []


def test_chunks_whose_dictionaries_are_too_large_together_go_on_one_by_one() -> None:
    def of_codes(_: pa.RecordBatch) -> pa.Table:
        indices = pa.array(range(100), pa.int8())
        chunks = [
            pa.DictionaryArray.from_arrays(indices, pa.array([f"{k}-{i}" for i in range(100)]))
            for k in range(3)
        ]
        return pa.table({"code": pa.chunked_array(chunks)})

    codes = [batch["code"].to_pylist() for batch in apply([of_codes], GO)]
    assert codes == [[f"{k}-{i}" for i in range(100)] for k in range(3)]

"""What a row that cannot be written is made of, as far as that is sure."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tallystick.codec.formats import DEADLETTER
from tallystick.codec.json_reader import JsonReader
from tallystick.codec.layout import Layout
from tallystick.codec.records.decoder import RECORD_SCHEMA_WITH_HEADERS
from tallystick.codec.rows import RowLayout
from tallystick.codec.value_writer import JsonWriter
from tallystick.errors import RecordError
from tallystick.run.outputs import OF_DEAD_LETTERS
from tallystick.run.read_plan import Origin, ReadPlan
from tallystick.run.task import EncodePlan, Route
from tallystick.values import SplitRange, TopicPartition

SPLIT = SplitRange("in", 4, 10, 20)
BIG = b'{"n":3,"s":"%s"}' % (b"x" * 3000)
VALUES = [b'{"n":1}', b"no json", b'{"n":2}', BIG, b'{"n":4}']


class Fetch:
    """Records at the offsets 10, 12, 14 and so on."""

    def read(self, *_: object, **__: object) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        count = len(VALUES)
        columns = [
            pa.array([b"k%d" % row for row in range(count)], pa.binary()),
            pa.array(VALUES, pa.binary()),
            pa.array([10 + 2 * row for row in range(count)]),
            pa.array([1] * count),
            pa.array([0] * count, pa.int32()),
            pa.nulls(count, RECORD_SCHEMA_WITH_HEADERS.field("headers").type),
        ]
        yield SPLIT, pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA_WITH_HEADERS)


def frames(*functions: Any, letters: bool = False) -> list[Any]:
    value = JsonReader(pa.schema([("n", pa.int64()), ("s", pa.string())]))
    mode = DEADLETTER if letters else "dropmalformed"
    layout = Layout(value, mode, metadata=())
    limits = {"out": 2000, "dead": 2000}
    out = RowLayout({"out": 1}, "out", value=JsonWriter(), batch_limits=limits)
    routes = [Route(out, "none", 900_000)]
    if letters:
        dead = RowLayout({"dead": 1}, "dead", batch_limits=limits)
        routes.append(Route(dead, "none", 900_000, OF_DEAD_LETTERS))
    fetch: Any = Fetch()
    plan = ReadPlan(fetch, layout, functions=functions)
    return list(plan.send([SPLIT], EncodePlan(tuple(routes), 1), 0))


def renamed(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.rename_columns(["m", "s"])


def turned(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.take(pa.array(range(rows.num_rows - 1, -1, -1)))


def twice(rows: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([rows, rows])


def filtered(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.filter(pc.greater(rows["n"], 2))


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ((), "made of topic in, partition 4, offset 16,"),
        ((renamed,), "made of topic in, partition 4, offset 16,"),
        ((turned,), "made of one of topic in, partition 4, offsets 10 to 18,"),
        ((twice,), "made of one of topic in, partition 4, offsets 10 to 18,"),
        ((filtered,), "made of one of topic in, partition 4, offsets 10 to 18,"),
    ],
)
def test_the_record_is_named_where_it_is_sure_and_else_those_that_it_is_among(
    functions: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(RecordError) as refused:
        frames(*functions)
    assert says in str(refused.value)


def test_the_others_pass_and_the_letters_have_their_places() -> None:
    sent = [each for each in frames(letters=True) if each.record_count]

    assert [each.sequence for each in sent] == sorted({each.sequence for each in sent})
    assert {each.topic: 0 for each in sent} == {"out": 0, "dead": 0}
    assert sum(each.record_count for each in sent if each.topic == "out") == 3
    assert sum(each.record_count for each in sent if each.topic == "dead") == 2
    dead = b"".join(each.data for each in sent if each.topic == "dead")
    assert b"tallystick.cut" in dead
    assert TopicPartition("dead", 0) in {each.topic_partition for each in sent}


class Numbered:
    """Records whose producer has numbered two the same; the first one is malformed."""

    def read(self, *_: object, **__: object) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        (_, records), *_ = Fetch().read()
        at = records.schema.get_field_index("offset")
        numbers = pa.array([10, 11, 11, 12, 13])
        yield SPLIT, records.set_column(at, "offset", numbers)


def test_records_from_the_future_are_told_apart_from_others_with_their_offsets():
    layout = Layout(JsonReader(pa.schema([("n", pa.int64())])), DEADLETTER, metadata=("offset",))
    fetch: Any = Numbered()
    read = ReadPlan(fetch, layout, source_time="n").until(0, 2)

    ((_, built),) = read._built([SPLIT])
    assert built.rows.to_pylist() == [{"n": 1, "offset": 10}, {"n": 2, "offset": 11}]
    assert built.dead_letters["value"].to_pylist() == [b"no json", BIG, b'{"n":4}']
    assert [*built.problems] == [1, 3, 4]
    origin = Origin(layout, TopicPartition("in", 4), built, ())
    assert origin.place(built.rows, 1).offset == 11

"""What a row that cannot be written is made of, as far as that is sure."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tallystick.codec.formats import DEADLETTER
from tallystick.codec.json.read import JsonReader
from tallystick.codec.json.write import JsonWriter
from tallystick.codec.layout import OFFSET_HEADER, Layout
from tallystick.codec.output_records import CUT_BYTES
from tallystick.codec.records.decoder import RECORD_SCHEMA_WITH_HEADERS, decode
from tallystick.codec.records.encoder import stamp
from tallystick.codec.rows import RowLayout
from tallystick.errors import RecordError
from tallystick.tasks.outputs import OF_DEAD_LETTERS, Selection
from tallystick.tasks.read import EncodePlan, Route
from tallystick.tasks.read_plan import Origin, ReadPlan
from tallystick.values import Producer, SplitRange, TopicLimit, TopicPartition

SPLIT = SplitRange("in", 4, 10, 20)
BIG = b'{"n":3,"s":"%s"}' % (b"x" * 3000)
VALUES = [b'{"n":1}', b"no json", b'{"n":2}', BIG, b'{"n":4}']


class Fetch:
    """Records at the offsets 10, 12, 14 and so on."""

    offsets = tuple(range(10, 20, 2))

    def read(self, *_: object, **__: object) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        count = len(VALUES)
        columns = [
            pa.array([b"k%d" % row for row in range(count)], pa.binary()),
            pa.array(VALUES, pa.binary()),
            pa.array(self.offsets),
            pa.array([1] * count),
            pa.array([0] * count, pa.int32()),
            pa.nulls(count, RECORD_SCHEMA_WITH_HEADERS.field("headers").type),
        ]
        yield SPLIT, pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA_WITH_HEADERS)


def frames(
    *functions: Any, letters: bool = False, of_sink: Any = (), latest_ms: int | None = None
) -> list[Any]:
    value = JsonReader(pa.schema([("n", pa.int64()), ("s", pa.string())]))
    mode = DEADLETTER if letters else "dropmalformed"
    layout = Layout(value, mode, metadata=())
    limits = dict.fromkeys(("out", "dead"), TopicLimit(2000))
    out = RowLayout({"out": 1}, "out", value=JsonWriter(), batch_limits=limits)
    routes = [Route(out, "none", 900_000, Selection(functions=of_sink))]
    if letters:
        dead = RowLayout({"dead": 1}, "dead", batch_limits=limits)
        routes.append(Route(dead, "none", 900_000, OF_DEAD_LETTERS))
    fetch: Any = Fetch()
    plan = ReadPlan(fetch, layout, functions=functions, source_time="n").until(0, latest_ms)
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


@pytest.mark.parametrize("function", [turned, twice, filtered])
def test_also_where_only_a_function_on_the_way_to_the_sink_moves_rows(function: Any) -> None:
    """The number of rows may stay the same: the place named would be another record's."""
    with pytest.raises(RecordError) as refused:
        frames(of_sink=(function,))
    assert "made of one of topic in, partition 4, offsets 10 to 18," in str(refused.value)


def test_the_others_pass_and_the_letters_have_their_places() -> None:
    sent = [frame for frame in frames(letters=True) if frame.record_count]

    assert [frame.sequence for frame in sent] == sorted({frame.sequence for frame in sent})
    assert {frame.topic: 0 for frame in sent} == {"out": 0, "dead": 0}
    assert sum(frame.record_count for frame in sent if frame.topic == "out") == 3
    assert sum(frame.record_count for frame in sent if frame.topic == "dead") == 2
    dead = b"".join(frame.data for frame in sent if frame.topic == "dead")
    assert b"tallystick.cut" in dead
    assert TopicPartition("dead", 0) in {frame.topic_partition for frame in sent}


@pytest.mark.parametrize("offsets", [[10, 12, 14, 16, 18], [10, 14, 14, 16, 18]])
def test_also_beside_records_whose_event_time_nobody_believes(
    offsets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is too late; a faulty producer may give two records one offset."""
    monkeypatch.setattr(Fetch, "offsets", offsets)
    sent = frames(letters=True, latest_ms=3)

    assert sum(frame.record_count for frame in sent if frame.topic == "out") == 2
    dead = [row for frame in sent if frame.topic == "dead" for row in records_of(frame)]
    letters = {
        int(header["value"]): row["value"]
        for row in dead
        for header in row["headers"]
        if header["key"] == OFFSET_HEADER
    }
    assert letters == {offsets[1]: VALUES[1], 16: BIG[:CUT_BYTES], 18: VALUES[4]}


def records_of(frame: Any) -> list[dict[str, Any]]:
    """The records in a frame."""
    return decode(
        stamp(frame.data, Producer("t", 1, 0), 0),
        topic_partition=frame.topic_partition,
        start_offset=0,
        stop_offset=frame.record_count,
        aborted=None,
        headers=True,
    ).batch.to_pylist()


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

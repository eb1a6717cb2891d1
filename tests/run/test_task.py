"""A reading task against a real broker: what it leaves out, says, and makes of it."""

import itertools
import logging
from collections.abc import Iterable

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from tallystick import values
from tallystick.codec.json.read import JsonReader
from tallystick.codec.json.write import JsonWriter
from tallystick.codec.layout import OWN_HEADERS, Layout
from tallystick.codec.records.decoder import decode
from tallystick.codec.records.encoder import stamp
from tallystick.codec.rows import RowLayout
from tallystick.kafka.config import KafkaConfig
from tallystick.kafka.fetcher import KafkaFetch
from tallystick.tasks.frames import Frame
from tallystick.tasks.outputs import OF_DEAD_LETTERS, DeadLetters
from tallystick.tasks.read import EncodePlan, Route, send
from tallystick.tasks.read_plan import ReadPlan
from tallystick.testing import EmbeddedKafka
from tallystick.values import SplitRange, TopicPartition

pytestmark = pytest.mark.broker

NUMBERS = JsonReader(pa.schema([("n", pa.int64())]))
POISON_AT = (3, 4, 17)
RECORD_COUNT = 20
WAIT_S = 60
_numbers = itertools.count()


@pytest.fixture
def splits(tallystick_kafka: EmbeddedKafka) -> tuple[SplitRange, ...]:
    """Two partitions with the same records, three of them poison and one a tombstone."""
    topic = f"task-{next(_numbers)}"
    tallystick_kafka.create_topic(topic, 2)
    producer = Producer(tallystick_kafka.confluent_options())
    for partition, n in itertools.product(range(2), range(RECORD_COUNT)):
        value = b"poison %d" % n if n in POISON_AT else b'{"n": %d}' % n
        producer.produce(
            topic,
            key=b"k%d" % n,
            value=None if n == 8 else value,
            headers=[("n", b"%d" % n)],
            timestamp=1_700_000_000_000 + n,
            partition=partition,
        )
    assert producer.flush(WAIT_S) == 0
    return tuple(SplitRange(topic, partition, 0, RECORD_COUNT) for partition in range(2))


def plan(kafka: EmbeddedKafka, mode: str, **settings: object) -> ReadPlan:
    names = {k.removeprefix("kafka."): v for k, v in kafka.kafka_options.items()}
    return ReadPlan(KafkaFetch(KafkaConfig.from_options(names)), Layout(NUMBERS, mode), **settings)


def offsets(batches: Iterable[pa.RecordBatch], partition: int) -> list[int]:
    rows = [row for batch in batches for row in batch.select(["partition", "offset"]).to_pylist()]
    return [row["offset"] for row in rows if row["partition"] == partition]


def test_dropped_records_are_counted_and_the_first_is_named(tallystick_kafka, splits, caplog):
    with caplog.at_level(logging.WARNING, logger="tallystick"):
        rows = list(plan(tallystick_kafka, "dropmalformed").read(splits[:1]))

    kept = [n for n in range(RECORD_COUNT) if n not in POISON_AT]
    assert offsets(rows, 0) == kept
    (warning,) = [record.message for record in caplog.records]
    assert warning == (
        f"3 malformed values dropped, as asked; the first: topic {splits[0].topic}, partition 0, "
        f"offset 3: it is not one JSON object, from {{ to }}"
    )


def test_what_functions_do_is_done_to_good_rows_only(tallystick_kafka, splits):
    read = plan(tallystick_kafka, "deadletter", functions=(lambda _: None,))

    assert not list(read.read(splits[:1]))
    letters = list(read.read_dead_letters(splits[:1]))
    assert sum(letter.records.num_rows for letter in letters) == len(POISON_AT)
    frames = list(read.send(splits[:1], TO_TOPICS, source=0))
    assert sum(f.record_count for f in frames if f.topic == "dead") == len(POISON_AT)
    assert not [f for f in frames if f.topic == "out"]


def test_dead_letters_are_encoded_as_they_were_with_the_reason_behind_their_headers(
    tallystick_kafka, splits
):
    read = plan(tallystick_kafka, "deadletter")

    frames = list(read.send(splits, TO_TOPICS, source=0))

    assert [frame.sequence for frame in frames] == list(range(len(frames)))
    counts = {topic: sum(f.record_count for f in frames if f.topic == topic) for topic in TOPICS}
    assert counts == {"out": 2 * (RECORD_COUNT - len(POISON_AT)), "dead": 2 * len(POISON_AT)}
    letters = [row for f in frames if f.topic == "dead" for row in decoded(f).to_pylist()]
    for partition in range(2):
        mine = [letter for letter in letters if header(letter, 3) == b"%d" % partition]
        assert [letter["value"] for letter in mine] == [b"poison %d" % n for n in POISON_AT]
        assert [letter["key"] for letter in mine] == [b"k%d" % n for n in POISON_AT]
        assert [letter["timestamp"] for letter in mine] == [
            1_700_000_000_000 + n for n in POISON_AT
        ]
        assert [header(letter, 0) for letter in mine] == [b"%d" % n for n in POISON_AT]
        assert [header(letter, 4) for letter in mine] == [b"%d" % n for n in POISON_AT]
        assert {header(letter, 2) for letter in mine} == {splits[0].topic.encode()}
        assert {header(letter, 1) for letter in mine} == {b"it is not one JSON object, from { to }"}


def test_dead_letters_without_a_topic_are_a_bug(tallystick_kafka, splits):
    encode = EncodePlan(
        (Route(RowLayout({"out": 1}, "out", value=JsonWriter()), "none", 900_000),), 1
    )
    letters = DeadLetters(pa.RecordBatch.from_pydict({"value": [b"x"]}))

    with pytest.raises(AssertionError, match="no topic"):
        list(send(encode, [letters], source=0))


TOPICS = ("out", "dead")
NAMES = ("n", *OWN_HEADERS)
TO_TOPICS = EncodePlan(
    (
        Route(RowLayout({"out": 1}, "out", value=JsonWriter(), key="n"), "lz4", 900_000),
        Route(RowLayout({"dead": 1}, "dead"), "lz4", 900_000, OF_DEAD_LETTERS),
    ),
    target_count=1,
)


def header(letter: dict, index: int) -> bytes:
    assert [header_entry["key"] for header_entry in letter["headers"]] == list(NAMES)
    return letter["headers"][index]["value"]


def decoded(frame: Frame) -> pa.RecordBatch:
    return decode(
        stamp(frame.data, values.Producer("t", 1, 0), 0),
        topic_partition=TopicPartition(frame.topic, frame.partition),
        start_offset=0,
        stop_offset=frame.record_count,
        aborted=None,
        headers=True,
    ).batch


def test_records_from_the_future_are_dead_letters_beside_malformed_ones(tallystick_kafka, splits):
    read = plan(tallystick_kafka, "deadletter", source_time="n").until(7, 3)

    assert read.event_time_limit_ms == 10
    kept = [n for n in range(11) if n not in POISON_AT]
    assert offsets(read.read(splits), 1) == kept, "one without a time too"
    letters = [
        row for batch in read.read_dead_letters(splits[:1]) for row in batch.records.to_pylist()
    ]
    aside = [n for n in range(RECORD_COUNT) if n not in kept]
    assert [header(letter, 4) for letter in letters] == [b"%d" % n for n in aside]
    reasons = dict(zip(aside, [header(letter, 1) for letter in letters], strict=True))
    assert reasons[3] == b"it is not one JSON object, from { to }"
    assert b"its event time, 11, is further ahead of the clock" in reasons[11]
    assert plan(tallystick_kafka, "deadletter", source_time="n").until(7, None).source_time == "n"

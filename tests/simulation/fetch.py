"""The Fetch port over simulated input logs: real record batches, of which an answer holds some."""

import random
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from tallystick.codec.layout import Layout
from tallystick.codec.records.decoder import decode_pieces
from tallystick.codec.records.encoder import encode, stamp
from tallystick.source.offsets import ONLY_INPUT
from tallystick.source.subscription import LossPolicy
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.read_plan import ReadPlan
from tallystick.values import Producer, SplitRange, TopicPartition
from tests.simulation.rows import key_of

BATCH_RECORDS = 3
ANSWER_BATCHES_MAX = 2
PRODUCER = Producer("", 9, 0)
LAYOUT = Layout(metadata=("topic", "partition", "offset"))
"""What the functions of a reader get: the value, and where it was."""


@cache
def input_batch(partition: TopicPartition, number: int) -> bytes:
    """Return a record batch of an input log; the value of a record is its key."""
    first = number * BATCH_RECORDS
    keys = [b"%d" % key_of(partition, offset) for offset in range(first, first + BATCH_RECORDS)]
    (batch,) = encode(pa.record_batch({"value": pa.array(keys, pa.binary())}), now_ms=0)
    return struct.pack(">q", first) + stamp(batch.data, PRODUCER, first)[8:]


@dataclass(frozen=True)
class SimulatedFetch:
    """See `ports.Fetch`.

    Args:
        dice: decides whose turn it is, and how much an answer holds.
        before_answer: a moment in which others run; what it raises, the reader meets.
    """

    dice: random.Random
    before_answer: Callable[[TopicPartition], None]

    def read(
        self, splits: Iterable[SplitRange], *, headers: bool, policy: LossPolicy
    ) -> Iterator[tuple[SplitRange, pa.RecordBatch]]:
        """See `ports.Fetch.read`; nothing is ever lost here."""
        positions = {split: split.start_offset for split in splits if split.offset_count}
        while positions:
            split = self.dice.choice(list(positions))
            partition, position = split.topic_partition, positions.pop(split)
            self.before_answer(partition)
            first = position // BATCH_RECORDS
            numbers = range(first, first + self.dice.randint(1, ANSWER_BATCHES_MAX))
            pieces = decode_pieces(
                b"".join(input_batch(partition, number) for number in numbers),
                topic_partition=partition,
                start_offset=position,
                stop_offset=split.stop_offset,
                aborted=None,
                headers=headers,
            )
            for piece in pieces:
                yield split, piece.batch
                position = piece.next_offset
            if position < split.stop_offset:
                positions[split] = position


def read_plan(
    dice: random.Random,
    before_answer: Callable[[TopicPartition], None],
    function: BatchFunction,
    event_time: pa.Field | None = None,
    input_: str = ONLY_INPUT,
) -> ReadPlan:
    """How a reading task reads, what the user's function makes of it, and the times it notes."""
    fetch = SimulatedFetch(dice, before_answer)
    return ReadPlan(fetch, LAYOUT, functions=(function,), event_time=event_time, input=input_)


def parts_of(
    plan: Callable[[str], ReadPlan], ranges: Mapping[TopicPartition, range]
) -> list[tuple[ReadPlan, list[SplitRange]]]:
    """Return what one reader reads of each input.

    Args:
        plan: how an input is read, by its id.
        ranges: by partition, as it is named among those of all inputs.
    """
    splits: dict[str, list[SplitRange]] = {}
    for (name, partition), offsets in ranges.items():
        *named, topic = name.split("/")
        split = SplitRange(topic, partition, offsets.start, offsets.stop)
        splits.setdefault(named[0] if named else ONLY_INPUT, []).append(split)
    return [(plan(partition), batches) for partition, batches in splits.items()]

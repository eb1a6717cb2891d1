"""Partitions as brokers hold them, read in any ranges: each visible record comes exactly once.

With what makes offsets odd: batches that compaction has thinned out or emptied, gaps between them,
markers of interleaved transactions, control batches of other kinds, offsets beyond 32 bits.
"""

import random
import struct
from itertools import pairwise

from handmade_batches import (
    ABORT,
    COMMIT,
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    Record,
    batch,
    marker,
)
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.records.decoder import decode
from tallystick.values import TopicPartition
from tests.examples import drawn

LEADER_CHANGE = struct.pack(">hh", 0, 2)
Row = tuple[int, bytes | None]


class Log:
    """A partition's batches, with the records in them, and the transactions that were aborted."""

    def __init__(self, draw: random.Random) -> None:
        self.data = b""
        self.start = self.end = draw.choice([0, 5, 2**31 - 3, 2**40])
        self.rows: list[Row] = []
        self.hidden: set[int] = set()
        self.aborted: list[tuple[int, int]] = []
        self._open: dict[int, tuple[int, list[int]]] = {}
        next_offset = self.start
        for _ in range(draw.randrange(1, 12)):
            next_offset += draw.choice([0, 0, 0, 1, 7, 1000])
            if draw.randrange(4) == 0:
                self._control(draw, next_offset)
            else:
                self._records(draw, next_offset)
            next_offset = max(next_offset, self.end)

    def _control(self, draw: random.Random, offset: int) -> None:
        """End a transaction; where none is open, a batch of another kind."""
        if not self._open:
            record = Record(0, key=LEADER_CHANGE, value=b"x")
            self.data += batch(offset, [record], attributes=CONTROL)
        else:
            producer = draw.choice(list(self._open))
            first, offsets = self._open.pop(producer)
            kind = draw.choice([ABORT, COMMIT])
            if kind == ABORT:
                self.aborted.append((producer, first))
                self.hidden.update(offsets)
            self.data += marker(offset, producer, kind)
        self.end = offset + 1

    def _records(self, draw: random.Random, offset: int) -> None:
        last = draw.randrange(12)
        deltas = sorted(draw.sample(range(last + 1), draw.randrange(last + 2)))
        values = [draw.choice([None, b"%d" % (offset + delta)]) for delta in deltas]
        records = [
            Record(delta, value=value, timestamp_delta=draw.choice([0, -5, 10**12]))
            for delta, value in zip(deltas, values, strict=True)
        ]
        producer = draw.choice([-1, 1, 2, 3])
        attributes = draw.choice([0, LOG_APPEND_TIME]) if producer < 0 else TRANSACTIONAL
        self.data += batch(
            offset, records, last_offset_delta=last, attributes=attributes, producer_id=producer
        )
        offsets = [offset + delta for delta in deltas]
        if producer >= 0:
            self._open.setdefault(producer, (offset, []))[1].extend(offsets)
        self.rows += zip(offsets, values, strict=True)
        self.end = offset + last + 1


@drawn(150)
@given(seed=st.integers(0, 2**40), is_committed=st.booleans())
def test_each_visible_record_is_read_once_in_any_ranges(seed: int, is_committed: bool) -> None:
    draw = random.Random(seed)
    log = Log(draw)
    draw.shuffle(log.aborted)
    cuts = sorted({log.start, log.end, *(draw.randint(log.start, log.end) for _ in range(3))})
    rows: list[Row] = []
    for start, stop in pairwise(cuts):
        decoded = decode(
            log.data,
            topic_partition=TopicPartition("t", 0),
            start_offset=start,
            stop_offset=stop,
            aborted=log.aborted if is_committed else None,
            headers=False,
        )
        decoded.batch.validate(full=True)
        assert decoded.next_offset == stop, (seed, start)
        columns = (decoded.batch.column(name).to_pylist() for name in ("offset", "value"))
        rows += zip(*columns, strict=True)
    assert rows == [row for row in log.rows if not (is_committed and row[0] in log.hidden)], seed

"""One answer as many Arrow batches: the same records, whatever the size of a piece."""

from itertools import pairwise

import pyarrow as pa
import pytest
from handmade_batches import ABORT, COMMIT, marker, transactional, values

from tallystick.codec.records.decoder import RECORD_SCHEMA, DecodedBatch, decode, decode_pieces
from tallystick.errors import CorruptRecordError
from tallystick.values import TopicPartition

PARTITION = TopicPartition("orders", 0)
LOG = [
    values(0, b"a", b"b"),
    transactional(2, 7, b"lost"),
    marker(3, 7, ABORT),
    transactional(4, 7, b"kept"),  # the same producer again: a piece must not forget the marker
    marker(5, 7, COMMIT),
    transactional(6, 9, b"lost", b"too"),
    values(8, b"c", b"d", b"e"),
    transactional(11, 9, b"lost"),
    marker(12, 9, ABORT),
]
ABORTED = [(7, 2), (9, 6)]


def pieces(piece_bytes: int, start: int = 0, stop: int = 13) -> list[DecodedBatch]:
    return list(
        decode_pieces(
            b"".join(LOG),
            topic_partition=PARTITION,
            start_offset=start,
            stop_offset=stop,
            aborted=ABORTED,
            headers=False,
            piece_bytes=piece_bytes,
        )
    )


@pytest.mark.parametrize("piece_bytes", [1, 20, 1 << 20])
@pytest.mark.parametrize(("start", "stop"), [(0, 13), (1, 10), (3, 9), (9, 13), (12, 13)])
def test_pieces_together_are_the_whole(piece_bytes: int, start: int, stop: int) -> None:
    whole = decode(
        b"".join(LOG),
        topic_partition=PARTITION,
        start_offset=start,
        stop_offset=stop,
        aborted=ABORTED,
        headers=False,
    )

    parts = pieces(piece_bytes, start, stop)

    assert pa.Table.from_batches([p.batch for p in parts], RECORD_SCHEMA).equals(
        pa.Table.from_batches([whole.batch])
    )
    assert parts[-1].next_offset == whole.next_offset == stop


def test_aborted_rows_stay_hidden_and_later_ones_of_their_producer_do_not() -> None:
    piece_values = [
        value for piece in pieces(1) for value in piece.batch.column("value").to_pylist()
    ]

    assert piece_values == [b"a", b"b", b"kept", b"c", b"d", b"e"]


def test_a_piece_ends_where_the_next_one_begins() -> None:
    parts = pieces(1)

    assert [piece.batch.num_rows for piece in parts] == [2, 1, 3]
    for before, after in pairwise(parts):
        assert before.batch.column("offset")[-1].as_py() < before.next_offset
        assert before.next_offset <= after.batch.column("offset")[0].as_py()


def test_what_stands_before_a_damaged_batch_is_handed_over_first() -> None:
    damaged = bytearray(values(13, b"f"))
    damaged[-1] ^= 1
    parts = decode_pieces(
        b"".join(LOG) + bytes(damaged),
        topic_partition=PARTITION,
        start_offset=0,
        stop_offset=14,
        aborted=ABORTED,
        headers=False,
        piece_bytes=1,
    )

    assert next(parts).batch.num_rows == 2
    with pytest.raises(CorruptRecordError, match="orders-0, record batch at offset 13"):
        list(parts)

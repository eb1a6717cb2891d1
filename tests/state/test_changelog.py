"""What was written is what is read, in parts too; what was damaged is refused."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.state import changelog
from tallystick.state.changelog import (
    DamagedError,
    decode,
    encode,
    groups_of,
    parse_index,
    segments_of,
)
from tallystick.state.key_groups import KeyGroupRange
from tallystick.state.overlay import ENTRIES
from tests.examples import drawn

ALL = KeyGroupRange(0, 32767)


def table(entries):
    columns = zip(*sorted(entries.items()), strict=True) if entries else ((), ())
    return pa.table([pa.array(column, pa.binary()) for column in columns], schema=ENTRIES)


def read(file, groups):
    """What a task reads: the index, then one slice."""
    segments = segments_of(parse_index(file.data[-file.index_size :], file.checksum), groups)
    entries = {}
    for at, segment in enumerate(segments):
        if at:
            before = segments[at - 1]
            assert segment.offset == before.offset + before.length, "not one slice"
        blob = file.data[segment.offset : segment.offset + segment.length]
        batch = decode(blob, segment, groups)
        entries.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    return entries


KEYS = st.builds(
    lambda group, rest: group.to_bytes(2, "big") + b"\x01" + rest,
    st.one_of(st.integers(0, 5), st.sampled_from([127, 128, 255, 256, 32766, 32767])),
    st.binary(max_size=3),
)


@drawn(50)
@given(
    st.dictionaries(KEYS, st.none() | st.binary(max_size=5), min_size=1, max_size=200),
    st.tuples(st.integers(0, 300), st.integers(0, 32767)).map(lambda ends: KeyGroupRange(*ends)),
    st.sampled_from([1, 2, 7, 2048]),
)
def test_any_range_reads_back_from_one_slice(entries, groups, segment_rows):
    """Whatever the segments; deletions are entries too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changelog, "SEGMENT_ROWS", segment_rows)
        file = encode(table(entries))

    wanted = {
        key: value
        for key, value in entries.items()
        if groups.first <= int.from_bytes(key[:2], "big") <= groups.last
    }
    assert read(file, ALL) == entries
    assert read(file, groups) == wanted
    assert (file.rows, file.first) == (len(entries), int.from_bytes(min(entries)[:2], "big"))
    assert file.last == int.from_bytes(max(entries)[:2], "big")


def test_segments_end_where_a_key_group_ends_unless_it_is_huge():
    rows = {
        (group.to_bytes(2, "big") + b"\x01%04d" % row): b""
        for group in range(9)
        for row in range(1000)
    }
    huge = {b"\0\x09\x01%06d" % row: b"" for row in range(changelog.SEGMENT_ROWS_MAX + 1)}
    file = encode(table(rows | huge))

    segments = parse_index(file.data[-file.index_size :], file.checksum)
    assert [(segment.first, segment.last) for segment in segments] == [
        (0, 2),
        (3, 5),
        (6, 8),
        (9, 9),
        (9, 9),
    ]


def test_long_values_make_segments_of_few_rows():
    file = encode(table({group.to_bytes(2, "big") + b"\x01": bytes(400_000) for group in range(6)}))

    assert len(parse_index(file.data[-file.index_size :], file.checksum)) == 3


def test_any_arrow_library_reads_the_file():
    entries = {b"\0\1\1k": b"v", b"\0\2\1k": None}
    file = encode(table(entries))

    assert pa.ipc.open_stream(file.data).read_all().equals(table(entries))


def test_a_snapshot_of_nothing_says_that_there_is_nothing():
    file = encode(table({}), KeyGroupRange(3, 5))

    assert (file.first, file.last, file.rows) == (3, 5, 0)
    assert read(file, ALL) == {}


@settings(deadline=None)
@given(st.data())
def test_each_damaged_byte_is_noticed(data):
    """But for the schema in front and the end of the stream, which no reader of ours looks at."""
    entries = {b"\0%c\1k" % group: b"value" * group for group in range(9)}
    file = encode(table(entries))
    segments = parse_index(file.data[-file.index_size :], file.checksum)
    places = [range(segment.offset, segment.offset + segment.length) for segment in segments]
    places.append(range(len(file.data) - file.index_size, len(file.data)))
    place = data.draw(
        st.sampled_from([at for places_of_segment in places for at in places_of_segment])
    )
    damaged = bytearray(file.data)
    damaged[place] ^= data.draw(st.integers(1, 255))

    with pytest.raises(DamagedError):
        read(file._replace(data=bytes(damaged)), ALL)


def test_a_newer_format_is_refused():
    tail = (20).to_bytes(4, "little") + b"TSSTATE9"

    with pytest.raises(DamagedError, match=r"TSSTATE9.*TSSTATE1"):
        parse_index(tail, changelog.zlib.crc32(tail))


def test_a_buffer_of_offsets_may_be_longer_than_they_are() -> None:
    """As Arrow reads it from a file that somebody else has written; fuzzing found it."""
    keys = [b"\0\1\0\7a", b"\1\2\0\7b", b"\3\4\0\7c"]
    _, offsets, data = pa.array(keys, pa.binary()).buffers()
    longer = pa.py_buffer(offsets.to_pybytes()[:16] + b"\0\0\0")

    for start in (0, 1):
        array = pa.BinaryArray.from_buffers(pa.binary(), 3, [None, longer, data]).slice(start)
        assert groups_of(array).tolist() == [0x0001, 0x0102, 0x0304][start:]

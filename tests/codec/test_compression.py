import struct
import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.codec.records.compression import CODEC_IDS, compress, decompress
from tallystick.errors import CorruptRecordError

NAMES = sorted(CODEC_IDS)
LARGE = b"".join(b"%07d some words that repeat " % number for number in range(200_000))
INCOMPRESSIBLE = b"".join(zlib.crc32(b"%d" % number).to_bytes(4) for number in range(40_000))


def xxhash32_of_short_input(data: bytes) -> int:
    """The frame header's checksum, from the definition of xxHash, for less than four bytes."""
    mask = 0xFFFFFFFF
    value = 374761393 + len(data)
    for byte in data:
        value = (value + byte * 374761393) & mask
        value = ((value << 11) | (value >> 21)) * 2654435761 & mask
    value ^= value >> 15
    value = value * 2246822519 & mask
    value ^= value >> 13
    value = value * 3266489917 & mask
    return value ^ value >> 16


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=300), repeat=st.sampled_from([1, 3, 1000]))
def test_what_was_compressed_comes_back(name: str, data: bytes, repeat: int) -> None:
    packed = compress(name, memoryview(data * repeat))

    assert bytes(decompress(CODEC_IDS[name], memoryview(packed))) == data * repeat


@pytest.mark.parametrize("data", [LARGE, INCOMPRESSIBLE], ids=["large", "incompressible"])
@pytest.mark.parametrize("name", NAMES)
def test_data_of_many_blocks_come_back(name: str, data: bytes) -> None:
    assert bytes(decompress(CODEC_IDS[name], compress(name, data))) == data


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, 1 << 20, 5 << 20])
def test_lz4_frames_have_independent_blocks_and_a_right_header_checksum(size: int) -> None:
    """Java refuses linked blocks, which general libraries write above 64 KB."""
    magic, flags, block_size, checksum = struct.unpack_from("<IBBB", compress("lz4", LARGE[:size]))

    assert magic == 0x184D2204
    assert flags == 0x60  # version 1, independent blocks, nothing optional
    assert checksum == xxhash32_of_short_input(bytes([flags, block_size])) >> 8 & 0xFF


@pytest.mark.parametrize("name", ["lz4", "zstd", "gzip"])
def test_frames_of_a_general_library_are_read(name: str) -> None:
    """As librdkafka, which writes linked lz4 blocks; others differ in what is optional."""
    packed = pa.Codec(name).compress(LARGE, asbytes=True)

    assert bytes(decompress(CODEC_IDS[name], packed)) == LARGE


def test_snappy_is_framed_for_java_and_read_with_and_without_frames() -> None:
    raw = pa.Codec("snappy").compress(LARGE, asbytes=True)

    assert compress("snappy", LARGE)[:16] == b"\x82SNAPPY\0\0\0\0\x01\0\0\0\x01"
    assert bytes(decompress(CODEC_IDS["snappy"], raw)) == LARGE


def test_gzip_of_several_members_is_read_whole() -> None:
    assert decompress(CODEC_IDS["gzip"], compress("gzip", b"one,") + compress("gzip", b"two")) == (
        b"one,two"
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_truncated_and_mutilated_data_are_corrupt(name: str) -> None:
    packed = compress(name, LARGE[:200_000])
    for damaged in (packed[:1], packed[: len(packed) // 2], packed[:-1], b"\xff" * 50):
        with pytest.raises(CorruptRecordError, match=name):
            decompress(CODEC_IDS[name], damaged)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_a_bomb_is_refused_before_it_fills_the_memory(name: str) -> None:
    with pytest.raises(CorruptRecordError, match="more than 100000 bytes"):
        decompress(CODEC_IDS[name], compress(name, bytes(10_000_000)), size_max=100_000)


def test_a_snappy_block_that_claims_gigabytes_is_not_believed() -> None:
    with pytest.raises(CorruptRecordError, match="claims to hold"):
        decompress(CODEC_IDS["snappy"], b"\xff\xff\xff\xff\x07" + b"abc")


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(CorruptRecordError, match="codec 5 is unknown"):
        decompress(5, b"")

"""The five compressions of Kafka's record batches, as Java brokers and clients read and write them.

Three of them differ from the defaults of a general library:
    lz4     Java refuses frames with linked blocks, which Arrow writes above 64 KB: we frame the
            blocks ourselves.
    snappy  Java writes the framing of the xerial library; others a raw block. Both are read.
    gzip    Arrow's default level is 9, three times slower than Kafka's default for 1 % of size.

Invariant: damaged input raises CorruptRecordError, and never makes us allocate more memory than
its own length can justify (a few claimed gigabytes in five bytes) or than `SIZE_MAX`.
"""

import struct
import zlib
from collections.abc import Iterator
from functools import cache

import pyarrow as pa

from tallystick.errors import CorruptRecordError

Buffer = bytes | bytearray | memoryview

CODEC_IDS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
"""Name to the number in a batch's attributes. Source: Kafka's CompressionType."""

SIZE_MAX = 2**31 - 1
"""The most decompressed bytes of a batch: what a Java client, or an Arrow column, can hold."""

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)  # version, lowest compatible version
_XERIAL_BLOCK_BYTES = 32 * 1024
_SNAPPY_RATIO_MAX = 22  # 64 bytes from a 3-byte copy is the densest that the format knows

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_LZ4_FRAME_HEADERS = {
    # largest block: version 1 and independent blocks, block size, header checksum
    64 << 10: b"\x60\x40\x82",
    256 << 10: b"\x60\x50\xfb",
    1 << 20: b"\x60\x60\x51",
    4 << 20: b"\x60\x70\x73",
}
_LZ4_UNCOMPRESSED = 0x80000000
_LZ4_END = struct.pack("<I", 0)

_READ_BYTES = 1 << 20
_READ_BYTES_MIN = 1 << 17
_USUAL_RATIO = 8
"""Too much room costs time, to allocate and to give back; so does a second read."""


@cache
def _codec(name: str) -> pa.Codec:
    return pa.Codec(name)


def compress(name: str, buffer: Buffer) -> bytes:
    """Compress the records of a batch.

    Args:
        name: one of `CODEC_IDS`.
        buffer: the records.
    """
    match name:
        case "none":
            return bytes(buffer)
        case "gzip":
            compressor = zlib.compressobj(wbits=31)
            return compressor.compress(buffer) + compressor.flush()
        case "snappy":
            return b"".join(_xerial_frame(memoryview(buffer)))
        case "lz4":
            return b"".join(_lz4_frame(memoryview(buffer)))
        case "zstd":
            return bytes(_codec("zstd").compress(buffer, asbytes=True))
    raise AssertionError(f"compression {name}, expected one of {', '.join(CODEC_IDS)}")


def decompress(codec_id: int, buffer: Buffer, *, size_max: int = SIZE_MAX) -> Buffer:
    """Decompress the records of a batch.

    Args:
        codec_id: the low three bits of the batch's attributes.
        buffer: the batch's records.
        size_max: how many bytes may come out.

    Raises:
        CorruptRecordError: the codec is unknown, the data are damaged, or larger than `size_max`.
    """
    match codec_id:
        case 0:
            return buffer
        case 1:
            return _gunzip(buffer, size_max)
        case 2:
            return _unsnappy(memoryview(buffer), size_max)
        case 3:
            return _stream(buffer, "lz4", size_max)
        case 4:
            return _stream(buffer, "zstd", size_max)
    raise CorruptRecordError(
        f"compression codec {codec_id} is unknown; known are "
        f"{', '.join(f'{number} ({name})' for name, number in CODEC_IDS.items())}"
    )


def _xerial_frame(view: memoryview) -> Iterator[Buffer]:
    yield _XERIAL_HEADER
    for at in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = _codec("snappy").compress(view[at : at + _XERIAL_BLOCK_BYTES], asbytes=True)
        yield struct.pack(">i", len(block))
        yield block


def _lz4_frame(view: memoryview) -> Iterator[Buffer]:
    block_bytes = next((size for size in _LZ4_FRAME_HEADERS if size >= len(view)), 4 << 20)
    yield _LZ4_MAGIC + _LZ4_FRAME_HEADERS[block_bytes]
    for at in range(0, len(view), block_bytes):
        plain = view[at : at + block_bytes]
        block = _codec("lz4_raw").compress(plain, asbytes=True)
        if len(block) < len(plain):
            yield struct.pack("<I", len(block))
            yield block
        else:
            yield struct.pack("<I", len(plain) | _LZ4_UNCOMPRESSED)
            yield plain
    yield _LZ4_END


def _gunzip(buffer: Buffer, size_max: int) -> Buffer:
    parts: list[bytes] = []
    size = 0
    rest: Buffer = buffer
    while rest:  # a gzip file is one member or several
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(rest, size_max - size + 1)
        except zlib.error as error:
            raise CorruptRecordError(f"the gzip data are damaged: {error}") from None
        size += len(part)
        if size > size_max:
            raise _too_large("gzip", size_max)
        if not member.eof:
            raise CorruptRecordError("the gzip data end early")
        parts.append(part)
        rest = member.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unsnappy(view: memoryview, size_max: int) -> Buffer:
    if view[: len(_XERIAL_MAGIC)] != _XERIAL_MAGIC:
        return _unsnappy_block(view, 0, size_max)
    parts: list[bytes] = []
    size = 0
    at = len(_XERIAL_HEADER)
    while at < len(view):
        if at + 4 > len(view):
            raise CorruptRecordError("the snappy data end within a block length")
        (length,) = struct.unpack_from(">i", view, at)
        at += 4
        if not 0 < length <= len(view) - at:
            raise CorruptRecordError(
                f"a snappy block claims {length} bytes where {len(view) - at} are left"
            )
        parts.append(_unsnappy_block(view[at : at + length], size, size_max))
        size += len(parts[-1])
        at += length
    return b"".join(parts)


def _unsnappy_block(block: memoryview, size_before: int, size_max: int) -> bytes:
    size = 0
    for index, byte in enumerate(block[:5]):  # the decompressed size, as a varint
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    else:
        raise CorruptRecordError("a snappy block does not tell its size")
    if size_before + size > size_max:
        raise _too_large("snappy", size_max)
    if size > _SNAPPY_RATIO_MAX * len(block):
        raise CorruptRecordError(f"a snappy block of {len(block)} bytes claims to hold {size}")
    try:
        return bytes(_codec("snappy").decompress(block, decompressed_size=size, asbytes=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise CorruptRecordError(f"the snappy data are damaged: {error}") from None


def _stream(buffer: Buffer, name: str, size_max: int) -> Buffer:
    """Decompress a format whose frames need not state their decompressed size."""
    parts: list[pa.Buffer] = []
    size = 0
    at_once = min(max(_READ_BYTES_MIN, _USUAL_RATIO * len(buffer)), _READ_BYTES)
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(buffer)), name) as stream:
            while part := stream.read_buffer(at_once):
                parts.append(part)
                size += part.size
                if size > size_max:
                    raise _too_large(name, size_max)
    except (OSError, pa.ArrowInvalid) as error:
        raise CorruptRecordError(f"the {name} data are damaged: {error}") from None
    return memoryview(parts[0]) if len(parts) == 1 else b"".join(parts)


def _too_large(name: str, size_max: int) -> CorruptRecordError:
    return CorruptRecordError(
        f"the {name} data decompress to more than {size_max} bytes, which no Kafka client writes"
    )

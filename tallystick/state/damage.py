"""Whether the bytes of a state file are those that its manifest speaks of."""

import zlib

from tallystick.state.changelog import DamagedError, parse_index
from tallystick.state.handles import StateFile


def damage_of(file: StateFile, data: bytes) -> str:
    """What is wrong with a whole file; "" if nothing is."""
    if len(data) != file.size:
        return f"{len(data)} bytes, expected {file.size}"
    try:
        segments = parse_index(data[file.size - file.index_size :], file.checksum)
    except DamagedError as error:
        return str(error)
    view = memoryview(data)
    for each in segments:
        if zlib.crc32(view[each.offset : each.offset + each.length]) != each.checksum:
            return f"{each.length} bytes at {each.offset} fail their checksum"
    return ""

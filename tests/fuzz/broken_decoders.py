"""Decoders that fail, each in another way: the harness must notice all of them."""

import ctypes
import time

from tests.fuzz.decoder import Decoder
from tests.fuzz.guarded import GuardedMemory

MEMORY = GuardedMemory()


def sound(data: bytes, original: bytes) -> bool:
    return data == original


def raises(data: bytes, original: bytes) -> bool:
    if data != original:
        raise KeyError("no error of ours")
    return True


def hangs(data: bytes, original: bytes) -> bool:
    while data != original:
        time.sleep(0.1)
    return True


def reads_beyond(data: bytes, original: bytes) -> bool:
    view = MEMORY.holding(data)
    if data != original:
        place = ctypes.addressof(ctypes.c_char.from_buffer(view)) + len(view)
        return ctypes.string_at(place, 1) == b""
    return True


def takes_memory(data: bytes, original: bytes) -> bool:
    return data == original or len(bytes(4 << 30)) > 0


DECODERS = {
    name: Decoder(lambda: [b"some bytes that are valid"], read)
    for name, read in {
        "sound": sound,
        "raises": raises,
        "hangs": hangs,
        "reads beyond": reads_beyond,
        "takes memory": takes_memory,
    }.items()
}

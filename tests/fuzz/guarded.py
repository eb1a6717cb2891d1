"""Bytes with forbidden memory before and after them: who reads beyond them dies at once."""

import ctypes
import mmap

PAGE = mmap.PAGESIZE
SIZE = 256 * PAGE
"""More than any case has."""


class GuardedMemory:
    """A piece of memory between two pages that must not be touched, for one value at a time."""

    def __init__(self) -> None:
        self._region = mmap.mmap(-1, SIZE + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (start, start + PAGE + SIZE):
            status = libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0)
            assert status == 0, ctypes.get_errno()
        self._view = memoryview(self._region)

    def holding(self, data: bytes, *, at_end: bool = True) -> memoryview:
        """Return the bytes, with the forbidden page right after them, or right before."""
        assert len(data) <= SIZE, len(data)
        begin = PAGE + SIZE - len(data) if at_end else PAGE
        self._view[begin : begin + len(data)] = data
        return self._view[begin : begin + len(data)]

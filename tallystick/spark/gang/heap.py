"""The heap of a process that does the same work again and again."""

import ctypes
import platform

LARGE_BYTES = 32 << 20
"""Larger blocks are the kernel's to give and to take, as ever; glibc allows no higher limit."""
KEPT_BYTES = 256 << 20
"""Free memory beyond this, at the end of the heap, goes back to the system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, for the next batch: up to `KEPT_BYTES`.

    By default a block of some hundred kilobytes, as batches are made of, comes from the kernel and
    goes back to it each time, and each of its pages is cleared and mapped anew: a tenth of the CPU
    seconds of a stateless pipeline. Where malloc is not glibc's, nothing is changed.

    Source: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)

"""What a long-lived process asks of the C library's allocator, so that memory which is free goes back to the system."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_ARENAS = 2
_LARGE_BYTES = 1 << 20
_KEPT_BYTES = 4 << 20


def give_memory_back() -> None:
    """Few arenas, and large pieces mapped on their own; without effect where the C library is another than glibc.

    glibc gives each thread an arena that never shrinks below its last piece in use, and takes larger and larger pieces from there as
    they come and go: a store whose clients come and go kept about 100 MiB that way, beside what its settings name.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_ARENA_MAX, _ARENAS)
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)

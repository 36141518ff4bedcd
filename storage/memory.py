"""Arrays whose memory goes back to the system when they are dropped, and blocks whose memory does not.

A process that keeps to a budget must be able to give memory back. The C library's allocator keeps what was freed, in
pieces that fit nothing: an index that grew to 4 MB held another 1 MB that way, a directory lowered ten times four times
its size. So arrays that are replaced by larger or smaller ones get pages of their own once they are large.

LMDB is the other case: it allocates and frees the same blocks at every commit, and an allocator that gives them back in
between has each of their pages faulted in and zeroed again (`keep_freed`).
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LARGE_BYTES = 1 << 23  # from this size on huge pages are asked for: a look-up far from the last one waits less for them
OWN_PAGES_BYTES = 1 << 14  # from this size on: what rounding up to whole pages adds is at most a quarter
_MOST_KEPT = (1 << 25) - (1 << 13)  # a larger block with what is in front of it moves no threshold of glibc


def zeros(size: int, dtype: DTypeLike, *, touched: bool = False) -> NDArray[Any]:
    """``size`` zeros; untouched ones cost no memory.

    Args:
        touched: all of it will be, soon: the system gives large arrays their pages in one go. A page that is first
            read, then written costs two page faults otherwise.
    """
    wanted = size * np.dtype(dtype).itemsize
    if wanted < OWN_PAGES_BYTES:
        return np.zeros(size, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if touched else 0)
    memory = mmap.mmap(-1, wanted, flags=flags)
    if wanted >= LARGE_BYTES:
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, size)


def give_back(array: NDArray[Any], first: int) -> None:
    """Have the system take back the memory of array[first:], made by :func:`zeros`, as far as it is whole pages; it is
    zeros again then. Small arrays keep theirs."""
    memory: Any = array.base.obj if isinstance(array.base, memoryview) else array.base
    start = -(-first * array.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    if isinstance(memory, mmap.mmap) and start < len(memory):
        memory.madvise(mmap.MADV_DONTNEED, start, len(memory) - start)


def keep_freed(count: int) -> None:
    """Have blocks that are allocated and freed again and again, `count` bytes in all, stay with the process.

    glibc gives back what is free at the end of a heap beyond twice the size of the largest block, up to 32 MiB, that
    was mapped by itself and then freed (mallopt(3), M_MMAP_THRESHOLD). Such a block is what this allocates and frees,
    untouched. Under other allocators nothing happens.
    """
    block = np.empty(min(count, _MOST_KEPT), np.uint8)
    del block


def held_bytes(size: int, itemsize: int) -> int:
    """Memory that :func:`zeros` takes, once all of it was touched."""
    wanted = size * itemsize
    return wanted if wanted < OWN_PAGES_BYTES else -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE

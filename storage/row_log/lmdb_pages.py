"""Where LMDB keeps the values of a database, without reading them.

py-lmdb touches every page of a value that it hands out, also as a buffer: asking it where a segment lies would read the
whole segment, and opening a store the whole file. The keys that a cursor gives lie in LMDB's leaf pages, though, and
beside each lies what is needed (LMDB 0.9, data format 1, `mdb.c`: `MDB_node`, `MDB_page`):

    u16 size, low half | u16 size, high half | u16 flags | u16 key bytes | key | u64 page number, if F_BIGDATA is set

A page begins with its own number, which gives the address of page 0; a large value begins 16 bytes into its first page.
Places outside the file are refused here, and whoever reads a segment checks its magic, number, size and checksums.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import njit

from storage.errors import CorruptSegmentError
from storage.row_log.lmdb_check import run_begins
from storage.row_log.lmdb_nodes import PAGE_HEADER_BYTES
from storage.row_log.raw import load16, load64

_NODE_BYTES, _BIG_DATA = np.uint64(8), np.uint64(1)


def place_of_value(key: memoryview, page_bytes: int, pages: int) -> tuple[int, int]:
    """Address and size of the large value stored under a key, which is a buffer from a cursor of a read transaction.

    Args:
        key: the buffer; it must not be a copy.
        page_bytes, pages: size of a page, and how many the file has.

    Raises:
        CorruptSegmentError: the value is not a large one within the file, so it is no segment of ours.
    """
    first, page, size = _large_value(key, page_bytes, pages)
    return first + page * page_bytes + PAGE_HEADER_BYTES, size


def is_large(key: memoryview, value: memoryview, page_bytes: int) -> bool:
    """Whether LMDB keeps such a value on pages of its own."""
    return int(_NODE_BYTES) + len(key) + len(value) > (page_bytes - PAGE_HEADER_BYTES) // 2 - 2


def check_run(key: memoryview, page_bytes: int, pages: int, what: str) -> None:
    """Check the header in front of the value stored under a key, which LMDB believes when it frees the value's pages.

    Arguments as of `place_of_value`; `what` it is, for messages.

    Raises:
        CorruptSegmentError: as `place_of_value`, or the header is another one.
    """
    first, page, size = _large_value(key, page_bytes, pages)
    header = ctypes.string_at(first + page * page_bytes, PAGE_HEADER_BYTES)
    if not run_begins(header, page, (PAGE_HEADER_BYTES - 1 + size) // page_bytes + 1):
        raise CorruptSegmentError(
            f"page {page} of data.mdb, the first of {what}, has a damaged header: "
            "it cannot be deleted; restore the file from a copy"
        )


def _large_value(key: memoryview, page_bytes: int, pages: int) -> tuple[int, int, int]:
    """The address of page 0, the first page of a value and its size."""
    first, page, size = _read_node(np.uint64(np.frombuffer(key, np.uint8).ctypes.data), len(key), page_bytes)
    last = page + (PAGE_HEADER_BYTES + size - 1) // page_bytes
    if size < 0 or not 0 <= last < pages:
        raise CorruptSegmentError(
            f"segment {bytes(key).hex()} has no pages of its own in data.mdb: the file is damaged"
        )
    return first, page, size


@njit(cache=True)
def _read_node(at: Any, key_bytes: Any, page_bytes: Any) -> Any:
    """As `_large_value`, of the key at an address; a size of -1 for a value that is not a large one."""
    node = at - _NODE_BYTES
    size = np.int64(load16(node) | load16(node + np.uint64(2)) << np.uint64(16))
    is_large = load16(node + np.uint64(4)) & _BIG_DATA and np.int64(load16(node + np.uint64(6))) == key_bytes
    page = np.int64(load64(at + np.uint64(key_bytes))) if is_large else np.int64(0)
    leaf = np.int64(at) - np.int64(at) % page_bytes
    first = leaf - np.int64(load64(np.uint64(leaf))) * page_bytes
    return first, page, size if is_large else -1

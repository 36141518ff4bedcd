"""The nodes of one page of LMDB's trees, checked against each other and against the page.

What LMDB's pages look like (version 0.9, data format 1, `mdb.c`): a page header of 16 bytes (u64 own number, u16 pad,
u16 flags, u16 lower, u16 upper; in front of a large value u32 pages in place of the last two), then `lower` bounds the
offsets of nodes, u16 each, and nodes lie from `upper` to the end of the page. A node is

    u16 size, low half | u16 size, high half | u16 flags | u16 key bytes | key | value, or u64 number of its page

and in a branch the first three make the number of a child, whose keys are not less than the node's.

LMDB keeps nodes packed, so the least offset is `upper` and each node ends where another begins or the page ends. A
value is large, in pages of its own, if key, value and 8 bytes are more than about half a page; no other value is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

PAGE_HEADER_BYTES = 16
IS_LARGE, IS_TREE = 1, 2  # flags of nodes: the value is in a run of pages; it is the record of a named database
KEY_AT, KEY_BYTES, FLAGS, VALUE_AT, VALUE_BYTES, PAGE = range(6)  # columns of what `read_nodes` finds
WRONG = (
    "",
    "its bounds are impossible",
    "a node lies outside of it",
    "its nodes overlap or leave a gap",
    "its keys do not ascend",
    "a value has an impossible place",
)


@njit(inline="always")
def _u16(page: Any, at: Any) -> Any:
    return np.int64(page[at]) | np.int64(page[at + 1]) << 8


@njit(inline="always")
def _u64(page: Any, at: Any) -> Any:
    """As a signed number: the greatest page numbers come out negative, and are refused as such."""
    number = np.int64(0)
    for i in range(8):
        number |= np.int64(page[at + i]) << (8 * i)
    return number


@njit(inline="always")
def _ascends(page: Any, nodes: Any, i: Any, integers: Any) -> Any:
    """Whether key i is greater than the key before it."""
    before, here = nodes[i - 1, KEY_AT], nodes[i, KEY_AT]
    if integers:
        return np.uint64(_u64(page, before)) < np.uint64(_u64(page, here))
    common = min(nodes[i - 1, KEY_BYTES], nodes[i, KEY_BYTES])
    for at in range(common):
        if page[before + at] != page[here + at]:
            return page[before + at] < page[here + at]
    return nodes[i - 1, KEY_BYTES] < nodes[i, KEY_BYTES]


@njit(nogil=True, cache=True)
def read_nodes(page: Any, branch: Any, integers: Any, nodes: Any, sizes: Any) -> Any:
    """Check the nodes of a page of a tree.

    Args:
        page: uint8 (page bytes,).
        branch, integers: whether it is a branch; whether keys are u64 in this machine's order.
        nodes: int64 (page bytes / 8, 6), filled: see KEY_AT and so on.
        sizes: int64 (page bytes,), room to work in.

    Returns:
        (number of nodes, 0 or the position in WRONG).
    """
    page_bytes = len(page)
    lower, upper = _u16(page, 12), _u16(page, 14)
    if lower < PAGE_HEADER_BYTES or lower % 2 == 1 or upper < lower or upper % 2 == 1 or upper > page_bytes:
        return 0, 1
    count = (lower - PAGE_HEADER_BYTES) // 2
    if count > len(nodes):
        return 0, 1
    largest = ((page_bytes - PAGE_HEADER_BYTES) // 2 & ~1) - 2  # key, value and 8 bytes; what has more gets its own run
    sizes[:] = 0
    for i in range(count):
        at = _u16(page, PAGE_HEADER_BYTES + 2 * i)
        if at < upper or at % 2 == 1 or at + 8 > page_bytes:
            return count, 2
        key_bytes = _u16(page, at + 6)
        value = _u16(page, at) | _u16(page, at + 2) << 16
        flags = _u16(page, at + 4)
        size = 8 + key_bytes
        if branch:
            nodes[i, PAGE] = value | flags << 32
        elif flags & IS_LARGE:
            size += 8
        else:
            size += value
        if at + size > page_bytes or sizes[at] != 0:
            return count, 2
        if (key_bytes == 0 and not (branch and i == 0)) or (integers and key_bytes != 8 and not (branch and i == 0)):
            return count, 2
        sizes[at] = size + (size & 1)
        if not branch:
            # In its free list LMDB leaves a value that it has made shorter, in the same transaction, where it was.
            is_large = flags & IS_LARGE != 0
            if (8 + key_bytes + value > largest and not is_large) or (
                8 + key_bytes + value <= largest and is_large and not integers
            ):
                return count, 5
            nodes[i, FLAGS], nodes[i, VALUE_AT], nodes[i, VALUE_BYTES] = flags, at + 8 + key_bytes, value
            nodes[i, PAGE] = _u64(page, at + 8 + key_bytes) if flags & IS_LARGE else -1
        nodes[i, KEY_AT], nodes[i, KEY_BYTES] = at + 8, key_bytes
        if i > (1 if branch else 0) and not _ascends(page, nodes, i, integers):
            return count, 4
    at, found = upper, 0
    while at < page_bytes and sizes[at] != 0:
        at += sizes[at]
        found += 1
    return count, 0 if at == page_bytes and found == count else 3

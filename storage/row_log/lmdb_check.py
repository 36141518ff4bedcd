"""LMDB's own pages, checked before LMDB reads them: it proves nothing, follows whatever a page says, and dies of it.

LMDB keeps no checksum. A flipped bit in one of its pages can make it read behind the end of the file (SIGBUS), walk in
circles, take a free page for a used one and overwrite rows with others. So before anything is read through it, all
its pages are read from the file and compared with what they must be, which is a good deal, since a page says most
things twice:

- the two meta pages are of one transaction and the next, and agree in what never changes;
- every tree (the free list, the main one, the named databases in it) has the depth and the numbers of pages and entries
  that its record gives; a page knows its own number and kind; its nodes fill it without a gap or an overlap; keys
  ascend, also from page to page, and are on the right side of those in the branches;
- large values lie in runs of pages inside the file, and the header in front of a run says how long it is;
- no page is reached twice, none that is reached is on the free list, and none on it is there twice.

The headers in front of segments are left out: a segment's own checksums prove what is read, the first page of every
segment would have to be read from disk here, and `row_log.lmdb_pages.check_run` looks at a header where it counts, when
LMDB is about to free the run. A page that nothing reaches and that is not on the free list is lost space, not damage.

A reader may check beside a live writer: pages that its transaction can reach are not written meanwhile, and the meta
page that it began with is recognised by its number. `check_pages` says when that one has been overwritten already.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError
from storage.row_log.lmdb_nodes import (
    FLAGS,
    IS_LARGE,
    IS_TREE,
    KEY_AT,
    KEY_BYTES,
    PAGE,
    PAGE_HEADER_BYTES,
    VALUE_AT,
    VALUE_BYTES,
    WRONG,
    read_nodes,
)

_BRANCH, _LEAF, _LARGE, _META = 1, 2, 4, 8  # kinds of pages: the flags in their headers
_INTEGER_KEYS = 8  # flag of a tree: keys are u64 of this machine, as in the free list
_NO_PAGE = (1 << 64) - 1
_FIRST_PAGE = 2  # behind the meta pages
_MOST_LEVELS = 32

_PAGE = struct.Struct("<QHHHH")
_META_HEAD = struct.Struct("<IIQQ")
_TREE_RECORD = struct.Struct("<IHHQQQQQ")
_META_TAIL = struct.Struct("<QQ")
_META_BYTES = PAGE_HEADER_BYTES + _META_HEAD.size + 2 * _TREE_RECORD.size + _META_TAIL.size
_MAGIC, _FORMAT = 0xBEEFC0DE, 1
_TRIES = 100  # to read both meta pages between two commits of a live writer


@dataclass(frozen=True, slots=True)
class _Tree:
    """The record of a tree: of a named database, the main one or the free list."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    large_pages: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class _Meta:
    """A meta page: the roots of one transaction."""

    page_bytes: int
    free: _Tree
    main: _Tree
    pages: int
    transaction: int


def check_meta_pages(data: Path) -> None:
    """Refuse a file whose meta pages LMDB would misread. To be called before the file is given to LMDB.

    LMDB writes transaction N into page N % 2 and believes the greater number, so a flipped bit in one would bring back
    the rows of the transaction before.

    Raises:
        CorruptSegmentError: the file is damaged, or is not LMDB's.
    """
    with open(data, "rb", buffering=0) as file:
        for left in reversed(range(_TRIES)):
            try:
                return _check_pair(file.fileno(), data)
            except CorruptSegmentError:
                if not left:
                    raise


def _check_pair(file: int, data: Path) -> None:
    first = _read_meta(file, 0, 0, data)
    second = _read_meta(file, 1, first.page_bytes, data)
    even, odd = first.transaction, second.transaction
    if (even or odd) and not (even % 2 == 0 and odd % 2 == 1 and abs(even - odd) == 1):  # both are 0 in a new file
        raise CorruptSegmentError(
            f"{data} has meta pages of transactions {even} and {odd}, and not of one and the next: "
            "the file is damaged, restore it from a copy"
        )
    if first.page_bytes != second.page_bytes:
        raise _damage(data, 1, f"it says that pages have {second.page_bytes} bytes, page 0 says {first.page_bytes}")


def _read_meta(file: int, number: int, at: int, data: Path) -> _Meta:
    raw = os.pread(file, _META_BYTES, at)
    if len(raw) < _META_BYTES:
        raise CorruptSegmentError(f"{data} ends within its meta pages: it was cut short; restore it from a copy")
    own, _, flags, _, _ = _PAGE.unpack_from(raw)
    magic, version, _, _ = _META_HEAD.unpack_from(raw, PAGE_HEADER_BYTES)
    if (own, flags, magic, version) != (number, _META, _MAGIC, _FORMAT):
        raise _damage(data, number, "it is no meta page of LMDB's data format 1")
    trees_at = PAGE_HEADER_BYTES + _META_HEAD.size
    free, main = (_Tree(*_TREE_RECORD.unpack_from(raw, trees_at + i * _TREE_RECORD.size)) for i in (0, 1))
    last_page, transaction = _META_TAIL.unpack_from(raw, trees_at + 2 * _TREE_RECORD.size)
    page_bytes = free.pad  # LMDB keeps the size of a page where other trees keep the size of keys
    if page_bytes not in (1 << bits for bits in range(9, 17)):
        raise _damage(data, number, f"it says that pages have {page_bytes} bytes")
    if free.flags != _INTEGER_KEYS or main.flags != 0 or main.pad != 0:
        raise _damage(data, number, f"it describes trees with flags {free.flags:x} and {main.flags:x}")
    return _Meta(page_bytes, free, main, last_page + 1, transaction)


def check_pages(data: Path, transaction: int) -> bool:
    """Check every page that a transaction can reach; it must be open, and be the last one when it began.

    Args:
        data: the file, whose meta pages have been checked.
        transaction: its number.

    Returns:
        False if its meta page has been overwritten by a later commit: begin another transaction and check again.

    Raises:
        CorruptSegmentError: names file, page and what is wrong.
    """
    file = os.open(data, os.O_RDONLY)
    try:
        page_bytes = _read_meta(file, 0, 0, data).page_bytes
        number = transaction % 2
        meta, again = (_read_meta(file, number, number * page_bytes, data) for _ in range(2))
        if meta != again or meta.transaction != transaction:
            return False
        size = os.fstat(file).st_size
        if size < meta.pages * page_bytes and size % page_bytes:
            raise CorruptSegmentError(
                f"{data} has {size} bytes, fewer than the {meta.pages} pages that it was written with: "
                "it was cut short; restore it from a copy"
            )
        _Walk(file, data, meta, size // page_bytes).check()
        return True
    finally:
        os.close(file)


class _Walk:
    """One look at all pages of a transaction. Not to be used twice.

    Args:
        file: descriptor.
        data: its path, for messages.
        meta: where to begin.
        pages: whole pages that the file has. Free ones behind its end were counted by LMDB and never written.
    """

    def __init__(self, file: int, data: Path, meta: _Meta, pages: int) -> None:
        self._file = file
        self._data = data
        self._meta = meta
        self._pages = min(meta.pages, pages)
        self._page_bytes = meta.page_bytes
        self._nodes = np.zeros((meta.page_bytes // 8, 6), np.int64)
        self._sizes = np.zeros(meta.page_bytes, np.int64)
        self._tree_pages: set[int] = set()
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # first pages, numbers of pages
        self._free: list[NDArray[np.int64]] = []

    def check(self) -> None:
        """Raises CorruptSegmentError."""
        for key, value in self._entries("the free list", self._meta.free, headers=True):
            self._take_free(int.from_bytes(key, "little"), value)
        for name, record in self._entries("the list of databases", self._meta.main, headers=True, named=True):
            if record:
                tree = _Tree(*_TREE_RECORD.unpack(record))
                what = f"the database {name.decode(errors='replace')!r}"
                if tree.flags or tree.pad:
                    raise self._damaged(tree.root, f"{what} has flags {tree.flags:x}, expected none")
                for _ in self._entries(what, tree, headers=name != b"segments"):
                    pass
        self._check_disjoint()

    # ---- trees

    def _entries(self, what: str, tree: _Tree, *, headers: bool, named: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Check a tree; keys and values of the free list, names and records of the main tree, otherwise nothing."""
        counts = [0, 0, 0, 0]  # branch pages, leaf pages, pages of large values, entries
        wants_values = named or bool(tree.flags & _INTEGER_KEYS)
        if tree.root != _NO_PAGE:
            if not 0 < tree.depth <= _MOST_LEVELS:
                raise self._damaged(tree.root, f"{what} has a depth of {tree.depth}")
            for page, nodes in self._leaves(what, tree, counts):
                counts[3] += len(nodes)
                self._check_flags(what, page, nodes, named)
                counts[2] += self._take_large(nodes, headers, shorter=bool(tree.flags & _INTEGER_KEYS))
                if wants_values:
                    yield from self._values(page, nodes, named)
        expected = [tree.branch_pages, tree.leaf_pages, tree.large_pages, tree.entries]
        if counts != expected or (tree.root == _NO_PAGE and tree.depth):
            raise CorruptSegmentError(
                f"{self._data}: {what} has {counts} branch pages, leaf pages, pages of large values and entries, "
                f"but {expected} were counted when it was written: the file is damaged, restore it from a copy"
            )

    def _leaves(
        self, what: str, tree: _Tree, counts: list[int]
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """Pages and nodes of all leaves from left to right; `counts` of pages are kept on the way."""
        integers = tree.flags == _INTEGER_KEYS
        stack: list[tuple[int, int, Any, Any]] = [(tree.root, 1, None, None)]  # page, level, least key, next greater
        while stack:
            number, level, least, limit = stack.pop()
            branch = level < tree.depth
            page = self._page(number, _BRANCH if branch else _LEAF, what)
            counts[0 if branch else 1] += 1
            nodes = self._nodes_of(number, page, branch, integers, what)
            keys = [_key(page, node, integers) for node in nodes] if branch else []
            first = keys[1] if branch else _key(page, nodes[0], integers)
            last = keys[-1] if branch else _key(page, nodes[-1], integers)
            if (least is not None and first < least) or (limit is not None and last >= limit):
                raise self._damaged(number, f"{what} does not lead to its keys there")
            if branch:
                bounds = [least, *keys[1:], limit]
                children = nodes[:, PAGE].tolist()
                stack += [(children[i], level + 1, bounds[i], bounds[i + 1]) for i in reversed(range(len(children)))]
            else:
                yield page, nodes

    def _page(self, number: int, kind: int, what: str) -> NDArray[np.uint8]:
        """A page of a tree, which must be of this kind and not have been met before."""
        if not _FIRST_PAGE <= number < self._pages:
            raise self._damaged(
                number, f"{what} leads there, and the file has pages {_FIRST_PAGE} to {self._pages - 1}"
            )
        if number in self._tree_pages:
            raise self._damaged(number, f"{what} leads there, and it was reached before")
        self._tree_pages.add(number)
        page = np.frombuffer(os.pread(self._file, self._page_bytes, number * self._page_bytes), np.uint8)
        own, _, flags, _, _ = _PAGE.unpack_from(page.data)
        if own != number or flags != kind:
            raise self._damaged(number, f"{what} leads there, and it says it is page {own} with flags {flags:x}")
        return page

    def _nodes_of(
        self, number: int, page: NDArray[np.uint8], branch: bool, integers: bool, what: str
    ) -> NDArray[np.int64]:
        count, wrong = read_nodes(page, branch, integers, self._nodes, self._sizes)
        if wrong or count < (2 if branch else 1):
            raise self._damaged(number, f"{WRONG[wrong] or f'it has {count} nodes'}; it belongs to {what}")
        return self._nodes[:count].copy()

    def _check_flags(self, what: str, page: NDArray[np.uint8], nodes: NDArray[np.int64], named: bool) -> None:
        flags = nodes[:, FLAGS]
        allowed = (flags & ~(IS_LARGE | (IS_TREE if named else 0))) == 0
        records = flags & IS_TREE != 0
        if not allowed.all() or (nodes[records, VALUE_BYTES] != _TREE_RECORD.size).any() or (flags == 3).any():
            raise self._damaged(_PAGE.unpack_from(page.data)[0], f"{what} has nodes with flags {flags.max():x} there")

    # ---- values

    def _take_large(self, nodes: NDArray[np.int64], headers: bool, *, shorter: bool) -> int:
        """Note the runs of large values, and check what is in front of them; how many pages they take.

        Args:
            shorter: whether values may take fewer pages than they have: in its free list LMDB makes some shorter.
        """
        large = nodes[nodes[:, FLAGS] & IS_LARGE != 0]
        firsts = large[:, PAGE]
        counts = (PAGE_HEADER_BYTES - 1 + large[:, VALUE_BYTES]) // self._page_bytes + 1
        self._check_inside(firsts, counts)
        for at, first in enumerate(firsts.tolist()) if headers else ():
            header = os.pread(self._file, PAGE_HEADER_BYTES, first * self._page_bytes)
            if shorter:
                counts[at] = max(counts[at], pages_of_run(header))
            if not run_begins(header, first, int(counts[at])):
                raise self._damaged(first, "the header of a large value is another one")
        self._check_inside(firsts, counts)
        self._runs.append((firsts, counts))
        return int(counts.sum())

    def _check_inside(self, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        outside = (firsts < _FIRST_PAGE) | (firsts >= self._pages) | (firsts + counts > self._pages)
        if outside.any():
            raise self._damaged(int(firsts[outside][0]), "a large value lies there, in part outside of the file")

    def _values(self, page: NDArray[np.uint8], nodes: NDArray[np.int64], named: bool) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of a leaf; of the main tree's only the records of databases, b"" in place of other values."""
        for node in nodes.tolist():
            key = page[node[KEY_AT] : node[KEY_AT] + node[KEY_BYTES]].tobytes()
            if named and not node[FLAGS] & IS_TREE:
                yield key, b""
            elif node[FLAGS] & IS_LARGE:
                at = node[PAGE] * self._page_bytes + PAGE_HEADER_BYTES
                yield key, os.pread(self._file, node[VALUE_BYTES], at)
            else:
                yield key, page[node[VALUE_AT] : node[VALUE_AT] + node[VALUE_BYTES]].tobytes()

    def _take_free(self, transaction: int, value: bytes) -> None:
        """Note the pages that a transaction has freed: their count, then their numbers in descending order."""
        count = int.from_bytes(value[:8], "little")
        if len(value) % 8 or not 8 + 8 * count <= len(value) or not 0 < transaction <= self._meta.transaction:
            raise self._damaged_list(transaction, f"{count} pages in {len(value)} bytes")
        pages = np.frombuffer(value, "<u8", count, 8)
        if count and (pages.max() >= self._meta.pages or pages.min() < _FIRST_PAGE):
            raise self._damaged_list(transaction, f"pages {pages.min()} to {pages.max()} of {self._meta.pages}")
        if (pages[1:] >= pages[:-1]).any():
            raise self._damaged_list(transaction, "pages that do not descend")
        self._free.append(pages.astype(np.int64))

    def _check_disjoint(self) -> None:
        """No page has two uses."""
        single = np.concatenate([np.fromiter(self._tree_pages, np.int64, len(self._tree_pages)), *self._free])
        firsts = np.concatenate([single, *(first for first, _ in self._runs)])
        counts = np.concatenate([np.ones(len(single), np.int64), *(count for _, count in self._runs)])
        order = np.argsort(firsts, kind="stable")
        firsts, ends = firsts[order], (firsts + counts)[order]
        twice = np.flatnonzero(firsts[1:] < ends[:-1])
        if len(twice):
            raise self._damaged(int(firsts[twice[0] + 1]), "it has two uses, or is used and on the free list")

    def _damaged(self, number: int, wrong: str) -> CorruptSegmentError:
        return _damage(self._data, number, wrong)

    def _damaged_list(self, transaction: int, seen: str) -> CorruptSegmentError:
        return CorruptSegmentError(
            f"{self._data}: the free list has an entry of transaction {transaction} with {seen}: "
            "the file is damaged, restore it from a copy"
        )


def pages_of_run(header: bytes) -> int:
    """How many pages the 16 bytes in front of a large value say that it has."""
    *_, low, high = _PAGE.unpack(header)
    return int(low | high << 16)


def run_begins(header: bytes, first: int, count: int) -> bool:
    """Whether 16 bytes are the header of a large value that lies in `count` pages from page `first` on."""
    own, _, flags, low, high = _PAGE.unpack(header)
    return (own, flags, low | high << 16) == (first, _LARGE, count)


def _damage(data: Path, number: int, wrong: str) -> CorruptSegmentError:
    return CorruptSegmentError(
        f"page {number} of {data} is damaged: {wrong}; LMDB cannot use the file: restore it from a copy"
    )


def _key(page: NDArray[np.uint8], node: NDArray[np.int64], integers: bool) -> Any:
    """A node's key, as something that compares as LMDB compares it."""
    key = page[node[KEY_AT] : node[KEY_AT] + node[KEY_BYTES]].tobytes()
    return int.from_bytes(key, "little") if integers else key

"""Asking the system for the pages of a batch before its rows are touched.

A row whose page is not in memory costs a page fault of about 100 us, one at a time; `MADV_WILLNEED` on all pages of a
batch puts the reads in flight together. But the call itself costs half a microsecond a page, several times what a row
costs that is in memory, and pages that were asked for long before they are read may be gone again: large batches are
asked for in parts. So the call is made only when it pays: `PageAdvisor` asks `mincore` about a sample of the batch's
pages, and makes the calls if any of those is missing, or if earlier batches had major faults although their samples
were complete.

Nothing here changes what is read, so threads may share an advisor: at worst it asks once too often.
"""

from __future__ import annotations

import mmap
import resource
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.row_log.places import IDS, ROWS, id_address, row_of, slot_of
from storage.row_log.raw import load8, madvise, mincore, store8

_SAMPLE = 16
_FAULTS_TOLERATED = 8  # of a batch, before the next ones ask for their pages
_REMEMBERED = 32  # parts of batches in memory after which the disk is forgotten
_WILLNEED = np.int32(3)
_PAGE = np.uint64(mmap.PAGESIZE)
_PAGE_MASK = ~np.uint64(mmap.PAGESIZE - 1)
_0, _1 = np.uint64(0), np.uint64(1)


@njit(inline="always")
def _address(segments: Any, column: Any, stride: Any, place: Any) -> Any:
    """Where the row at a place, or the id stored with it, begins."""
    return (
        id_address(segments, place)
        if column == IDS
        else np.uint64(segments[slot_of(place), column]) + row_of(place) * stride
    )


@njit(nogil=True, cache=True)
def _sample_is_resident(segments: Any, column: Any, stride: Any, places: Any, step: Any, state: Any) -> Any:
    """Whether the pages of every `step`-th place are in memory; `state` is the address of a spare byte."""
    for i in range(0, len(places), step):
        if places[i] != _0:
            page = _address(segments, column, stride, places[i]) & _PAGE_MASK
            store8(state, _0)
            if mincore(page, _PAGE, state) != 0 or load8(state) & _1 == _0:
                return False
    return True


@njit(nogil=True, cache=True)
def _will_need(segments: Any, column: Any, stride: Any, places: Any) -> None:
    """Ask for all pages of rows at sorted places; neighbouring pages are asked for together."""
    first = last = _0
    for place in places:
        if place == _0:
            continue
        row = _address(segments, column, stride, place)
        begin, end = row & _PAGE_MASK, ((row + stride - _1) & _PAGE_MASK) + _PAGE
        if begin > last or begin < first:
            if last > first:
                madvise(first, last - first, _WILLNEED)
            first = begin
            last = end
        elif end > last:
            last = end
    if last > first:
        madvise(first, last - first, _WILLNEED)


class PageAdvisor:
    """Decides batch by batch whether to ask for pages; see the module's docstring.

    Attributes:
        batches_asked: batches, or parts of one, whose pages were asked for.
    """

    def __init__(self) -> None:
        self.batches_asked = 0
        self._wary = self._lately = 0

    @property
    def waits_for_disk(self) -> bool:
        """Whether rows were not in memory lately."""
        return self._lately > 0

    def resident(self, segments: NDArray[np.int64], column: int, stride: np.uint64, places: NDArray[np.uint64]) -> bool:
        """Whether a sample of what lies at places is in memory; `column` (ROWS or IDS) and `stride` say what does."""
        step, spare = max(1, len(places) // _SAMPLE), np.zeros(8, np.uint8)
        return bool(_sample_is_resident(segments, column, stride, places, step, np.uint64(spare.ctypes.data)))

    def ask(self, segments: NDArray[np.int64], column: int, stride: np.uint64, places: NDArray[np.uint64]) -> None:
        """Put the reads of all pages in flight."""
        self.batches_asked += 1
        _will_need(segments, column, stride, np.sort(places))

    def pays(self, segments: NDArray[np.int64], stride: np.uint64, places: NDArray[np.uint64]) -> bool:
        """Whether to ask for the pages of rows that will be read."""
        pays = self._wary > 0 or not self.resident(segments, ROWS, stride, places)
        self._lately = _REMEMBERED if pays else max(0, self._lately - 1)
        return pays

    def after_rows(self, faults: int) -> None:
        """Learn from the page faults of a reading thread, which had so many (`major_faults`) before it read a batch."""
        if major_faults() - faults > _FAULTS_TOLERATED:
            self._wary = 4
        elif self._wary:
            self._wary = max(0, self._wary - 1)


def major_faults() -> int:
    """Page faults of this thread so far that waited for the disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


@njit(nogil=True, cache=True)
def _ask_for(address: Any, count: Any) -> None:
    begin = address & _PAGE_MASK
    madvise(begin, ((address + count - _1) & _PAGE_MASK) + _PAGE - begin, _WILLNEED)


@njit(nogil=True, cache=True)
def ask_for_all(addresses: Any, counts: Any) -> None:
    """`ask_for` of many places: addresses uint64 (N,), bytes int64 (N,)."""
    for i in range(len(addresses)):
        _ask_for(addresses[i], np.uint64(counts[i]))


def ask_for(address: int, count: int) -> None:
    """Put the reads of the pages of `count` bytes in flight."""
    _ask_for(np.uint64(address), np.uint64(count))

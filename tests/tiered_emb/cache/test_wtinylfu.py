"""W-TinyLFU against a model with counters of its own, and against libcachesim's miss ratios."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiered_emb.cache.walks import Model, Row, Walk, golden, missed, mixed_trace, policy_bytes, replayed, trace
from tiered_emb.cache import Directory

WORD = 2**64 - 1


def name_of(row: Row) -> int:
    table, id = row
    x = id & WORD
    x ^= x >> 27
    x = x * 0x3C79AC492BA7B653 & WORD
    x ^= x >> 33
    x = x * 0x1C69B3F74AC4AE35 & WORD
    return x ^ ((table * 0x9E3779B1 << 32) & WORD)


class Counters:
    """Eight of the counters for each row, raised together, halved now and then."""

    def __init__(self, rows: int) -> None:
        self.counters = [0] * max(64, 12 * rows)
        self.seen, self.sample = 0, 32 * max(1, rows)

    def places(self, row: Row) -> list[int]:
        x, places = name_of(row), []
        x ^= x >> 32
        for _ in range(8):
            x = (x * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & WORD
            places.append((x >> 32) * len(self.counters) >> 32)
        return places

    def estimate(self, row: Row) -> int:
        return min(self.counters[place] for place in self.places(row))

    def add(self, row: Row, times: int = 1) -> None:
        for place in self.places(row):
            self.counters[place] = min(self.counters[place] + times, 65_535)

    def request(self, row: Row) -> None:
        self.add(row)
        self.seen += 1
        if self.seen == self.sample:
            self.seen, self.counters = 0, [counter // 2 for counter in self.counters]


class WTinyLfuModel(Model):
    """Window, probation and protected as lists, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.window: list[Row] = []
        self.probation: list[Row] = []
        self.protected: list[Row] = []
        self.lent, self.owed = 0, False
        self.set_capacity(capacity)

    def set_capacity(self, capacity: int) -> None:
        self.main = capacity - max(1, int(capacity * 0.01))
        self.most_probation, self.most_protected = int(self.main * 0.2), int(self.main * 0.8)
        self.counters = Counters(self.main)

    def protect(self, row: Row) -> None:
        self.probation.remove(row)
        self.protected.append(row)
        while len(self.protected) > self.most_protected:
            self.probation.append(self.protected.pop(0))
            self.owed |= len(self.probation) > self.most_probation > 0

    def hit(self, row: Row, count: int) -> None:
        for _ in range(count):
            if row in self.window:
                self.window.remove(row)
                self.window.append(row)
                continue
            self.counters.request(row)
            if row in self.probation:
                self.protect(row)
            else:
                self.protected.remove(row)
                self.protected.append(row)

    def insert(self, row: Row, count: int, code: int) -> None:
        self.window.append(row)
        self.counters.add(row, count)

    def enter_main(self, row: Row) -> None:
        self.window.remove(row)
        full = len(self.probation) >= self.most_probation
        to_protected = full and len(self.protected) < self.most_protected
        (self.protected if to_protected else self.probation).append(row)

    def oldest_of_main(self, pinned: set[Row]) -> Row | None:
        return next((row for row in self.probation + self.protected if row not in pinned), None)

    def victim(self, pinned: set[Row]) -> Row:
        owed, self.owed = self.owed and len(self.probation) > self.most_probation, False
        due = next((row for row in self.probation if owed and row not in pinned), None)
        if due is not None:
            self.remove(due)
            return due
        for candidate in [row for row in self.window if row not in pinned]:
            if len(self.probation) + len(self.protected) + self.lent < self.main:
                self.counters.add(candidate)
                self.enter_main(candidate)
                continue
            other = self.oldest_of_main(pinned)
            if other is None:
                self.remove(candidate)
                return candidate
            wins = self.counters.estimate(candidate) > self.counters.estimate(other)
            self.counters.add(candidate)
            if not wins:
                self.remove(candidate)
                return candidate
            if self.lent == 0:
                self.remove(other)
                self.enter_main(candidate)
                return other
            self.lent -= 1
            self.enter_main(candidate)
        other = self.oldest_of_main(pinned)
        assert other is not None
        self.remove(other)
        self.lent += 1
        return other

    def remove(self, row: Row) -> None:
        for ring in (self.window, self.probation, self.protected):
            if row in ring:
                ring.remove(row)

    def resize(self, capacity: int) -> None:
        old = self.counters
        self.set_capacity(capacity)
        for row in self.window + self.probation + self.protected:
            self.counters.add(row, old.estimate(row))
        while len(self.probation) + len(self.protected) > self.main:
            self.window.append((self.probation or self.protected).pop(0))
        while len(self.protected) > self.most_protected:
            self.probation.append(self.protected.pop(0))
        self.lent = min(self.lent, self.main - len(self.probation) - len(self.protected))
        self.owed = False


@pytest.mark.parametrize("capacity", [1, 2, 3, 6, 7, 60, 251])
def test_single_requests_miss_as_in_the_model(capacity: int) -> None:
    ids = mixed_trace(capacity)
    expected = list(replayed(WTinyLfuModel(capacity), capacity, [(0, id) for id in ids.tolist()]))
    np.testing.assert_array_equal(missed("wtinylfu", capacity, ids), expected)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 40, 250])
@pytest.mark.parametrize("most_count", [1, 40])
def test_batches_pins_and_removals_evict_as_in_the_model(capacity: int, most_count: int) -> None:
    walk = Walk("wtinylfu", capacity, WTinyLfuModel(capacity), capacity, 3 * capacity + 3)
    assert walk.go(300, 2 * capacity + 1, most_count) > 100


def test_the_whole_capacity_in_one_batch_and_again() -> None:
    walk = Walk("wtinylfu", 30, WTinyLfuModel(30), 0, 0)
    for first in range(0, 300, 30):
        rows = [(0, id) for id in range(first, first + 30)]
        walk.request(rows, [1] * 30)
        assert set(walk.held) == set(rows)


def test_a_batch_of_rows_never_seen_before_does_not_get_into_main() -> None:
    """Half the slots are taken from main by a batch of newcomers; the next ones take them from those."""
    directory, slots = Directory(1000, "wtinylfu"), np.empty(1000, np.int32)
    ids, tables, ones = np.arange(3000, dtype=np.int64), np.zeros(1000, np.uint32), np.ones(1000, np.int32)
    directory.admit(tables, ids[:1000], ones, slots)
    directory.admit(tables[:500], ids[1000:1500], ones[:500], slots[:500])
    stayed = directory.find(tables, ids[:1000], slots)
    assert stayed == 500
    for first in range(1500, 3000, 500):
        directory.admit(tables[:500], ids[first : first + 500], ones[:500], slots[:500])
        assert directory.find(tables, ids[:1000], slots) == stayed


@pytest.mark.parametrize(("count", "stays"), [(1, False), (2, False), (3, True)])
def test_a_newcomer_competes_with_the_requests_of_its_batch(count: int, stays: bool) -> None:
    """Rows of main were counted twice, as they came and as they moved there: three requests of one batch beat that."""
    directory, slots = Directory(300, "wtinylfu"), np.empty(300, np.int32)
    ids, tables, ones = np.arange(1000, dtype=np.int64), np.zeros(1000, np.uint32), np.ones(1000, np.int32)
    directory.admit(tables[:300], ids[:300], ones[:300], slots)
    directory.admit(tables[:1], ids[500:501], np.array([count], np.int32), slots[:1])
    for first in range(600, 603):  # as many as the window holds, so that it is the candidate
        directory.admit(tables[:1], ids[first : first + 1], ones[:1], slots[:1])
    assert directory.find(tables[:1], ids[500:501], slots[:1]) == stays


def test_miss_ratios_are_libcachesims(require_shared: Callable[[str], Path]) -> None:
    """Its window of 1% has no slot below 100 objects: it keeps nothing then."""
    ids = trace(require_shared("traces/load.py"), "web12")
    for capacity, ratio in golden(require_shared, "web12", "WTinyLFU").items():
        assert capacity >= 100
        assert abs(missed("wtinylfu", capacity, ids).mean() - ratio) <= 0.005


@pytest.mark.parametrize("capacity", [*range(1, 40), 99, 100, 101, 1023, 65_537, 1_000_003])
def test_bytes_are_at_most_those_planned(capacity: int) -> None:
    held, planned = policy_bytes("wtinylfu", capacity)
    assert held <= planned

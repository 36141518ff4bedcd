"""LIRS against a model that looks at everything, and against libcachesim's miss ratios."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiered_emb.cache.walks import Model, Row, Walk, golden, missed, mixed_trace, policy_bytes, replayed, trace
from tiered_emb.cache import Directory
from tiered_emb.cache.lirs import MAX_CAPACITY_ROWS, Lirs


class LirsModel(Model):
    """Stack, queue and gone rows as lists, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.stack: list[Row] = []
        self.queue: list[Row] = []
        self.gone: list[Row] = []
        self.lirs: set[Row] = set()
        self.lent = 0
        self.set_capacity(capacity)

    def set_capacity(self, capacity: int) -> None:
        self.most_lirs = capacity - max(1, capacity // 100)
        self.most_names = 2 * capacity
        self.most_gone = self.most_names - self.most_lirs + 1

    def lowest_lir(self) -> Row:
        return next(row for row in self.stack if row in self.lirs)

    def forget(self, row: Row) -> None:
        self.stack.remove(row)
        self.gone.remove(row)

    def prune(self) -> None:
        while self.lirs and self.stack[0] not in self.lirs:
            if self.stack[0] in self.gone:
                self.gone.remove(self.stack[0])
            del self.stack[0]

    def limit(self) -> None:
        while len(self.stack) > self.most_names and self.gone:
            self.forget(self.gone[0])

    def on_top(self, row: Row) -> None:
        if row in self.stack:
            self.stack.remove(row)
        self.stack.append(row)

    def lower(self) -> None:
        row = self.lowest_lir()
        self.lirs.remove(row)
        self.stack.remove(row)
        self.queue.append(row)

    def make_lir(self, row: Row) -> None:
        if len(self.lirs) + self.lent >= self.most_lirs:
            if self.lent:
                self.lent -= 1
            else:
                self.lower()
        self.lirs.add(row)
        self.prune()

    def hit(self, row: Row, count: int) -> None:
        for _ in range(count):
            in_stack = row in self.stack
            self.on_top(row)
            if row in self.lirs:
                self.prune()
                continue
            self.queue.remove(row)
            if in_stack and self.most_lirs:
                self.make_lir(row)
            else:
                self.queue.append(row)
            self.limit()

    def miss(self, row: Row) -> int:
        if row not in self.gone:
            return 0
        self.forget(row)
        return 1

    def victim(self, pinned: set[Row]) -> Row:
        for row in self.queue:
            if row not in pinned:
                self.queue.remove(row)
                if row in self.stack:
                    if len(self.gone) == self.most_gone:
                        self.forget(self.gone[0])
                    self.gone.append(row)
                return row
        row = next(row for row in self.stack if row in self.lirs and row not in pinned)
        self.lirs.remove(row)
        self.stack.remove(row)
        self.lent += 1
        self.prune()
        return row

    def insert(self, row: Row, count: int, code: int) -> None:
        self.on_top(row)
        if len(self.lirs) + self.lent < self.most_lirs or (code and self.most_lirs):
            self.make_lir(row)
        else:
            self.queue.append(row)
        self.limit()
        self.hit(row, count - 1)

    def remove(self, row: Row) -> None:
        if row in self.stack:
            self.stack.remove(row)
        if row in self.lirs:
            self.lirs.remove(row)
            self.prune()
        else:
            self.queue.remove(row)

    def resize(self, capacity: int) -> None:
        self.set_capacity(capacity)
        while len(self.gone) > self.most_gone:
            self.forget(self.gone[0])
        while len(self.lirs) > self.most_lirs:
            self.lower()
        self.lent = min(self.lent, self.most_lirs - len(self.lirs))
        self.prune()
        self.limit()


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 60, 250])
def test_single_requests_miss_as_in_the_model(capacity: int) -> None:
    ids = mixed_trace(capacity)
    expected = list(replayed(LirsModel(capacity), capacity, [(0, id) for id in ids.tolist()]))
    np.testing.assert_array_equal(missed("lirs", capacity, ids), expected)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 40, 250])
@pytest.mark.parametrize("most_count", [1, 4])
def test_batches_pins_and_removals_evict_as_in_the_model(capacity: int, most_count: int) -> None:
    walk = Walk("lirs", capacity, LirsModel(capacity), capacity, 3 * capacity + 3)
    assert walk.go(500, 2 * capacity + 1, most_count) > 100


def test_the_whole_capacity_in_one_batch_and_again() -> None:
    walk = Walk("lirs", 30, LirsModel(30), 0, 0)
    for first in range(0, 300, 30):
        rows = [(0, id) for id in range(first, first + 30)]
        walk.request(rows, [1] * 30)
        assert set(walk.held) == set(rows)


def test_a_batch_of_rows_never_seen_before_does_not_become_lir() -> None:
    """Half the slots are taken from LIR rows by a batch of newcomers; the next one takes them from those."""
    directory, slots = Directory(1000, "lirs"), np.empty(1000, np.int32)
    ids, tables, ones = np.arange(3000, dtype=np.int64), np.zeros(1000, np.uint32), np.ones(1000, np.int32)
    directory.admit(tables, ids[:1000], ones, slots)
    directory.admit(tables[:500], ids[1000:1500], ones[:500], slots[:500])
    stayed = directory.find(tables, ids[:1000], slots)
    for first in range(1500, 3000, 500):
        directory.admit(tables[:500], ids[first : first + 500], ones[:500], slots[:500])
        assert directory.find(tables, ids[:1000], slots) == stayed == 500


def test_a_loop_longer_than_the_capacity_hits_all_but_the_share_of_hir_rows() -> None:
    """What LRU cannot: 1,000 rows round and round through 800 slots."""
    ids = np.tile(np.arange(1000, dtype=np.int64), 20)
    assert np.count_nonzero(missed("lirs", 800, ids)[1000:]) <= 19 * (1000 - 792 + 8)
    assert missed("lru", 800, ids).all()


def test_miss_ratios_are_libcachesims(require_shared: Callable[[str], Path]) -> None:
    ids = trace(require_shared("traces/load.py"), "web12")
    for capacity, ratio in golden(require_shared, "web12", "LIRS").items():
        assert abs(missed("lirs", capacity, ids).mean() - ratio) <= 0.0005


@pytest.mark.parametrize("capacity", [*range(1, 40), 99, 100, 101, 1023, 65_537, 1_000_003])
def test_bytes_are_at_most_those_planned(capacity: int) -> None:
    held, planned = policy_bytes("lirs", capacity)
    assert held <= planned


def test_too_many_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=f"lirs orders at most {MAX_CAPACITY_ROWS} slots, not {2**30}"):
        Lirs(2**30)

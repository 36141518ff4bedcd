"""LFU with ageing against a model that sorts, and what ageing is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tiered_emb.cache.walks import Model, Row, Walk, missed, mixed_trace, policy_bytes, replayed, trace
from tiered_emb.cache import Directory
from tiered_emb.cache.lfu_aged import REQUESTS_PER_SLOT, LfuAged


class LfuAgedModel(Model):
    """Rows in the order in which they leave, with their counts."""

    def __init__(self, capacity: int) -> None:
        self.rows: list[tuple[Row, int]] = []
        self.seen, self.period = 0, REQUESTS_PER_SLOT * capacity

    def count_one(self, row: Row, before: int) -> None:
        """Ageing comes before the first request of the next period."""
        if self.seen == self.period:
            self.seen = 0
            self.rows = [(other, max(1, count // 2)) for other, count in self.rows]
            before = max(1, before // 2) if before else 0
        self.seen += 1
        behind = sum(1 for _, count in self.rows if count <= before + 1)
        self.rows.insert(behind, (row, before + 1))

    def hit(self, row: Row, count: int) -> None:
        for _ in range(count):
            before = next(count for other, count in self.rows if other == row)
            self.remove(row)
            self.count_one(row, before)

    def insert(self, row: Row, count: int, code: int) -> None:
        self.count_one(row, 0)
        self.hit(row, count - 1)

    def victim(self, pinned: set[Row]) -> Row:
        row = next(row for row, _ in self.rows if row not in pinned)
        self.remove(row)
        return row

    def remove(self, row: Row) -> None:
        self.rows = [each for each in self.rows if each[0] != row]

    def resize(self, capacity: int) -> None:
        self.period = REQUESTS_PER_SLOT * capacity
        self.seen = min(self.seen, self.period)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 60, 250])
def test_single_requests_miss_as_in_the_model(capacity: int) -> None:
    ids = mixed_trace(capacity)
    expected = list(replayed(LfuAgedModel(capacity), capacity, [(0, id) for id in ids.tolist()]))
    np.testing.assert_array_equal(missed("lfu-aged", capacity, ids), expected)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("most_count", [1, 50])
def test_batches_pins_and_removals_evict_as_in_the_model(capacity: int, most_count: int) -> None:
    walk = Walk("lfu-aged", capacity, LfuAgedModel(capacity), capacity, 3 * capacity + 3)
    assert walk.go(300, 2 * capacity + 1, most_count) > 100


def test_counts_that_differ_by_less_than_halving_leave_in_their_old_order() -> None:
    """Counts 3 and 2 become 1 both: the row with 2 still leaves first."""
    made, codes = LfuAged(2), np.zeros(2, np.int8)
    slots, tables, ids = np.array([0, 1], np.int32), np.zeros(2, np.uint32), np.arange(2)
    made.insert(slots, tables, ids, np.array([3, 2], np.int32), codes)
    for _ in range(15):
        made.touch(slots[:1], np.array([1], np.int32))
    assert made.state.clock[0] == 20
    made.grow()
    assert [count for count in made.state.class_counts.tolist() if count] == [9, 1]
    made.grow()
    assert made.state.clock[0] == 0


def test_more_requests_of_one_row_than_can_be_done_one_by_one() -> None:
    """2^31 - 1 requests are 2^31 - 1 single ones: after so many periods its count is that of a few hundred periods."""
    often, rather_often = LfuAged(1), LfuAged(1)
    slots, zero, codes = np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int8)
    period = REQUESTS_PER_SLOT
    for made, count in ((often, 2**31 - 1), (rather_often, (2**31 - 1) % period + 100 * period)):
        made.insert(slots, zero.astype(np.uint32), zero, np.array([1], np.int32), codes)
        made.touch(slots, np.array([count], np.int32))
    assert often.state.clock.tolist() == rather_often.state.clock.tolist()
    assert often.state.class_counts.tolist() == rather_often.state.class_counts.tolist()


def test_a_clock_of_another_size_is_refused() -> None:
    saved = Directory(4, "lfu-aged").save()
    saved["policy.clock"] = saved["policy.clock"] + np.array([0, 1, 0])
    with pytest.raises(ValueError, match="is not that of 4 slots: their period is 40"):
        Directory(4, "lfu-aged").load(saved)


def test_it_misses_about_as_often_as_lfu_where_nothing_changes(require_shared: Callable[[str], Path]) -> None:
    ids = trace(require_shared("traces/load.py"), "web12")
    assert missed("lfu-aged", 1375, ids).mean() <= missed("lfu", 1375, ids).mean() + 0.005


@pytest.mark.parametrize("capacity", [*range(1, 40), 99, 100, 101, 1023, 65_537, 1_000_003])
def test_bytes_are_at_most_those_planned(capacity: int) -> None:
    held, planned = policy_bytes("lfu-aged", capacity)
    assert held <= planned

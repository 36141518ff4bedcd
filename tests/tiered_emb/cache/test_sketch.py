"""The sketch and the counting Bloom filter against counters in plain Python, and against exact counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tiered_emb.cache import counting_bloom, sketch
from tiered_emb.cache.probing import name_of

WORD = 2**64 - 1


@njit
def increment_all(words, clock, tables, ids, counts):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        sketch.increment(words, clock, name_of(tables[i], ids[i]), counts[i])


@njit
def estimate_all(words, tables, ids, out):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        out[i] = sketch.estimate(words, name_of(tables[i], ids[i]))


@njit
def add_all(counters, clock, ids, times):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        counting_bloom.add_requests(counters, clock, name_of(np.uint32(3), ids[i]), times[i])


@njit
def estimates_of(counters, ids, out):  # type: ignore[no-untyped-def]
    for i in range(len(ids)):
        out[i] = counting_bloom.estimate(counters, name_of(np.uint32(3), ids[i]))


def name_in_python(table: int, id: int) -> int:
    x = id & WORD
    x ^= x >> 27
    x = x * 0x3C79AC492BA7B653 & WORD
    x ^= x >> 33
    x = x * 0x1C69B3F74AC4AE35 & WORD
    return x ^ ((table * 0x9E3779B1 << 32) & WORD)


@dataclass
class Model:
    """A dict of counters; those of a row by block, which of the four, and five bits."""

    capacity: int
    sample: int
    seen: int = 0
    counters: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def places(self, table: int, id: int) -> list[tuple[int, int, int]]:
        name = name_in_python(table, id)
        x = (name ^ name >> 32) * 0xD6E8FEB86659FD93 & WORD
        x ^= x >> 32
        block = (x >> 32) * -(-self.capacity // 8) >> 32
        return [(block, row, x >> 5 * row & 31) for row in range(4)]

    def estimate(self, table: int, id: int) -> int:
        return min(self.counters[place] for place in self.places(table, id))

    def request(self, table: int, id: int) -> None:
        goal = min(self.estimate(table, id) + 1, 15)
        for place in self.places(table, id):
            self.counters[place] = max(self.counters[place], goal)
        self.seen += 1
        if self.seen == self.sample:
            self.seen //= 2
            for place in self.counters:
                self.counters[place] //= 2


def arrays(rows: Iterable[tuple[int, int, int]]) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    tables, ids, counts = zip(*rows, strict=True)
    return np.array(tables, np.uint32), np.array(ids, np.int64), np.array(counts, np.int64)


@pytest.mark.parametrize("capacity", [1, 16, 17, 200])
def test_every_counter_is_that_of_the_model(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    model, (words, clock) = Model(capacity, 10 * capacity), sketch.make_sketch(capacity, 10 * capacity)
    for _ in range(20):
        rows = [
            (int(random.integers(3)), int(random.zipf(1.3)) % 500 - 50, int(random.integers(1, 20))) for _ in "x" * 40
        ]
        increment_all(words, clock, *arrays(rows))
        for table, id, count in rows:
            for _ in range(count):
                model.request(table, id)
        assert clock.tolist() == [model.seen, model.sample]
        for (block, row, bits), value in model.counters.items():
            assert int(words[8 * block + 2 * row + bits // 16]) >> 4 * (bits % 16) & 15 == value
        tables, ids, _ = arrays(rows)
        out = np.empty(len(rows), np.int64)
        estimate_all(words, tables, ids, out)
        assert out.tolist() == [model.estimate(table, id) for table, id, _ in rows]


def test_estimates_are_never_too_low_and_seldom_too_high() -> None:
    """As many different rows as slots: of a thousand never requested, few are taken for one that was."""
    words, clock = sketch.make_sketch(10_000, 10**9)
    random = np.random.default_rng(1)
    ids = random.integers(-(2**62), 2**62, 10_000)
    counts = random.integers(1, 20, 10_000)
    tables, out = np.full(10_000, 7, np.uint32), np.empty(10_000, np.int64)
    increment_all(words, clock, tables, ids, counts)
    estimate_all(words, tables, ids, out)
    exact = np.minimum(counts, 15)
    assert (out >= exact).all()
    assert np.count_nonzero(out > exact) < 700
    estimate_all(words, tables + np.uint32(1), ids, out)
    assert np.count_nonzero(out) < 1500


def test_rows_are_forgotten_in_a_few_samples() -> None:
    words, clock = sketch.make_sketch(100, 1000)
    increment_all(words, clock, *arrays([(0, 5, 900)]))
    out = np.empty(1, np.int64)
    for left in (7, 3, 1, 0):
        increment_all(words, clock, *arrays([(0, 6, 1000 - int(clock[0]))]))
        estimate_all(words, np.zeros(1, np.uint32), np.array([5]), out)
        assert out[0] == left


@pytest.mark.parametrize("capacity", [1, 16, 17, 1000, 12_345])
def test_eight_bytes_a_slot(capacity: int) -> None:
    words, _ = sketch.make_sketch(capacity, 1)
    assert len(words) == sketch.word_count(capacity)
    assert 8 * capacity <= words.nbytes <= 8 * capacity + 56


def test_the_filter_counts_exactly_where_there_is_room_and_halves() -> None:
    counters, clock = counting_bloom.make_counters(5000), np.array([0, 10**9])
    ids = np.arange(0, 50_000, 10)
    times = np.random.default_rng(2).integers(1, 70_000, 5000)
    out = np.empty(5000, np.int64)
    add_all(counters, clock, ids, times)
    estimates_of(counters, ids, out)
    assert clock[0] == times.sum()
    exact = np.minimum(times, counting_bloom.MOST)
    assert (out >= exact).all()
    assert np.count_nonzero(out > exact) < 500  # 12 counters a row, 8 of them raised: 1 in 20 where they are all raised
    unhalved, other_clock = counters.copy(), clock.copy()
    add_all(unhalved, other_clock, np.array([-1]), np.array([1]))
    assert 0 < np.count_nonzero(unhalved != counters) <= counting_bloom.HASHES
    clock[0] = clock[1] - 1
    add_all(counters, clock, np.array([-1]), np.array([1]))
    assert clock[0] == 0
    np.testing.assert_array_equal(counters, unhalved // 2)


def test_requests_at_once_are_as_many_single_ones() -> None:
    ids, times = np.arange(60) % 13, np.random.default_rng(3).integers(1, 200, 60)
    at_once, singly = (counting_bloom.make_counters(3) for _ in range(2))
    clock, other_clock = np.array([0, 500]), np.array([0, 500])
    add_all(at_once, clock, ids, times)
    add_all(singly, other_clock, np.repeat(ids, times), np.ones(times.sum(), np.int64))
    np.testing.assert_array_equal(at_once, singly)
    assert clock.tolist() == other_clock.tolist()

from __future__ import annotations

from collections import OrderedDict

import cachetools
import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory
from tiered_emb.errors import ConfigError
from tiered_emb.sim import POLICY_NAMES, Requests, miss_ratio_curve
from tiered_emb.sim.curves import replay_batches


def zipf(n: int, rows: int, seed: int = 0) -> NDArray[np.int64]:
    return (np.random.default_rng(seed).zipf(1.2, n) % rows).astype(np.int64)


def test_requests_number_rows_by_first_appearance() -> None:
    tables, ids = np.array([7, 7, 1, 7, 1], np.uint32), np.array([5, -1, 5, 5, 5], np.int64)
    requests = Requests.of(tables, ids)
    assert requests.rows.tolist() == [0, 1, 2, 0, 2]
    assert (len(requests), requests.distinct) == (5, 3)
    assert requests.next_use.tolist() == [3, -1, 4, -1, -1]


def test_ids_of_a_view_and_of_one_table() -> None:
    requests = Requests.of(3, np.arange(10, dtype=np.int64)[::-2])
    assert requests.ids.tolist() == [9, 7, 5, 3, 1]
    assert requests.tables.tolist() == [3] * 5


def test_no_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are no requests"):
        Requests.of(0, np.empty(0, np.int64))


@pytest.mark.parametrize(("policy", "reference"), [("lru", cachetools.LRUCache), ("lfu", cachetools.LFUCache)])
def test_single_requests_miss_as_in_cachetools(policy: str, reference: type[cachetools.Cache[int, bool]]) -> None:
    ids = zipf(6000, 900)
    (curve,) = miss_ratio_curve(Requests.of(0, ids), [policy], [1, 30, 300, 2000])
    for size, misses in zip(curve.sizes, curve.misses, strict=True):
        cache, expected = reference(size), 0
        for id in ids.tolist():
            if cache.get(id) is None:
                expected += 1
                cache[id] = True
        assert misses == expected
    assert curve.miss_ratios == tuple(misses / 6000 for misses in curve.misses)


def test_every_policy_is_bounded_by_belady_below_and_misses_each_row_once() -> None:
    requests, calls = Requests.of(0, zipf(8000, 700)), []
    curves = miss_ratio_curve(requests, POLICY_NAMES, [7, 70, 700], advance=lambda: calls.append(1))
    assert [curve.policy for curve in curves] == list(POLICY_NAMES)
    assert len(calls) == 3 * len(POLICY_NAMES)
    for curve in curves:
        assert all(ours >= bound for ours, bound in zip(curve.misses, curves[-1].misses, strict=True))
        assert curve.misses[2] == requests.distinct
        assert curve.seconds > 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_sizes_far_beyond_the_trace_take_no_memory(policy: str) -> None:
    """Whatever the size, each row is missed once; 2^31 slots would take a hundred gigabytes."""
    requests = Requests.of(0, zipf(2000, 300)).every(50)
    sizes = [requests.distinct, requests.distinct + 1, 2**31 - 2]
    for mode in ("single", "batch"):
        (curve,) = miss_ratio_curve(requests, [policy], sizes, mode)  # type: ignore[arg-type]
        assert curve.sizes == tuple(sizes)
        assert curve.misses == (requests.distinct,) * 3


def test_batches_by_hand() -> None:
    """Three slots, LRU: [1 1 2] [3 1] [4 2] [1 3]; what is there is touched first, what is not is admitted then.

    1 and 2 come; 1 is there, 3 comes; 2 is there, 4 takes the place of 1, since 2 stays for its batch; 3 is there and 1
    takes the place of 2. Five of eight. One at a time, 4 takes the place of 2, 2 that of 3, and six of nine miss.
    """
    requests = Requests.of(0, np.array([1, 1, 2, 3, 1, 4, 2, 1, 3], np.int64), np.array([0, 3, 5, 7, 9]))
    (curve,) = miss_ratio_curve(requests, ["lru"], [3], "batch")
    assert (curve.misses, curve.requests) == ((5,), 8)
    assert miss_ratio_curve(requests, ["lru"], [3])[0].misses == (6,)
    batches = requests.batches
    assert batches.unique.ids.tolist() == [1, 2, 3, 1, 4, 2, 1, 3]
    assert batches.counts.tolist() == [2, 1, 1, 1, 1, 1, 1, 1]
    assert batches.ends.tolist() == [0, 2, 4, 6, 8]


def test_lfu_counts_the_ids_of_a_batch_and_not_its_rows() -> None:
    """Room for two, [A A A B] [C]: B goes, so that A is there for the next batch."""
    ids = np.array([1, 1, 1, 2, 3, 1], np.int64)
    requests = Requests.of(0, ids, np.array([0, 4, 5, 6]))
    assert miss_ratio_curve(requests, ["lfu"], [2], "batch")[0].misses == (3,)
    assert miss_ratio_curve(requests, ["lru"], [2], "batch")[0].misses == (4,)


def slow_lru_batches(ids: NDArray[np.int64], size: int, batch: int, lookahead: int = 0) -> int:
    """LRU among the rows that the next batches do not need, then among those; misses."""
    unique = [list(dict.fromkeys(ids[start : start + batch].tolist())) for start in range(0, len(ids), batch)]
    resident: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for number, rows in enumerate(unique):
        absent = [id for id in rows if id not in resident]
        for id in rows:
            if id in resident:
                resident.move_to_end(id)
        needed = {id for later in unique[number + 1 : number + 1 + lookahead] for id in later}
        for _ in range(len(resident) + len(absent) - size):
            others = [id for id in resident if id not in rows]
            resident.pop(next((id for id in others if id not in needed), others[0]))
        resident.update(dict.fromkeys(absent))
        misses += len(absent)
    return misses


@pytest.mark.parametrize(("size", "batch"), [(60, 50), (60, 7), (200, 64), (900, 50)])
def test_batches_miss_as_in_a_slow_model(size: int, batch: int) -> None:
    ids = zipf(3000, 400, seed=5)
    (curve,) = miss_ratio_curve(Requests.of(0, ids).every(batch), ["lru"], [size], "batch")
    assert curve.misses == (slow_lru_batches(ids, size, batch),)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5, 1000])
@pytest.mark.parametrize(("size", "batch"), [(60, 50), (60, 7), (200, 64), (900, 50)])
def test_lookahead_misses_as_in_a_slow_model(size: int, batch: int, lookahead: int) -> None:
    ids = zipf(3000, 400, seed=5)
    requests = Requests.of(0, ids).every(batch)
    (curve,) = miss_ratio_curve(requests, ["lookahead"], [size], "batch", lookahead=lookahead)
    assert curve.misses == (slow_lru_batches(ids, size, batch, lookahead),)


def test_lookahead_lies_between_lru_and_belady() -> None:
    """The more it knows the less it misses; nothing known, or requests one by one, is LRU."""
    requests, sizes = Requests.of(0, zipf(20_000, 3000)).every(100), [100, 250, 500, 1000]
    lru, belady = miss_ratio_curve(requests, ["lru", "belady"], sizes, "batch")
    least = lru.misses
    for lookahead in (0, 1, 2, 4):
        (curve,) = miss_ratio_curve(requests, ["lookahead"], sizes, "batch", lookahead=lookahead)
        assert (curve.misses == lru.misses) == (lookahead == 0)
        assert all(more >= ours >= bound for more, ours, bound in zip(least, curve.misses, belady.misses, strict=True))
        least = curve.misses
    assert (
        miss_ratio_curve(requests, ["lookahead"], sizes, "batch")[0].misses
        == miss_ratio_curve(requests, ["lookahead"], sizes, "batch", lookahead=2)[0].misses
    )
    single = miss_ratio_curve(requests, ["lru", "lookahead"], sizes)
    assert single[0].misses == single[1].misses


def test_lookahead_by_hand() -> None:
    """Two slots, [1] [2] [3] [1]: 1 was not there yet when the first batch began, and is found before the third."""
    requests = Requests.of(0, np.array([1, 2, 3, 1], np.int64)).every(1)
    for lookahead, misses in ((0, 4), (1, 3), (3, 3)):
        assert miss_ratio_curve(requests, ["lookahead"], [2], "batch", lookahead=lookahead)[0].misses == (misses,)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_batches_of_one_are_single_requests(policy: str) -> None:
    requests = Requests.of(0, zipf(2000, 300))
    (single,) = miss_ratio_curve(requests, [policy], [5, 50])
    (batches,) = miss_ratio_curve(requests.every(1), [policy], [5, 50], "batch", lookahead=0)
    assert single.misses == batches.misses


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_after_batches_nothing_is_pinned(policy: str) -> None:
    batches = Requests.of(0, zipf(2000, 300)).every(40).batches
    directory = Directory(batches.largest, policy)
    misses = replay_batches(batches, directory)
    assert directory.pinned_rows == 0
    assert directory.rows == directory.capacity_rows
    assert misses > directory.rows


def test_a_size_below_the_largest_batch_is_refused_with_the_least_that_would_do() -> None:
    requests = Requests.of(0, np.array([1, 2, 3, 3, 4, 5, 6, 1, 1], np.int64), np.array([0, 3, 7, 9]))
    with pytest.raises(ConfigError, match=r"a batch of 4 different rows does not fit into 3; the least size .* is 4"):
        miss_ratio_curve(requests, ["lru"], [10, 3], "batch")
    assert miss_ratio_curve(requests, ["lru"], [4], "batch")[0].requests == 8


def test_an_empty_batch_asks_for_nothing() -> None:
    requests = Requests.of(0, np.array([1, 2, 1], np.int64), np.array([0, 0, 2, 2, 3, 3]))
    assert miss_ratio_curve(requests, ["lru", "belady"], [2], "batch")[0].misses == (2,)


@pytest.mark.parametrize(
    ("policies", "sizes", "mode", "message"),
    [
        (["mru"], [5], "single", "policy is 'mru'; expected one of .*lru"),
        (["lru"], [5, 0], "single", "size is 0 rows; expected 1 to 2147483646"),
        (["lru"], [1 << 31], "single", "size is 2147483648 rows"),
        (["lru"], [], "single", "there are no sizes"),
        (["lru"], [5], "batch", "does not say where its batches begin"),
    ],
)
def test_what_makes_no_sense_is_refused(policies: list[str], sizes: list[int], mode: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        miss_ratio_curve(Requests.of(0, np.arange(3)), policies, sizes, mode)  # type: ignore[arg-type]

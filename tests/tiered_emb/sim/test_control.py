from __future__ import annotations

import numpy as np

from tiered_emb.sim import Requests, miss_ratio_curve, shuffled


def test_the_same_requests_in_another_order() -> None:
    tables = np.repeat(np.arange(5, dtype=np.uint32), 40)
    requests = Requests.of(tables, np.arange(200) % 17, np.array([0, 90, 200]))
    mixed = shuffled(requests, 3)
    pairs = [sorted(zip(one.tables.tolist(), one.ids.tolist(), strict=True)) for one in (requests, mixed)]
    assert pairs[0] == pairs[1]
    assert mixed.ids.tolist() != requests.ids.tolist()
    assert mixed.bounds is requests.bounds
    assert mixed.rows.tolist() == [
        requests.rows[(tables == t) & (requests.ids == i)][0] for t, i in zip(mixed.tables, mixed.ids, strict=True)
    ]
    assert shuffled(requests, 3).ids.tolist() == mixed.ids.tolist() != shuffled(requests, 4).ids.tolist()


def test_repeats_are_all_recency_and_a_loop_is_less_than_none() -> None:
    """Each row twice in a row: half of the requests hit, and with 1,000 rows hardly any by luck. A loop: none hits."""
    twice = Requests.of(0, np.repeat(np.arange(1000), 2))
    assert miss_ratio_curve(twice, ["lru"], [10])[0].misses == (1000,)
    assert miss_ratio_curve(shuffled(twice), ["lru"], [10])[0].misses[0] > 1950
    loop = Requests.of(0, np.tile(np.arange(100), 50))
    assert miss_ratio_curve(loop, ["lru"], [90])[0].misses == (5000,)
    assert miss_ratio_curve(shuffled(loop), ["lru"], [90])[0].misses[0] < 800


def test_the_future_of_the_control_is_its_own() -> None:
    mixed = shuffled(Requests.of(0, np.tile(np.arange(50), 20)))
    (lru, belady) = miss_ratio_curve(mixed, ["lru", "belady"], [10])
    assert belady.misses[0] < lru.misses[0]

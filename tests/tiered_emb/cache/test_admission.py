"""Rules of admission: a contract that all keep, and what each is for."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache.admission import (
    ADMISSIONS,
    AdmissionRule,
    Always,
    ProbabilityAdmission,
    TinyLfuAdmission,
    admission_bytes,
    rule_of,
)


def ask(rule: AdmissionRule, ids: list[int], counts: list[int] | None = None, table: int = 0) -> list[bool]:
    out = np.empty(len(ids), np.bool_)
    rule.admits(
        np.full(len(ids), table, np.uint32),
        np.array(ids, np.int64),
        np.array(counts or [1] * len(ids), np.int32),
        out,
    )
    answers: list[bool] = out.tolist()
    return answers


@pytest.fixture(params=sorted(ADMISSIONS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestContract:
    """What every rule keeps."""

    def test_it_goes_on_where_it_was_saved(self, name: str) -> None:
        random = np.random.default_rng(0)
        rule, other = ADMISSIONS[name](64), ADMISSIONS[name](64)
        batches = [(random.zipf(1.4, 50) % 300).tolist() for _ in range(40)]
        for ids in batches[:20]:
            ask(rule, ids)
        other.load(rule.save())
        assert [ask(rule, ids) for ids in batches[20:]] == [ask(other, ids) for ids in batches[20:]]

    def test_what_was_saved_is_a_copy(self, name: str) -> None:
        rule = ADMISSIONS[name](8)
        saved = rule.save()
        ask(rule, list(range(100)))
        fresh = ADMISSIONS[name](8).save()
        assert saved.keys() == fresh.keys()
        for key, array in saved.items():
            np.testing.assert_array_equal(array, fresh[key])

    def test_requests_at_once_are_as_many_single_ones(self, name: str) -> None:
        random = np.random.default_rng(1)
        at_once, singly = ADMISSIONS[name](5), ADMISSIONS[name](5)
        for _ in range(60):
            id, count = int(random.integers(12)), int(random.integers(1, 30))
            assert ask(at_once, [id], [count]) == [any(ask(singly, [id] * count))]

    @pytest.mark.parametrize("capacity", [1, 15, 16, 17, 1000, 100_001])
    def test_bytes_are_at_most_those_planned(self, name: str, capacity: int) -> None:
        kind = ADMISSIONS[name]
        assert kind(capacity).memory_bytes <= kind.bytes_for(capacity)

    def test_a_foreign_state_is_refused(self, name: str) -> None:
        rule = ADMISSIONS[name](64)
        with pytest.raises(ValueError, match=f"{type(rule).__name__} has arrays"):
            rule.load({"other": np.zeros(1)})

    def test_a_tier_without_rows_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="at least one row, not 0"):
            ADMISSIONS[name](0)

    def test_a_batch_allocates_nothing(self, name: str) -> None:
        rule, n = ADMISSIONS[name](1000), 8192
        tables, counts, out = np.zeros(n, np.uint32), np.ones(n, np.int32), np.empty(n, np.bool_)
        ids: NDArray[np.int64] = np.arange(n)
        rule.admits(tables, ids, counts, out)
        tracemalloc.start()
        try:
            for _ in range(5):
                rule.admits(tables, ids, counts, out)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < n

    def test_no_rows(self, name: str) -> None:
        assert ask(ADMISSIONS[name](4), []) == []

    @pytest.mark.parametrize("capacity", [1, 7, 64, 900])
    def test_it_follows_the_tier(self, name: str, capacity: int) -> None:
        rule = ADMISSIONS[name](64)
        ask(rule, list(range(200)))
        rule.resize(capacity)
        assert rule.capacity_rows == capacity
        assert rule.memory_bytes <= rule.bytes_for(capacity)
        fresh = ADMISSIONS[name](capacity)
        fresh.load(rule.save())
        assert [ask(rule, [i, i + 1]) for i in range(300)] == [ask(fresh, [i, i + 1]) for i in range(300)]

    def test_it_has_a_name(self, name: str) -> None:
        assert type(rule_of(name, 5)) is ADMISSIONS[name]
        assert admission_bytes(name, 100) == ADMISSIONS[name].bytes_for(100)


def test_a_name_may_have_a_number() -> None:
    rule = rule_of("tinylfu:3", 5)
    assert isinstance(rule, TinyLfuAdmission)
    assert rule.least == 3
    rule = rule_of("probability:0.125", 5)
    assert isinstance(rule, ProbabilityAdmission)
    assert rule.p == 0.125


@pytest.mark.parametrize("name", ["", "never", "always:1", "tinylfu:x", "tinylfu:", "probability:half"])
def test_names_that_there_are_not(name: str) -> None:
    with pytest.raises(ValueError, match="expected one of always, tinylfu, probability, or with a number"):
        rule_of(name, 5)


@pytest.mark.parametrize("capacity", [3000, 2100, 1000, 300])
def test_tinylfu_still_knows_what_it_saw_when_its_tier_is_lowered(capacity: int) -> None:
    """No count is lower afterwards, and unknown rows are mostly still unknown."""
    rule = TinyLfuAdmission(3000, 3)
    seen = list(range(300))
    ask(rule, seen)
    ask(rule, seen)
    rule.resize(capacity)
    assert all(ask(rule, seen))
    assert np.mean(ask(rule, list(range(10_000, 10_300)))) < 0.2


def test_tinylfu_forgets_when_the_shorter_sample_of_a_lowered_tier_is_over() -> None:
    rule = TinyLfuAdmission(1000, 2)
    ask(rule, [1])
    ask(rule, [2], [2000])
    rule.resize(100)
    assert ask(rule, [1]) == [False]


def test_always() -> None:
    assert ask(Always(3), list(range(9))) == [True] * 9


@pytest.mark.parametrize("least", [1, 2, 5, 15])
def test_tinylfu_lets_a_row_in_once_it_was_seen_often_enough(least: int) -> None:
    rule = TinyLfuAdmission(1000, least)
    assert [ask(rule, [7, 8])[0] for _ in range(least + 2)] == [i + 1 >= least for i in range(least + 2)]
    assert ask(rule, [9], [least]) == [True]
    if least > 1:
        assert ask(rule, [9], [least - 1], table=1) == [False]


def test_tinylfu_forgets() -> None:
    """A row seen once is unknown again after ten requests a slot."""
    rule = TinyLfuAdmission(100, 2)
    ask(rule, [-1])
    ask(rule, [-2, -3], [990, 10])
    assert ask(rule, [-1]) == [False]
    assert ask(rule, [-1]) == [True]


def test_tinylfu_keeps_most_of_a_scan_out_and_lets_favourites_in() -> None:
    rule, random = TinyLfuAdmission(2000), np.random.default_rng(4)
    scan_in = favourites_in = 0
    for first in range(0, 40_000, 100):
        scan_in += sum(ask(rule, list(range(10_000 + first, 10_100 + first))))
        favourites_in += sum(ask(rule, random.integers(0, 200, 100).tolist()))
    assert scan_in < 0.05 * 40_000
    assert favourites_in > 0.95 * 40_000


@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 1.0])
def test_probability_lets_its_share_in(p: float) -> None:
    rule = ProbabilityAdmission(10, p, seed=5)
    answers = ask(rule, [i % 50 for i in range(40_000)])
    assert abs(np.mean(answers) - p) <= 4 * (p * (1 - p) / 40_000) ** 0.5


def test_probability_is_a_function_of_seed_row_and_requests_before() -> None:
    rows = list(range(500))
    first = ask(ProbabilityAdmission(10, 0.5, seed=1), rows)
    assert ask(ProbabilityAdmission(99, 0.5, seed=1), rows) == first
    assert ask(ProbabilityAdmission(10, 0.5, seed=2), rows) != first
    assert ask(ProbabilityAdmission(10, 0.5, seed=1), rows, table=1) != first
    rule = ProbabilityAdmission(10, 0.5, seed=1)
    ask(rule, [3])
    assert ask(rule, rows) != first
    assert 200 < sum(ask(ProbabilityAdmission(10, 0.5, seed=-1), [4] * 500)) < 300  # one row is not decided for ever


@pytest.mark.parametrize("p", [-0.1, 1.01, float("nan")])
def test_what_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="is no probability: choose one from 0 to 1"):
        ProbabilityAdmission(10, p)


@pytest.mark.parametrize("least", [0, 16])
def test_a_count_that_the_sketch_does_not_reach_is_refused(least: int) -> None:
    with pytest.raises(ValueError, match=f"least={least}: a row can be seen 1 to 15 times"):
        TinyLfuAdmission(10, least)

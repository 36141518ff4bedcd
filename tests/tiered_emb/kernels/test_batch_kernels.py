from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered_emb.kernels import batch
from tiered_emb.kernels.batch import Deduper, UniqueIds, bags_of, check_offsets, first_out_of_range, group_positions

EXTREME = [-(2**63), -5, -1, 0, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
Segment = tuple[int, list[int]]


def dedupe(deduper: Deduper, segments: list[Segment]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """(table, id) pairs, counts and inverse of segments given as (table, ids)."""
    ids = np.array([i for _, part in segments for i in part], np.int64)
    bounds = np.concatenate([[0], np.cumsum([len(part) for _, part in segments])]).astype(np.int64)
    out = UniqueIds.empty(len(ids))
    unique = deduper.dedupe(ids, bounds, np.array([table for table, _ in segments], np.uint32), out)
    pairs = list(zip(out.tables[:unique].tolist(), out.ids[:unique].tolist(), strict=True))
    return pairs, out.counts[:unique].tolist(), out.inverse[: len(ids)].tolist()


def expected(segments: list[Segment]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    ordinals: dict[tuple[int, int], int] = {}
    inverse = [ordinals.setdefault((table, i), len(ordinals)) for table, part in segments for i in part]
    return list(ordinals), [inverse.count(u) for u in range(len(ordinals))], inverse


SEGMENTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 7, 2**32 - 1]),
        st.lists(
            st.one_of(st.sampled_from(EXTREME), st.integers(0, 30), st.integers(-(2**63), 2**63 - 1)), max_size=40
        ),
    ),
    max_size=6,
)


class TestDedupe:
    @settings(deadline=None)
    @given(st.lists(SEGMENTS, min_size=1, max_size=4))
    def test_batches_one_after_another(self, batches: list[list[Segment]]) -> None:
        deduper = Deduper()
        for segments in batches:
            assert dedupe(deduper, segments) == expected(segments)

    def test_extreme_ids_in_two_tables(self) -> None:
        pairs, counts, _ = dedupe(Deduper(), [(4, EXTREME), (5, EXTREME), (4, EXTREME)])
        assert pairs == [(table, i) for table in (4, 5) for i in EXTREME]
        assert counts == [2] * 9 + [1] * 9

    def test_ids_that_differ_only_above_bit_32_and_multiples(self) -> None:
        for factor in (8, 2**20, 2**33, 2**44, 0x9E3779B97F4A7C15 - 2**64):
            ids = [((i * factor + 2**63) % 2**64) - 2**63 for i in range(3000)]
            assert dedupe(Deduper(), [(0, ids + ids)]) == (
                [(0, i) for i in ids],
                [2] * 3000,
                [*range(3000), *range(3000)],
            )

    def test_a_smaller_batch_after_a_larger_one(self) -> None:
        deduper = Deduper()
        dedupe(deduper, [(0, list(range(1000)))])
        memory = deduper.memory_bytes
        assert dedupe(deduper, [(0, [5, 5, 7])]) == ([(0, 5), (0, 7)], [2, 1], [0, 0, 1])
        assert deduper.memory_bytes == memory

    def test_generations_run_out(self) -> None:
        deduper, segments = Deduper(), [(0, [1, 2, 1]), (1, [1]), (0, [2, 3])]
        dedupe(deduper, segments)
        deduper._generation = 2**31 - 8
        for _ in range(6):
            assert dedupe(deduper, segments) == expected(segments)

    def test_no_ids(self) -> None:
        assert dedupe(Deduper(), []) == ([], [], [])
        assert dedupe(Deduper(), [(3, []), (4, [])]) == ([], [], [])


KERNELS_IN_PYTHON = ["_group_positions", "_bags_of", "_check_offsets", "_first_out_of_range"]


@pytest.fixture(params=["compiled", "python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels without intrinsics also run as the Python that they are written in, where a debugger can follow."""
    if request.param == "python":
        for name in KERNELS_IN_PYTHON:
            monkeypatch.setattr(batch, name, getattr(batch, name).py_func)


@pytest.mark.usefixtures("both_ways")
@given(st.lists(st.integers(0, 20), max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_group_positions(ids: list[int]) -> None:
    pairs, counts, inverse = dedupe(Deduper(), [(0, ids)])
    unique = len(pairs)
    start, position = np.full(unique + 1, -1, np.int64), np.full(len(ids), -1, np.int32)
    group_positions(np.array(inverse, np.int32), unique, start, position)
    groups = [position[start[u] : start[u + 1]].tolist() for u in range(unique)]
    assert groups == [[p for p, number in enumerate(inverse) if number == u] for u in range(unique)]
    assert np.diff(start).tolist() == counts


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3], [0, 2, 0, 0, 4, 1, 0]])
def test_bags_of(lengths: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    out = np.full(sum(lengths), -1, np.int32)
    bags_of(offsets, out)
    assert out.tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("offsets", "n", "wrong"),
    [
        ([0], 0, -1),
        ([0, 0, 3, 3], 3, -1),
        ([0, 5, 2], 2, 2),
        ([1, 2], 2, 0),
        ([-1, 2], 2, 0),
        ([0, 1, 2], 3, 2),
        ([0, 1, 4], 3, 2),
        ([0], 1, 0),
        ([0, 2**31 + 1, 2**31], 2**31, 2),
    ],
)
def test_check_offsets(offsets: list[int], n: int, wrong: int) -> None:
    assert check_offsets(np.array(offsets, np.int64), n) == wrong


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("ids", "low", "high", "position"),
    [
        ([], 0, 10, -1),
        ([0, 9, 5], 0, 10, -1),
        ([0, 10, -1], 0, 10, 1),
        ([3, -1], 0, 10, 1),
        (EXTREME, -(2**63), 2**63 - 1, 8),
        ([2**63 - 2], 0, 2**63 - 1, -1),
    ],
)
def test_first_out_of_range(ids: list[int], low: int, high: int, position: int) -> None:
    assert first_out_of_range(np.array(ids, np.int64), low, high) == position


def test_an_interrupted_batch_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after the kernel: the next batch must not find this one's places."""
    deduper, table, kernel = Deduper(), np.array([7], np.uint32), batch._dedupe
    deduper.dedupe(np.arange(8), np.array([0, 8]), table, UniqueIds.empty(8))  # makes the hash table

    def interrupted(*args: object) -> None:
        kernel(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_dedupe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deduper.dedupe(np.array([1, 2, 3, 4]), np.array([0, 4]), table, UniqueIds.empty(4))
    monkeypatch.setattr(batch, "_dedupe", kernel)
    unique = UniqueIds.empty(2)
    assert deduper.dedupe(np.array([4, 3]), np.array([0, 2]), table, unique) == 2
    assert unique.inverse.tolist() == [0, 1]

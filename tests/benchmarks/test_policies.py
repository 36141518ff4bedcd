"""`python -m benchmarks policies` at sizes that take seconds, and what its figures rest on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import cachetools
import numpy as np
import pytest

from benchmarks import policies, policies_golden, policies_samples
from benchmarks import policies_sides as sides
from benchmarks.__main__ import main
from benchmarks.report import Report
from benchmarks.timing import take_turns
from tiered_emb.cache import POLICIES, Directory
from tiered_emb.sim import Requests, miss_ratio_curve

MUST_SHOW = {
    *("golden_rows", "golden_unequal", "golden_near", "lru_per_s", "cachetools_lru_per_s", "libcachesim_lru_per_s"),
    *("lru_vs_cachetools", "lru_vs_libcachesim", "lfu_vs_cachetools", "lfu_vs_libcachesim", "slowest_vs_libcachesim"),
    *("plan_ns_per_id", "bytes_per_slot", "shards_error"),
}
SMALL = (
    "--rounds 2 --requests 20000 --resident 20000 --batch 500 --batches 4 --seeds 2 --golden online_retail_stock "
    "--json -"
)


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["policies", *SMALL.split()]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_small_sizes_give_every_figure(
    capsys: pytest.CaptureFixture[str], require_shared: Callable[[str], Path]
) -> None:
    pytest.importorskip("libcachesim")
    require_shared("traces/golden.csv")
    found = figures(capsys)
    assert set(found) >= MUST_SHOW
    assert found["golden_unequal"] == 0
    known = {*POLICIES, "belady"} & {*policies_golden.EXACT.values(), *policies_golden.NEAR.values()}
    assert found["golden_rows"] == 4 * len(known) - ("wtinylfu" in known)  # libcachesim's is none in 40 objects
    assert found["bytes_per_slot"] == round(max(Directory.bytes_for(20_000, p) / 20_000 for p in ("lru", "lfu")), 2)
    positive = MUST_SHOW - {"golden_unequal", "golden_near"}
    assert all(isinstance(found[name], int | float) and float(str(found[name])) > 0 for name in positive)


def test_without_libcachesim_its_figures_are_null_and_the_reason_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "libcachesim", None)
    monkeypatch.setattr(policies, "SHARED", tmp_path / "nowhere")
    found = figures(capsys)
    assert set(found) >= MUST_SHOW
    theirs = ("libcachesim_lru_per_s", "lru_vs_libcachesim", "lfu_vs_libcachesim", "slowest_vs_libcachesim")
    assert [found[name] for name in theirs] == [None] * 4
    assert "libcachesim" in str(found["libcachesim_missing"])
    assert [found[name] for name in ("golden_rows", "golden_unequal", "golden_near")] == [None] * 3
    assert "nowhere is not there" in str(found["golden_missing"])
    assert float(str(found["lru_vs_cachetools"])) > 0


def test_a_golden_row_that_differs_is_counted_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ids = np.array([1, 2, 1, 3, 2, 2, 1, 4], np.int64)
    monkeypatch.setattr(policies_golden, "SHARED", tmp_path)
    monkeypatch.setattr(policies_golden, "_requests", lambda name: Requests.of(0, ids))
    (lru,) = miss_ratio_curve(Requests.of(0, ids), ["lru"], [2])
    lines = ["trace,cache_objects,policy,miss_ratio", f"a,2,LRU,{lru.miss_ratios[0]:.6f}", "a,2,LRU,0.123456"]
    (tmp_path / "golden.csv").write_text("\n".join([*lines, "b,2,LRU,0.5", "a,2,LRUK2,0.5", "a,2,Belady,0.625000"]))
    golden = policies_golden.compare(["a"])
    assert golden.rows == 3
    assert golden.unequal == (f"a 2 lru: {lru.miss_ratios[0]:.6f}, not 0.123456",)
    assert policies_golden.compare().rows == 4


@pytest.mark.parametrize("policy", [*sorted(POLICIES.keys() & sides.LIBCACHESIM.keys()), "belady"])
def test_every_turn_of_libcachesim_replays_the_same_requests(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    libcachesim = pytest.importorskip("libcachesim")
    requests = Requests.of(0, sides.zipf_ids(np.random.default_rng(1), 5000, 1 << 20))
    ratios: list[float] = []
    kind = getattr(libcachesim, sides.LIBCACHESIM[policy])
    process = kind.process_trace
    monkeypatch.setattr(kind, "process_trace", lambda held, reader: ratios.append(process(held, reader)[0]))
    with sides.record_file(requests) as records:
        assert list(sides.libcachesim_sides(records, policy, 300)) == ["libcachesim", "libcachesim_default"]
        for turn in sides.libcachesim_sides(records, policy, 300).values():
            assert turn() > 0
    assert len(ratios) == 2
    (curve,) = miss_ratio_curve(requests, [policy], [300])
    tolerance = 0.02 if policy in policies_golden.NEAR.values() else 1e-9
    assert ratios == pytest.approx([curve.miss_ratios[0]] * 2, abs=tolerance)


def test_the_loop_around_cachetools_misses_what_ours_does() -> None:
    requests, misses = Requests.of(0, sides.zipf_ids(np.random.default_rng(2), 3000, 1 << 16)), []

    class Counting(cachetools.LRUCache[int, bool]):
        def __setitem__(self, id: int, value: bool) -> None:
            misses.append(id)
            super().__setitem__(id, value)

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sides._CACHETOOLS, "lru", Counting)
        sides.cachetools_side(requests, "lru", 100)()
    assert (len(misses),) == miss_ratio_curve(requests, ["lru"], [100])[0].misses


def test_the_worst_sample_of_any_trace_is_told() -> None:
    report, traces = Report("policies", ()), policies_samples.made_up(30_000)
    policies_samples.compare_samples(report, traces, 3)
    assert list(traces) == ["zipf_1.05", "zipf_0.8", "uniform_with_scans"]
    errors = {name: policies_samples.worst_error(requests, "adj", 3) for name, requests in traces.items()}
    assert report.figures["shards_error"] == round(max(errors.values()), 5)
    assert errors[str(report.figures["shards_error_trace"])] == max(errors.values())
    assert report.notes[0].startswith("SHARDS at 1%, worst mean error of 3 seeds and 3 traces")


def test_planned_batches_evict_and_leave_no_pin() -> None:
    directory = Directory(1000, "lru")
    sides._fill(directory)
    tables, counts = np.zeros(400, np.uint32), np.ones(400, np.int32)
    ids = sides.spread(np.arange(801, 1201))
    assert sides.plan(directory, tables, ids, counts) == 200
    assert sides.plan(directory, tables, ids, counts) == 0
    assert (directory.rows, directory.pinned_rows) == (1000, 0)
    slots = np.empty(200, np.int32)
    least_popular = sides.spread(np.arange(601, 801))
    assert directory.find(tables[:200], least_popular, slots) == 0  # filled first, and so evicted first


def test_about_an_eighth_of_a_planned_batch_is_missing() -> None:
    assert 0.08 < sides.plan_batches(100_000, 1000, 20).misses < 0.18


def test_ids_of_a_batch_are_different_and_popular_ones_come_often() -> None:
    random = np.random.default_rng(0)
    ranks = sides._different(random, 2000, 1 << 20)
    assert len(np.unique(ranks)) == 2000
    drawn = sides.zipf_ids(random, 100_000, 1 << 20)
    assert drawn.min() == 1
    assert drawn.max() <= 1 << 20
    assert np.mean(drawn == 1) / np.mean(drawn == 4) == pytest.approx(4**1.05, rel=0.1)
    assert len(np.unique(sides.spread(np.arange(1, 100_001)))) == 100_000


def test_turns_alternate_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []

    def side(name: str) -> Callable[[], float]:
        def turn() -> float:
            calls.append(name)
            return float(len(calls))

        return turn

    seconds = take_turns({"a": side("a"), "b": side("b")}, rounds=2)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


@pytest.mark.parametrize("option", ["--rounds 1", "--batches 1", "--seeds 0"])
def test_too_few_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["policies", *option.split()])
    assert ended.value.code == 2
    assert "is too few; expected" in capsys.readouterr().err

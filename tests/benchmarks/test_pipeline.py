from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import pipeline, pipeline_cold, sides
from benchmarks.__main__ import main
from benchmarks.disk import CannotMeasure
from benchmarks.pipeline_cold import Law, cold_figures, measure_cold
from benchmarks.pipeline_sides import TABLE, InMemory, Setting, Tiered, ablation, fill, in_turns, open_store
from benchmarks.workloads import ClickStream, Zipf, exponent_of_skew

MUST_SHOW = {
    *("warm_step_ms", "resident_step_ms", "fbgemm_step_ms", "warm_vs_resident", "warm_vs_fbgemm", "cold_step_ms"),
    *("limit_step_ms", "cold_vs_limit", "stall_share", "hit_rates", "ablation", "retail_warm_step_ms"),
}
SMALL = Setting(4000, 64, 0.9, samples=16, features=4, lookahead=2, warm_up=2, steps=2, rounds=2, puts=0.1)


def options(tmp_path: Path) -> str:
    told = (
        "--rows 4000 --share 0.9 --samples 16 --features 4 --warm-up 2 --steps 2 --rounds 2 --cold-rounds 2 --puts 0.1"
    )
    return f"{told} --ablation-rounds 1 --memory {tmp_path} --directory {tmp_path} --cache-mb 64 --json -"


@pytest.fixture
def no_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(rows: int, dim: int) -> torch.nn.Module:
        raise ImportError("No module named 'fbgemm_gpu'")

    monkeypatch.setattr(sides, "fbgemm_module", missing)


@pytest.mark.usefixtures("no_fbgemm")
def test_small_sizes_give_every_figure_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", *options(tmp_path).split(), "--no-cold"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert set(figures) >= MUST_SHOW
    assert figures["fbgemm_step_ms"] is figures["warm_vs_fbgemm"] is figures["cold_vs_limit"] is None
    assert figures["fbgemm_missing"] == "No module named 'fbgemm_gpu'"
    assert figures["cold_reason"] == "it was left out (--no-cold)"
    assert "was not measured: it was left out" in printed
    rates = figures["hit_rates"]
    assert 0 <= rates["ddr_unique"] <= rates["ddr_ids"] <= 1
    assert set(figures["ablation"]) == {"none", "cache", "pipeline", "both"}
    assert all(one > 0 for one in figures["ablation"].values())
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_fbgemm")
def test_where_the_page_cache_cannot_be_held_the_reason_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*arguments: object) -> None:
        raise CannotMeasure("no cgroup")

    monkeypatch.setattr(pipeline, "measure_cold", cannot)
    assert main(["pipeline", *options(tmp_path).split(), "--no-retail"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [figures[name] for name in ("cold_step_ms", "limit_step_ms", "stall_share")] == [None] * 3
    assert figures["cold_reason"] == "no cgroup"
    assert not [name for name in figures if name.startswith("retail")]


def test_a_store_in_memory_and_a_machine_without_fio_are_no_cold_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laws = {"": Law(1.05, 0.01)}
    monkeypatch.setattr(pipeline_cold, "file_system", lambda path: "tmpfs")
    with pytest.raises(CannotMeasure, match="is in memory, not on a disk"):
        measure_cold(tmp_path, SMALL, laws, 1 << 24, 0)
    monkeypatch.setattr(pipeline_cold, "file_system", lambda path: "ext4")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CannotMeasure, match="fio is not installed"):
        measure_cold(tmp_path, SMALL, laws, 1 << 24, 0)


def test_the_limit_is_the_larger_of_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    law = Zipf(SMALL.rows, 1.05)
    with open_store(tmp_path / "store", SMALL) as store:
        fill(store, SMALL, law)
        side = Tiered(store, SMALL, SMALL.stream(law))
        side.warm_up(SMALL)
        asked, mix, ready = [], {"pages": 80_000, "written": 5}, []

        def fio(path: Path, pages: int, written: int) -> float:
            asked.append((path.name, pages, written))
            return 60.0

        monkeypatch.setattr(pipeline_cold, "fio_mix_seconds", fio)
        few = cold_figures(side, SMALL, Law(1.05, 100.0), mix, lambda: ready.append(side.next))
        assert (few["limit_step_ms"], few["fio_step_ms"]) == (100_000.0, 60_000.0)
        assert asked == [("data.mdb", 80_000, 5)] * 2
        assert len(ready) == SMALL.rounds
        assert ready[1] == ready[0] + SMALL.steps
        assert cold_figures(side, SMALL, Law(1.05, 1.0), mix, lambda: None)["limit_step_ms"] == 60_000.0
        assert few["stall_share"] is not None
        side.close()


def test_sides_see_the_same_batches_and_turns_follow_each_other(tmp_path: Path) -> None:
    law = Zipf(SMALL.rows, 1.05)
    with open_store(tmp_path / "store", SMALL) as store:
        fill(store, SMALL, law)
        assert store.stats().rows == SMALL.rows
        stream, seen = SMALL.stream(law), []

        class Seen(torch.nn.Module):
            def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
                seen.append(ids)
                return torch.zeros_like(stream.grad, requires_grad=True)

        ours = Tiered(store, SMALL, stream)
        ours.run(0, 2)
        seconds = in_turns({"ours": ours, "other": InMemory(Seen(), stream)}, stream, SMALL, 2)
        assert {name: len(figures) for name, figures in seconds.items()} == {"ours": 2, "other": 2}
        again = SMALL.stream(law)
        again.make(6)
        assert all(torch.equal(one, again.batch(2 + number)) for number, one in enumerate(seen))
        with pytest.raises(RuntimeError, match="step 6 comes next, not 9"):
            ours.run(9, 1)
        counted = ours.counted()
        assert counted["unique"] >= counted["missing"] >= 0
        assert counted["unique_share"] == pytest.approx(counted["unique"] / 64)
        assert ours.bag.rows(torch.arange(5)).shape == (5, 64)
        assert ours.bag.name == TABLE
        ours.close()
        assert set(ablation(store, SMALL, law, 1)) == {"none", "cache", "pipeline", "both"}


def test_the_finite_zipf_law_has_the_shares_it_should() -> None:
    law = Zipf(1000, 1.05)
    assert sorted(law.ids.tolist()) == [*range(1000)]
    ids = law.draw(np.random.default_rng(0), 100_000)
    weights = np.arange(1, 1001) ** -1.05
    assert (ids == law.ids[0]).mean() == pytest.approx(weights[0] / weights.sum(), rel=0.05)
    assert (ids == law.ids[1]).mean() == pytest.approx(weights[1] / weights.sum(), rel=0.05)
    rare = law.draw(np.random.default_rng(0), 10_000, from_rank=400)
    assert not np.isin(rare, law.ids[:400]).any()
    exponent = exponent_of_skew(100_000, 0.01, 0.957)
    powers = np.arange(1, 100_001) ** -exponent
    assert powers[:1000].sum() / powers.sum() == pytest.approx(0.957, abs=1e-4)


def test_the_workload_is_the_issues() -> None:
    stream = ClickStream(Zipf(10_000_000, 1.05), 64, 4096, 26)
    stream.make(1)
    assert len(stream.batch(0)) == stream.ids_a_step == 4096 * 26
    assert 0.36 < len(torch.unique(stream.batch(0))) / stream.ids_a_step < 0.40
    stream.forget(1)
    loader = stream.batches_from(1)
    assert torch.equal(next(loader), stream.batch(1))
    assert not torch.equal(next(loader), stream.batch(1))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (["--rounds", "1"], "argument --rounds: 1 is too few; expected 2 or more"),
        (["--lookahead", "0"], "argument --lookahead: 0 is too few; expected 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    told: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(options: argparse.Namespace) -> None:
        pytest.fail("measured")

    monkeypatch.setattr(pipeline, "measure", measure)
    with pytest.raises(SystemExit):
        main(["pipeline", *told])
    assert message in capsys.readouterr().err.splitlines()[-1]

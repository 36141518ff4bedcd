from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.report import Report
from benchmarks.timing import interleave, ratio
from benchmarks.workloads import HUGE_ROWS, click_batches, spread_over_huge


def test_sides_take_turns_and_see_the_same_steps() -> None:
    calls: list[tuple[str, int]] = []
    seconds = interleave(
        {"a": lambda step: calls.append(("a", step)), "b": lambda step: calls.append(("b", step))},
        rounds=2,
        warm_up=1,
        turn=2,
    )
    assert [name for name, _ in calls] == ["b", "b", "a", "a", "a", "a", "b", "b", "b", "b", "a", "a"]
    assert [step for name, step in calls if name == "a"] == [step for name, step in calls if name == "b"] == [*range(6)]
    assert {name: len(figures) for name, figures in seconds.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_the_pairs_ratios() -> None:
    assert ratio({"a": [1.0, 9.0, 4.0], "b": [2.0, 3.0, 4.0]}, "a", "b") == 1.0


def test_ids_spread_over_the_huge_table_stay_distinct_and_in_range() -> None:
    ids = spread_over_huge(torch.arange(200_000)).numpy()
    assert len(np.unique(ids)) == len(ids)
    assert ids.min() >= 0
    assert ids.max() < HUGE_ROWS
    assert np.histogram(ids, bins=16, range=(0, HUGE_ROWS))[0].min() > 12_000


def test_the_click_workload_is_the_issues() -> None:
    workload = click_batches(4_000_000, 64, batches=2)
    assert workload.ids_a_step == 4096 * 26
    assert 0.18 < workload.unique_share < 0.21
    assert all(int(ids.min()) >= 0 and int(ids.max()) < 4_000_000 for ids in workload.batches)
    assert torch.equal(workload.batch(0), workload.batch(2))


def test_a_report_ends_with_one_json_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = Report("question", ("engine", "ns/id"), [("ours", "1")], {"ours_ns": 1.0, "fbgemm_ns": None}, ["a note"])
    report.show()
    report.write_json("-")
    lines = capsys.readouterr().out.splitlines()
    assert any("a note" in line for line in lines)
    printed = json.loads(lines[-1])
    assert (printed["ours_ns"], printed["fbgemm_ns"]) == (1.0, None)
    report.write_json(str(tmp_path / "figures.json"))
    assert json.loads((tmp_path / "figures.json").read_text()) == printed

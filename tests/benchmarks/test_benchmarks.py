from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import hot_path, sides
from benchmarks.__main__ import NAMES, main
from benchmarks.report import Report
from benchmarks.timing import interleave, ratio
from benchmarks.workloads import HUGE_ROWS, Workload, click_batches, spread_over_huge


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


def test_without_a_name_the_questions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\s", listed, re.MULTILINE) for name in NAMES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "argument --rounds: 0 is too few; expected 2 or more"),
        (["--rounds", "1"], "argument --rounds: 1 is too few"),
        (["--rows", "-5"], "argument --rows: -5 is too few"),
        (["--rounds", "many"], "argument --rounds: invalid integer value: 'many'"),
        (["--json", "/no/such/place/figures.json"], "/no/such/place/figures.json cannot be written; expected"),
        (["--json", "/"], "/ cannot be written"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_measured(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_path, "measure", lambda options: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        main(["hot_path", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_fbgemm_the_reason_is_a_figure_and_the_note_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(workload: Workload) -> None:
        raise ModuleNotFoundError("No module named 'fbgemm_gpu'")

    for name in ("tiered", "torch_sgd", "torch_sparse_adam"):
        monkeypatch.setattr(sides, name, lambda workload: lambda step: None)
    monkeypatch.setattr(sides, "fbgemm_rowwise_adagrad", missing)
    report = Report("question", ("engine", "ns/id", "quartiles", "ours / theirs"))
    hot_path._engines(report, click_batches(100, 4, batches=1, samples=2), rounds=2)
    assert report.figures["fbgemm_ns"] is None
    assert report.figures["fbgemm_missing"] == "No module named 'fbgemm_gpu'"
    assert report.notes == ["FBGEMM was not measured: No module named 'fbgemm_gpu' (`make bench` installs it)"]

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import KEYS
from benchmarks.gpu_steps import ALL_HBM, PREFETCHED, TIERS, Steps, measure_steps


@pytest.mark.parametrize(
    ("there", "said"), [(False, "There is no GPU here"), (True, "Triton is missing (the extra `gpu` installs it)")]
)
def test_without_a_gpu_or_triton_nothing_is_measured_and_nothing_fails(
    there: bool, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr("benchmarks.gpu.has_triton", lambda: False)
    assert main(["gpu", "--json", "-"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert said in printed
    assert figures["gpu"] is None
    assert all(figures[key] is None for key in KEYS)


def test_steps_are_measured_with_rows_in_all_tiers(tmp_path: Path) -> None:
    setting = Steps(
        20_000,
        8,
        32,
        4,
        hbm_share=0.2,
        ddr_share=0.2,
        lookahead=2,
        warm_up=2,
        steps=2,
        rounds=2,
        directory=str(tmp_path),
    )
    figures = measure_steps(setting, torch.device("cpu"))
    steps = figures["step_ms"]
    assert isinstance(steps, dict)
    assert set(steps) == {ALL_HBM, TIERS, PREFETCHED}
    assert all(isinstance(one, float) and one > 0 for one in steps.values())
    assert set(figures) >= {"tiers_vs_hbm", "prefetched_vs_hbm", "prefetch_hides"}
    assert not list(tmp_path.iterdir())

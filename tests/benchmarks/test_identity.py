from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import identity
from benchmarks.__main__ import main
from benchmarks.identity_draw import draw
from benchmarks.identity_play import Player
from tiered_emb import group, reading
from tiered_emb.cold import ColdRows
from tiered_emb.errors import TierCapacityError


def figures(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, figures and stderr."""
    code = main(["identity", *options, "--json", "-"])
    said = capsys.readouterr()
    return code, json.loads(said.out.splitlines()[-1]), said.err


def test_runs_do_not_differ_and_meet_what_they_are_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found, said = figures(capsys, "--runs", "6", "--directory", str(tmp_path))
    assert (code, found["runs"], found["differences"]) == (0, 6, 0)
    assert min(found[name] for name in ("evictions", "write_backs", "prepared", "unprepared", "reopened", "rows")) > 0
    assert found["prepare_failed"] == 0
    assert "run 0 of 6" in said
    assert not list(tmp_path.iterdir())


def test_a_run_is_a_function_of_seed_and_number() -> None:
    runs = [draw(1, 5), draw(1, 5), draw(1, 6), draw(2, 5)]
    assert repr(runs[0]) == repr(runs[1])
    assert len({repr(run) for run in runs}) == 3
    ids = [[part[0].tolist() for part in run.steps[0].batch["module0"].features.values()] for run in runs[:2]]
    assert ids[0] == ids[1]


def test_a_lost_write_back_is_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdRows, "write", lambda self, tables, ids, rows: None)
    code, found, said = figures(capsys, "--runs", "2")
    assert (code, found["differences"]) == (1, 2)
    assert "run 1 of seed 0" in said
    assert "policy=" in said


def test_one_bit_of_an_output_is_noticed_with_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = reading.pool_rows

    def wrong(*arguments: Any) -> Any:
        pooled = pool(*arguments)
        if pooled.out.numel():
            pooled.out.view(torch.int32)[-1, -1] ^= 1
        return pooled

    monkeypatch.setattr(group, "pool_rows", wrong)
    code, found, said = figures(capsys, "--only", "3")
    assert (code, found["runs"], found["differences"]) == (1, 1, 1)
    assert "1 of " in said
    assert ", ids [" in said
    assert ", column " in said


def test_a_run_that_finds_no_room_is_played_again_with_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[float] = []

    class Tight(Player):
        def __init__(self, run: Any, directory: Path, grown: float) -> None:
            super().__init__(run, directory, grown)
            played.append(grown)

        def play(self) -> None:
            if len(played) < 3:
                raise TierCapacityError("no room")

    monkeypatch.setattr(identity, "Player", Tight)
    code, found, _ = figures(capsys, "--only", "0")
    assert (code, found["enlarged"], played) == (0, 1, [1.0, 1.5, 2.25])

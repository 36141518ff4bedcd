"""A power cut at the N-th change of the disk: nothing synced is lost, nothing torn is taken for whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.faults.lives import Lives
from tests.faults.powerfs import Mount, Power
from tests.faults.tally import TALLY


def cut(lives: Lives, outside: Path, power: Power) -> None:
    """A life that a power cut ends, and what it leaves."""
    mount = Mount(outside / "disk", outside / "mounted", power)
    try:
        writer = lives.born()
        writer.talk.send("go")
        mount.wait_for_cut(writer)
        writer.finish_off()
    finally:
        mount.cut()
    TALLY["power_cuts"] += 1
    mount = Mount(outside / "disk", outside / "mounted")
    try:
        lives.judge(powered=False)
    finally:
        mount.cut()  # what judging wrote is lost again unless it was synced


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
@pytest.mark.parametrize("piece_bytes", [0, 512, 4096])
@pytest.mark.rounds(1, 3)
def test_a_power_cut_loses_nothing_that_was_flushed(
    tmp_path: Path, durability: str, piece_bytes: int, round: int, require_tool: Callable[[str], str]
) -> None:
    require_tool("fusermount3")
    lives = Lives(tmp_path / "mounted", durability, seed=200 + round, outside=tmp_path)
    rng = np.random.default_rng([3, round, piece_bytes])
    for turn in range(8):
        cut_at = int(rng.integers(1, rng.choice([15, 150])))
        cut(lives, tmp_path, Power(cut_at, piece_bytes, seed=turn))
    assert lives.expected.next_number > 20


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_a_power_cut_at_any_change_of_a_creation_leaves_a_store_or_none(
    tmp_path: Path, durability: str, all_faults: bool, require_tool: Callable[[str], str]
) -> None:
    """A new disk each time: of the first changes none is left out."""
    require_tool("fusermount3")
    for cut_at in range(1, 41, 1 if all_faults else 3):
        outside = tmp_path / str(cut_at)
        lives = Lives(outside / "mounted", durability, seed=cut_at, outside=outside)
        cut(lives, outside, Power(cut_at, 512 * (cut_at % 2), seed=cut_at))

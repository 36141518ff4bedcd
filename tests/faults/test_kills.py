"""kill -9 at random moments and at the N-th system call, over put, flush, delete, compaction, close and reopen.

Each run goes on with the store that the last one left, so that damage accumulates until it shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.faults.lives import Lives
from tests.faults.oracle import SNAPSHOTS, operation
from tests.faults.tally import TALLY
from tests.faults.victim import CHANGES, Strace

DURABILITIES = pytest.mark.parametrize("durability", ["commit", "snapshot"])
DISK_BOUND_BYTES = 3 << 20  # some 2,000 rows of 32 bytes: 64 KiB of live bytes in segments of 8 KiB


@DURABILITIES
@pytest.mark.rounds(1, 4)
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, durability: str, round: int) -> None:
    lives, rng = Lives(tmp_path, durability, seed=round), np.random.default_rng([1, round])
    for _ in range(15):
        writer = lives.born()
        writer.talk.send("go")
        if rng.random() < 0.8:  # else somewhere in the opening
            assert writer.hear() == "open"
        time.sleep(float(rng.exponential(0.05)))  # the moment of death is what is random here
        writer.kill()
        assert writer.end().signal == 9
        TALLY["kills"] += 1
        lives.judge()
        assert lives.disk_bytes < DISK_BOUND_BYTES
    assert lives.expected.next_number > 15


@DURABILITIES
@pytest.mark.rounds(1, 6)
def test_a_kill_at_the_nth_system_call_loses_nothing(
    tmp_path: Path, durability: str, round: int, require_tool: Callable[[str], str]
) -> None:
    require_tool("strace")
    lives, rng = Lives(tmp_path, durability, seed=100 + round), np.random.default_rng([2, round])
    for _ in range(15):
        writer = lives.born()
        call = int(rng.integers(1, rng.choice([12, 120])))
        strace = Strace(writer.pid, lives.path, CHANGES, f"signal=KILL:when={call}")
        writer.talk.send("go")
        assert writer.end().signal == 9
        strace.end()
        TALLY["kills"] += 1
        lives.judge()
        assert lives.disk_bytes < DISK_BOUND_BYTES
    assert lives.expected.next_number > 15


@DURABILITIES
@pytest.mark.rounds(2, 20)
def test_a_kill_in_the_middle_of_a_snapshot_does_all_of_it_or_nothing(
    tmp_path: Path, durability: str, round: int, require_tool: Callable[[str], str]
) -> None:
    """Snapshots, drops and rollbacks one after the other, with puts and deletes in between."""
    require_tool("strace")
    lives = Lives(tmp_path, durability, seed=200 + round, kinds=SNAPSHOTS)
    assert lives.live(len(SNAPSHOTS)).error is None
    lives.judge()
    rng, done = np.random.default_rng([3, round]), set()
    for _ in range(12):
        writer = lives.born()
        strace = Strace(writer.pid, lives.path, CHANGES, f"signal=KILL:when={int(rng.integers(1, 40))}")
        writer.talk.send("go")
        assert writer.end().signal == 9
        strace.end()
        TALLY["kills"] += 1
        begun = [words[1] for words in lives.said() if words[0] == "b"]
        done.add(operation(lives.expected.seed, int(begun[-1]), SNAPSHOTS).kind if begun else "open")
        lives.judge()
    assert done & {"snapshot", "drop", "rollback"}, "none of them was cut short"


@DURABILITIES
def test_a_kill_at_any_call_of_a_creation_leaves_a_store_or_none(
    tmp_path: Path, durability: str, all_faults: bool, require_tool: Callable[[str], str]
) -> None:
    """A new directory each time: of the first calls none is left out."""
    require_tool("strace")
    for call in range(1, 41 if all_faults else 26):
        (tmp_path / str(call)).mkdir()
        lives = Lives(tmp_path / str(call), durability, seed=call)
        writer = lives.born()
        strace = Strace(writer.pid, lives.path, CHANGES, f"signal=KILL:when={call}")
        writer.talk.send("go")
        assert writer.end().signal == 9
        strace.end()
        TALLY["kills"] += 1
        lives.judge()

"""The N-th system call that fails, once or from then on: the right error, nothing lost, a store that opens again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from storage import StoreFullError, StoreIOError
from tests.faults.lives import Lives
from tests.faults.tally import TALLY
from tests.faults.victim import Child, Ended, Strace

CALLS = ("pwrite64", "writev", "fdatasync", "openat", "rename", "fsync")
FAILURES = {"EIO": StoreIOError, "ENOSPC": StoreFullError, "EDQUOT": StoreFullError}


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.rounds(1, 3)
def test_a_call_that_fails_is_an_error_and_loses_nothing(
    tmp_path: Path, durability: str, call: str, round: int, all_faults: bool, require_tool: Callable[[str], str]
) -> None:
    """Where the call fails once the writer goes on after StoreFullError; where it fails for good it ends."""
    require_tool("strace")
    lives, rng = Lives(tmp_path, durability, seed=300 + round), np.random.default_rng([4, round, CALLS.index(call)])
    failed = 0
    for turn in range(6 if all_faults else 4):
        failure = str(rng.choice(list(FAILURES)))
        when = int(rng.integers(1, 3 if call in ("rename", "fsync") else rng.choice([4, 25])))
        inject = f"error={failure}:when={when}" + "+" * (turn % 2)
        writer = lives.born(60)
        strace = Strace(writer.pid, lives.path, call, inject)
        writer.talk.send("go")
        fulls, ended = _work(writer)
        strace.end()
        said = [words[2] for words in lives.said() if words[0] == "f"]
        failed += bool(said)
        # A meta page that cannot be written is the end of LMDB's environment, and the commit that found no room may
        # have been one in the background: the first error that is seen is the next one's.
        also = [["StoreIOError"]] if call == "pwrite64" else []
        assert said[:1] in ([], [FAILURES[failure].__name__], *also), f"{call} failed with {failure}"
        assert {"StoreIOError", "StoreFullError"}.issuperset(said), "LMDB may refuse to go on after either"
        assert not ended.signal or fulls == 4
        TALLY["failed_calls"] += 1
        lives.judge()
    if call in ("pwrite64", "writev", "fdatasync"):
        assert failed > 1, "the calls that fail are not those that the store makes"


def _work(writer: Child) -> tuple[int, Ended]:
    """Until the writer has done all, has failed or has been refused room four times; how often that was, its end."""
    fulls = 0
    with suppress(EOFError, BrokenPipeError):
        while fulls < 4 and (said := writer.hear()) != "done" and not isinstance(said, tuple):
            if said == "full":
                fulls += 1
                writer.talk.send("again")
        writer.talk.send("close")
    if fulls == 4:
        return fulls, writer.finish_off()
    return fulls, writer.end()

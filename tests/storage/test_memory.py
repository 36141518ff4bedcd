"""Memory that goes back to the system, and memory that is to stay."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest

from storage import memory

_FAULTS = """
import resource, sys
import numpy as np
from storage.memory import keep_freed

keep_freed(int(sys.argv[1]))
for turn in range(6):
    if turn == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(1 << 20, np.uint8) for _ in range(6)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(kept: int) -> int:
    """Page faults of three times six blocks of 1 MiB, allocated and freed in a fresh process."""
    return int(subprocess.run([sys.executable, "-c", _FAULTS, str(kept)], check=True, capture_output=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_blocks_that_are_kept_are_not_faulted_in_again() -> None:
    assert page_faults(8 << 20) < 100
    assert page_faults(64 << 20) < 100, "as much as there can be is kept where more is asked for"
    assert page_faults(1) > 3 * 6 * 250, "nothing is kept unless it is asked for"


def test_memory_that_is_given_back_is_zeros_again() -> None:
    array = memory.zeros(1 << 20, np.uint8)
    array[:] = 7
    memory.give_back(array, 5000)
    assert array[: 2 * 4096].all() and not array[2 * 4096 :].any()
    small = memory.zeros(100, np.uint8)
    small[:] = 7
    memory.give_back(small, 0)
    assert small.all()

"""Settings and fixtures that every test may use: Hypothesis profiles, data beside the repository, tools of the system.

A test that needs something which may be missing asks for it through `require_shared` or `require_tool`. Where it is
missing the test is skipped with the reason; in CI (the environment variable CI is set) it fails, so that nothing is
skipped unseen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: its thread count changes the bits of a dense layer, and the tests compare bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
IN_CI = bool(os.environ.get("CI"))

# The first example of a test may compile a Numba kernel, so no example has a deadline.
_SLOW_START = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_START)
settings.register_profile("ci", deadline=None, suppress_health_check=_SLOW_START, derandomize=True, print_blob=True)
settings.register_profile("long", deadline=None, suppress_health_check=_SLOW_START, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


def _missing(reason: str) -> None:
    if IN_CI:
        pytest.fail(f"{reason}; in CI it must be there", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def require_shared() -> Callable[[str], Path]:
    """`require_shared("data/x.gz")` is the path of ../shared/data/x.gz beside the repository, or skips the test."""

    def require(path: str) -> Path:
        found = ROOT.parent / "shared" / path
        if not found.exists():
            _missing(f"needs ../shared/{path} beside the repository")
        return found

    return require


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """`require_tool("strace")` is the path of that program, or skips the test."""

    def require(name: str) -> str:
        found = shutil.which(name)
        if found is None:
            _missing(f"needs the program {name}")
        return str(found)

    return require

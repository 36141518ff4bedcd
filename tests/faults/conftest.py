"""How much of the fault suites runs: a share of a minute, or with --all-faults all of it, counted.

`@pytest.mark.rounds(few, all)` repeats a test that takes `round`, each time with another seed. With --all-faults a line
tells after each test what has been done so far, the last line of the output is the count as JSON, and the exit code is
1 also if less was done than `tally.PROMISED` says and no selection of tests explains it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.faults.tally import TALLY


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-faults", action="store_true", help="run all of the fault suites, not a share of them")
    parser.addoption("--flip-in", default="rows,ids,headers", help="where bits are flipped; `pages` are LMDB's own")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rounds(few, all): how often a test runs, by default and with --all-faults")


def runs_all(config: pytest.Config) -> bool:
    return bool(config.getoption("--all-faults", default=False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "round" in metafunc.fixturenames:
        few, all_ = metafunc.definition.get_closest_marker("rounds").args  # type: ignore[union-attr]
        metafunc.parametrize("round", range(all_ if runs_all(metafunc.config) else few))


@pytest.fixture
def all_faults(request: pytest.FixtureRequest) -> bool:
    """Whether everything is to run."""
    return runs_all(request.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and report.failed:
        TALLY.finding(call.excinfo.value)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and _PRINTS:
        print(f" {TALLY.seconds:4} s  " + "  ".join(f"{name} {count}" for name, count in TALLY.items() if count))


_PRINTS: list[bool] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    if runs_all(session.config):
        _PRINTS.append(True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    chosen = (
        session.config.option.keyword or session.config.option.markexpr or any("::" in a for a in session.config.args)
    )
    if _PRINTS and exitstatus == 0 and not chosen and TALLY.short_of():
        print(f"\nless than promised was done; missing: {TALLY.short_of()}")
        session.exitstatus = 1


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if _PRINTS:
        print(TALLY.line(), flush=True)

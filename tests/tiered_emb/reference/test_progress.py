from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from storage.store import StoreStats
from tiered_emb.metrics import EngineStats, TierStats
from tiered_emb.reference import progress
from tiered_emb.reference.progress import meter
from tiered_emb.reference.report import Report, print_report
from tiered_emb.reference.settings import SYNTHETIC_SAMPLES
from tiered_emb.reference.stream import Part
from tiered_emb.reference.synthetic import SyntheticStream
from tiered_emb.reference.training import Evaluation
from tiered_emb.reference.words import counted, size

TIERS = [TierStats(name, 1, 1, 1, 1, 1, hits, 64, 0, 0) for name, hits in (("hbm", 36), ("ddr", 34))]
STATS = EngineStats(TIERS, StoreStats())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is; a test sets it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def shown(console: Console) -> Iterator[str]:
    """Every line that was drawn, without its colours."""
    file = console.file
    assert isinstance(file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    return (line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip())


def test_the_bar_and_its_words_fit_into_80_columns(clock: list[float]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with meter(console, "train", 471_860, "compiling kernels, once") as bar:
        for _ in range(3):
            clock[0] += 1
            bar.add(48_676, 0.4912, lambda: STATS)
    lines = list(shown(console))
    assert any("compiling kernels, once" in line for line in lines)
    assert lines[-1].startswith(f"train {'━' * 4}")
    assert re.search(r"[━╸╺]{16}  31% loss 0\.4912  48,676/s  hbm 36%  ddr 35% \d:\d\d:\d\d$", lines[-1])


def test_the_rate_is_that_of_the_last_seconds(clock: list[float]) -> None:
    console = Console(file=io.StringIO(), width=80)  # a log
    with meter(console, "train", 4000) as log:
        for seconds, samples in ((60.0, 100), (10.0, 1000), (10.0, 2000)):
            clock[0] += seconds
            log.add(samples, 0.5)
    rates = [re.findall(r"(\d+)%  loss 0.5000  (\S+)/s$", line) for line in shown(console)]
    assert rates == [[("2", "-")], [("28", "100")], [("78", "200")]]


def test_the_tour_shows_the_report_as_it_is() -> None:
    """Its headings, and the numbers that no machine changes."""
    evaluation = Evaluation(0.7688, 0.4717, 0.8072)
    stream = SyntheticStream(SYNTHETIC_SAMPLES, 0)
    samples = stream.samples(Part.TRAIN)
    report = Report({}, evaluation, STATS, samples=samples, steps=-(-samples // 1024), seconds=10.0, row_bytes=132)
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    tour = (Path(__file__).parents[3] / "docs" / "tour.md").read_text()
    headings = next(line for line in shown(console) if "evicted" in line)
    assert any(line.split() == headings.split() for line in tour.splitlines())
    assert f"\n{samples:,} samples in {report.steps:,} steps and " in tour
    assert "on the last tenth, held out; best reachable AUC 0." in tour


def test_numbers_as_people_read_them() -> None:
    given = (0, 1023, 1024, (1 << 20) - 1, 1 << 20, 3 << 40, 2048 << 40)
    assert [size(n) for n in given] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 MiB", "3.0 TiB", "2048.0 TiB"]
    assert [counted(n, "row") for n in (0, 1, 2, 1_061_331)] == ["0 rows", "1 row", "2 rows", "1,061,331 rows"]

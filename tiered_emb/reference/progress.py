"""What a person sees while a run goes on: one bar, with loss, samples a second and the hit rate of each tier.

On a terminal the bar moves; in a log, where it cannot, a line is written every ten seconds. All of it fits into 80
columns. Samples a second, and the time that is left, follow from the last seconds: the first steps of a first run
compile kernels and say nothing about those to come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tiered_emb.metrics import EngineStats, TierStats

_REFRESH_S = 0.25
_LOG_EVERY_S = 10.0
_SMOOTHING = 0.05
_RECENT_S = 5.0

StatsOf = Callable[[], EngineStats] | None


class Meter:
    """Counts samples of one pass and shows them now and then; made by :func:`meter`."""

    def __init__(self, console: Console, progress: Progress, title: str, total: int, at_first: str) -> None:
        self.samples = 0
        self._console, self._progress = console, progress
        self._title, self._total = title, total
        self._task = progress.add_task(title, total=total, detail=at_first)
        self._start = self._shown = time.perf_counter()
        self._mean_loss: float | None = None
        self._recent: deque[tuple[float, int]] = deque()  # times, and samples done by then

    @property
    def seconds(self) -> float:
        """Since the pass began."""
        return time.perf_counter() - self._start

    def add(self, samples: int, loss: float | None = None, stats: StatsOf = None) -> None:
        """A step of ``samples`` is done; ``stats`` is asked only when something is shown."""
        self.samples += samples
        if loss is not None:
            before = loss if self._mean_loss is None else self._mean_loss
            self._mean_loss = before + _SMOOTHING * (loss - before)
        now = time.perf_counter()
        if not self._recent:  # the first step has ended
            self._recent.append((now, self.samples))
        if now - self._shown >= (_REFRESH_S if self._console.is_terminal else _LOG_EVERY_S):
            self._shown = now
            self._recent.append((now, self.samples))
            while self._recent[1][0] < now - _RECENT_S:
                self._recent.popleft()
            self._show(stats)

    def skip(self, samples: int) -> None:
        """So many were done before; they say nothing of how fast others go."""
        self.samples += samples

    def to(self, done: int, total: int) -> None:
        """As :meth:`add` for a pass that counts bytes: ``done`` of ``total``."""
        self._total = total
        self._progress.update(self._task, total=total)
        self.add(done - self.samples)

    def _rate(self) -> str:
        """Samples a second of late."""
        (first, before), (last, samples) = self._recent[0], self._recent[-1]
        return f"{(samples - before) / (last - first):,.0f}/s" if last > first else "-/s"

    def _show(self, stats: StatsOf) -> None:
        detail = [] if self._mean_loss is None else [f"loss {self._mean_loss:.4f}", self._rate()]
        if stats is not None:
            detail += [f"{tier.name} {hit_rate(tier, digits=0)}" for tier in stats().tiers]
        text = "  ".join(detail)
        self._progress.update(self._task, completed=self.samples, detail=text)
        if not self._console.is_terminal:
            share = f"{self.samples / max(1, self._total):.0%}"
            self._console.print(f"{self._title} {share}  {text}", highlight=False, soft_wrap=True)


@contextmanager
def meter(console: Console, title: str, total: int, at_first: str = "") -> Iterator[Meter]:
    """A meter over ``total`` samples, its bar gone when the pass is over; ``at_first`` is what goes on until the first
    step has ended."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=_RECENT_S,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield Meter(console, bar, title, total, at_first)


def hit_rate(tier: TierStats, digits: int = 1) -> str:
    """Hits of the rows asked for, in percent; "-" before any was."""
    return f"{tier.hit_rate:.{digits}%}" if tier.hits + tier.misses else "-"

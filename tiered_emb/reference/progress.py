"""What a person sees while a run goes on: one bar, with loss, samples a second and the hit rate of each tier.

On a terminal the bar moves; in a log, where it cannot, a line is written every ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from tiered_emb.metrics import EngineStats, TierStats

_REFRESH_S = 0.25
_LOG_EVERY_S = 10.0
_SMOOTHING = 0.05

StatsOf = Callable[[], EngineStats] | None


class Meter:
    """Counts samples of one pass and shows them now and then; made by :func:`meter`."""

    def __init__(self, console: Console, progress: Progress, title: str, total: int) -> None:
        self.samples = 0
        self._console, self._progress = console, progress
        self._title, self._total = title, total
        self._task = progress.add_task(title, total=total, detail="")
        self._start = self._shown = time.perf_counter()
        self._mean_loss: float | None = None

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
        if now - self._shown >= (_REFRESH_S if self._console.is_terminal else _LOG_EVERY_S):
            self._shown = now
            self._show(stats)

    def to(self, done: int, total: int) -> None:
        """As :meth:`add` for a pass that counts bytes: ``done`` of ``total``."""
        self._total = total
        self._progress.update(self._task, total=total)
        self.add(done - self.samples)

    def _show(self, stats: StatsOf) -> None:
        detail = [] if self._mean_loss is None else [f"loss {self._mean_loss:.4f}"]
        if self._mean_loss is not None:
            detail.append(f"{self.samples / self.seconds:,.0f} samples/s")
        if stats is not None:
            detail += [f"{tier.name} hits {hit_rate(tier)}" for tier in stats().tiers]
        text = " | ".join(detail)
        self._progress.update(self._task, completed=self.samples, detail=text)
        if not self._console.is_terminal:
            share = f"{self.samples / max(1, self._total):.0%}"
            self._console.print(f"{self._title} {share}  {text}", highlight=False, soft_wrap=True)


@contextmanager
def meter(console: Console, title: str, total: int) -> Iterator[Meter]:
    """A meter over ``total`` samples, its bar gone when the pass is over."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield Meter(console, bar, title, total)


def hit_rate(tier: TierStats) -> str:
    """Hits of the rows asked for, in percent; "-" before any was."""
    return f"{tier.hit_rate:.1%}" if tier.hits + tier.misses else "-"

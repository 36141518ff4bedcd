"""draw_store: a store as a picture - live bytes by age of segment, space and writes over its life.

Needs matplotlib (`pip install 'tiered-emb[plots]'`), which is imported with this module. What is drawn is what
`storage.describe` found; a store without records of commits has only the first panel's bars.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from storage.describe import AgeBand, Moment, StoreDescription
from storage.errors import StoreConfigError, StoreIOError

__all__ = ["draw_store"]

_LIVE, _DEAD, _DISK, _MOVED = "#1f6f8b", "#d9dee2", "#b5651d", "#8a3b5d"
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_TIMES = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
_WINDOWS = 60  # in which writes over time are averaged


def draw_store(described: StoreDescription, file: str | os.PathLike[str]) -> None:
    """Draw a store to a file, in the format that its name ends with (png, svg, pdf, ...).

    Raises:
        StoreConfigError: there is no such format.
        StoreIOError: the file could not be written.
    """
    figure = Figure(figsize=(9, 9), layout="constrained")
    ages, space, writes = figure.subplots(3, 1)
    figure.suptitle(_headline(described), x=0.01, ha="left", fontsize=11)
    for axes, title in (
        (ages, "Live bytes by age of segment, from the oldest tenth to the newest; above each its live share"),
        (space, "Space over time"),
        (writes, "Bytes of segments written for each byte put, over time"),
    ):
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_ages(ages, described.ages)
    if len(described.history) < 2:
        for axes in (space, writes):
            axes.text(0.5, 0.5, "no records of commits yet", ha="center", va="center", transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
    else:
        _draw_space(space, described.history)
        _draw_writes(writes, described.history)
    ending = os.path.splitext(os.fspath(file))[1].lstrip(".").lower()
    formats = sorted(figure.canvas.get_supported_filetypes())
    if ending not in formats:
        raise StoreConfigError(f"{os.fspath(file)} ends with {ending!r}: pictures end with one of {', '.join(formats)}")
    try:
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise StoreIOError(f"{os.fspath(file)} could not be written: {error}") from error


def _headline(described: StoreDescription) -> str:
    ratio = f", {described.space_ratio:.2f} bytes on disk for each live byte" if described.space_ratio else ""
    return f"{described.path}: {described.rows:,} rows in {described.segments:,} segments{ratio}"


def _scale(largest: float) -> tuple[float, str]:
    """What to divide bytes by, and the unit that makes."""
    return next(((factor, unit) for factor, unit in _BYTES if largest >= factor), _BYTES[-1])


def _draw_ages(axes: Any, ages: Sequence[AgeBand]) -> None:
    factor, unit = _scale(max((band.bytes for band in ages), default=0))
    places = range(len(ages))
    dead = [(band.bytes - band.live_bytes) / factor for band in ages]
    live = [band.live_bytes / factor for band in ages]
    axes.bar(places, live, color=_LIVE, width=0.75, label="live rows")
    axes.bar(places, dead, bottom=live, color=_DEAD, width=0.75, label="superseded rows, ids, headers")
    for at, band in zip(places, ages, strict=True):
        share = f"{band.live_bytes / band.bytes:.0%}"
        axes.annotate(share, (at, band.bytes / factor), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(places, [_epochs(band) for band in ages], fontsize=7)
    axes.set_xlabel("epochs of their rows (number of the segment in which a row was last changed)", fontsize=8)
    axes.set_ylabel(unit)
    axes.margins(y=0.15)
    if ages:
        _legend(axes)


def _epochs(band: AgeBand) -> str:
    if band.first_epoch == band.last_epoch:
        return f"{band.first_epoch:,}"
    return f"{band.first_epoch:,}\nto {band.last_epoch:,}"


def _times(history: Sequence[Moment]) -> tuple[list[float], str]:
    """Time of each moment since the first, and the unit."""
    since = [moment.time_s - history[0].time_s for moment in history]
    _, factor, unit = next(line for line in _TIMES if since[-1] >= line[0])
    return [one / factor for one in since], f"{unit} since the first record"


def _draw_space(axes: Any, history: Sequence[Moment]) -> None:
    times, label = _times(history)
    factor, unit = _scale(max(moment.disk_bytes for moment in history))
    live = [moment.live_bytes / factor for moment in history]
    disk = [moment.disk_bytes / factor for moment in history]
    axes.fill_between(times, live, color=_LIVE, alpha=0.25, linewidth=0)
    axes.plot(times, live, color=_LIVE, label="live bytes")
    axes.plot(times, [2 * one for one in live], color=_LIVE, linewidth=0.8, linestyle=":", label="twice the live bytes")
    axes.plot(times, disk, color=_DISK, label="bytes on disk")
    axes.set(xlabel=label, ylabel=unit, ylim=(0, None), xlim=(0, times[-1] or 1))
    _legend(axes)


def _draw_writes(axes: Any, history: Sequence[Moment]) -> None:
    times, label = _times(history)
    windows = _windows(history)
    at = [times[last] for _, last in windows]
    axes.plot(at, [_ratio(history, window, "written_bytes") for window in windows], color=_DISK, label="all writes")
    axes.plot(at, [_ratio(history, window, "moved_bytes") for window in windows], color=_MOVED, label="by compaction")
    if history[-1].put_bytes:
        whole = history[-1].written_bytes / history[-1].put_bytes
        axes.axhline(whole, color="#555555", linewidth=0.8, linestyle=":", label=f"since creation: {whole:.2f}")
    axes.set(xlabel=label, ylabel="bytes / byte", ylim=(0, None), xlim=(0, times[-1] or 1))
    _legend(axes)


def _legend(axes: Any) -> None:
    """Beside the panel, where it covers nothing."""
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _windows(history: Sequence[Moment]) -> list[tuple[int, int]]:
    """Pairs of moments between which about equally many bytes were put."""
    step = (history[-1].put_bytes - history[0].put_bytes) / _WINDOWS
    windows, first = [], 0
    for last in range(1, len(history)):
        put = history[last].put_bytes - history[first].put_bytes
        if put > 0 and put >= step:
            windows.append((first, last))
            first = last
    return windows


def _ratio(history: Sequence[Moment], window: tuple[int, int], name: str) -> float:
    """Bytes of one kind for each byte put within a window."""
    before, after = (history[i] for i in window)
    return float(getattr(after, name) - getattr(before, name)) / (after.put_bytes - before.put_bytes)

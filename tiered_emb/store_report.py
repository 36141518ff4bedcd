"""What `tiered-emb store` prints: tables on stdout, progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from storage.describe import AgeBand, SnapshotDescription, StoreDescription
from storage.export import ExportReport, ImportReport
from storage.lmdb_store import LmdbStore
from storage.row_log.manifest import load_manifest
from storage.snapshot import Change
from storage.verify import Damage, VerifyReport
from tiered_emb.reference.words import counted, size

MAX_LINES = 20
_BAR_CELLS = 20
_LOG_EVERY_S = 10.0
_PIPE_COLUMNS = 400


def table_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; where there is none, wide enough that no name is folded."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_COLUMNS)


@contextmanager
def byte_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, bytes in all): a bar on a terminal, a line every ten seconds elsewhere."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=_BAR_CELLS),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=None)
    shown = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        bar.update(task, completed=done, total=total)
        if not console.is_terminal and time.perf_counter() - shown >= _LOG_EVERY_S:
            shown = time.perf_counter()
            console.print(f"{title} {done / max(1, total):.0%}: {size(done)} of {size(total)}", highlight=False)

    with bar:
        yield progress


def print_description(described: StoreDescription, console: Console) -> None:
    """All of `tiered-emb store info`."""
    console.print(_grid(escape(described.path), _facts(described)))
    if described.tables:
        console.print(_tables(described))
    if described.snapshots:
        console.print(snapshot_table(described.snapshots))
    if described.ages:
        console.print(_ages(described.ages))
    for damage in described.damages[:MAX_LINES]:
        _print(console, f"DAMAGED: {damage.message}")
    if described.damages:
        _print(console, f"left out: {counted(len(described.damages), 'damage')}; run `tiered-emb store verify`")


def _facts(described: StoreDescription) -> list[tuple[str, str]]:
    versions = ", ".join(map(str, described.segment_versions)) or "none yet"
    state = "damaged" if described.state < 0 else f"{described.state}, note of {size(described.note_bytes)}"
    facts = [
        ("uuid", described.uuid or "lost with the manifest"),
        ("formats", f"manifest {described.format_version}, segments {versions}"),
        ("rows", f"{described.rows:,} live, {described.stored_rows:,} stored, {described.tombstones:,} tombstones"),
        ("live bytes", size(described.live_bytes)),
        ("segments", f"{described.segments:,}, {size(described.segment_bytes)}"),
        ("on disk", size(described.disk_bytes) + _times(described.space_ratio, "live bytes")),
        ("complete state", state),
    ]
    if described.later_rows:
        facts.append(("after it", f"{described.later_rows:,} rows that no complete state covers"))
    if described.oldest_reader:
        lag = counted(described.oldest_reader_commits, "commit")
        facts.append(("oldest reader", f"process {described.oldest_reader}, {lag} behind"))
    if described.history:
        last = described.history[-1]
        times = _times(last.written_bytes / last.put_bytes if last.put_bytes else None, "bytes put")
        facts.append(("written", f"{size(last.written_bytes)}{times}, {size(last.moved_bytes)} by compaction"))
        facts.append(("commits", f"{last.commit:,}, the last {_when(last.time_s)}"))
    return facts


def _times(ratio: float | None, what: str) -> str:
    return "" if ratio is None else f" = {ratio:.2f} x {what}"


def _when(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _grid(title: str, facts: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, fact in facts:
        table.add_row(name, fact)
    return table


def _tables(described: StoreDescription) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("table", "number", "row"):
        table.add_column(name, overflow="fold")
    for name in ("bytes a row", "rows", "live bytes"):
        table.add_column(name, justify="right")
    for one in described.tables:
        table.add_row(
            *(escape(one.name), str(one.number), escape(one.columns)),
            *(f"{one.row_bytes:,}", f"{one.rows:,}", size(one.live_bytes)),
        )
    return table


def snapshot_table(snapshots: Sequence[SnapshotDescription]) -> Table:
    """Named snapshots, oldest first, and what only they hold."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("snapshot", overflow="fold")
    table.add_column("made", no_wrap=True)
    for name in ("rows", "live bytes", "only it holds"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in snapshots:
        sizes = (f"{one.rows:,}", size(one.live_bytes), size(one.only_bytes))
        table.add_row(escape(one.name), _when(one.time_s), *sizes)
    return table


def _ages(ages: tuple[AgeBand, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("segments by age: epochs", overflow="fold")
    for name in ("segments", "bytes", "live"):
        table.add_column(name, justify="right")
    table.add_column("")
    for band in ages:
        share = band.live_bytes / band.bytes
        filled = round(share * _BAR_CELLS)
        bar = "█" * filled + "░" * (_BAR_CELLS - filled)
        table.add_row(
            f"{band.first_epoch:,} to {band.last_epoch:,}", f"{band.segments:,}", size(band.bytes), f"{share:.0%}", bar
        )
    return table


def print_verification(report: VerifyReport, seconds: float, console: Console) -> None:
    """All of `tiered-emb store verify`: damages first, a line each, then what was read."""
    for damage in report.damages[:MAX_LINES]:
        _print(console, _place(damage))
    if report.damage_count > MAX_LINES:
        _print(console, f"... and {report.damage_count - MAX_LINES:,} more")
    unread = f", {counted(report.unread_segments, 'segment')} could not be read" if report.unread_segments else ""
    verdict = "good" if report.good else f"DAMAGED in {counted(report.damage_count, 'place')}"
    _print(
        console,
        f"{report.path}: {verdict}. Read {counted(report.rows, 'row')} ({report.live_rows:,} live) in "
        f"{counted(report.segments, 'segment')}, {size(report.bytes)} in {seconds:.1f} s{unread}",
    )


def _place(damage: Damage) -> str:
    """A damage in one line that begins with where it is."""
    if damage.table is not None:
        return f"table {damage.table} id {damage.id}: {damage.message}"
    where = damage.file if damage.segment is None else f"segment {damage.segment}"
    if damage.snapshot is not None:
        where = f"snapshot {damage.snapshot}"
    return f"{where}: {damage.message}"


def verification_json(report: VerifyReport) -> dict[str, Any]:
    """The report as plain JSON types, with at most 10,000 damages."""
    return {"good": report.good, **asdict(report)}


def print_compaction(before: StoreDescription, after: StoreDescription, console: Console) -> None:
    """What `tiered-emb store compact` has changed."""
    table = Table(title=escape(after.path), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    for name, sizes in (
        ("rows stored", [f"{one.stored_rows:,}" for one in (before, after)]),
        ("of them live", [f"{one.rows:,}" for one in (before, after)]),
        ("segments", [f"{one.segments:,}" for one in (before, after)]),
        ("bytes of segments", [size(one.segment_bytes) for one in (before, after)]),
        ("bytes on disk", [size(one.disk_bytes) for one in (before, after)]),
    ):
        table.add_row(name, *sizes)
    console.print(table)


def print_snapshots(described: StoreDescription, console: Console) -> None:
    """All of `tiered-emb store list`."""
    if described.snapshots:
        console.print(snapshot_table(described.snapshots))
    else:
        _print(console, f"{described.path}: no snapshots")
    for damage in described.damages[:MAX_LINES]:
        _print(console, f"DAMAGED: {damage.message}")


def count_changes(
    store: LmdbStore, changes: Iterable[Change], ids: bool
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, list[int]]]]:
    """How many rows of each table were put and how many deleted, and, if wanted, which."""
    names = {number: name for name, (number, _) in load_manifest(store.path).tables.items()}
    counts: dict[str, dict[str, int]] = {}
    named: dict[str, dict[str, list[int]]] = {}
    for change in changes:
        for number in np.unique(change.rows.tables).tolist():
            of, name = change.rows.tables == number, names.get(number, f"number {number}")
            for kind, which in (("put", of & ~change.deleted), ("deleted", of & change.deleted)):
                counts.setdefault(name, {"put": 0, "deleted": 0})[kind] += int(which.sum())
                if ids:
                    there = named.setdefault(name, {"put": [], "deleted": []})
                    there[kind] += change.rows.ids[which].tolist()
    return dict(sorted(counts.items())), dict(sorted(named.items()))


def print_changes(title: str, counts: Mapping[str, Mapping[str, int]], console: Console) -> None:
    """What `tiered-emb store diff` has counted."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("table", overflow="fold")
    for name in ("put", "deleted"):
        table.add_column(name, justify="right")
    for name, of in counts.items():
        table.add_row(escape(name), f"{of['put']:,}", f"{of['deleted']:,}")
    if counts:
        console.print(table)
    else:
        _print(console, f"{title}: no row differs")


def print_ids(named: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """Every row that differs, a line each, for other programs: table, id, what happened, with tabs in between."""
    for table, of in named.items():
        for kind, ids in of.items():
            for id in ids:
                print(table, id, kind, sep="\t")


def print_export(report: ExportReport, seconds: float, console: Console) -> None:
    """What `tiered-emb store export` has written, in a line."""
    since = "" if report.base is None else f" since {report.base!r}"
    _print(
        console,
        f"{report.path}: {report.kind} export of snapshot {report.snapshot!r}{since}, {_applied(report)} in "
        f"{size(report.file_bytes)}{_times(_share(report), 'the rows')}, {seconds:.1f} s",
    )


def print_import(path: str, report: ImportReport, seconds: float, console: Console) -> None:
    """What `tiered-emb store import` has brought, in a line."""
    _print(
        console,
        f"{path}: snapshot {report.snapshot!r} from the {report.kind} export {report.path}, {_applied(report)}, "
        f"{size(report.row_bytes)} in {seconds:.1f} s",
    )


def _applied(report: ExportReport | ImportReport) -> str:
    deleted = f" and {counted(report.deletions, 'deletion')}" if report.deletions else ""
    return counted(report.rows, "row") + deleted


def _share(report: ExportReport) -> float | None:
    return report.file_bytes / report.row_bytes if report.row_bytes else None


def _print(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)

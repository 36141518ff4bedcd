"""What `tiered-emb policies` prints: tables on stdout, progress on stderr."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tiered_emb.reference.words import counted, size
from tiered_emb.sim.laboratory import CSV_COLUMNS, Curves, Study

_BAR_CELLS = 20
_LOG_EVERY_S = 10.0
_EDGES, _GAP = 2, 2  # cells of a table beside those of its columns
_GIB, _MIB = 1 << 30, 1 << 20


@contextmanager
def replay_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each replay: a bar on a terminal, a line every ten seconds elsewhere."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_CELLS),
        MofNCompleteColumn(),
        TextColumn("replays"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=total)
    shown, done = time.perf_counter(), 0

    def advance() -> None:
        nonlocal shown, done
        done += 1
        bar.advance(task)
        if not console.is_terminal and time.perf_counter() - shown >= _LOG_EVERY_S:
            shown = time.perf_counter()
            console.print(f"{title}: {done:,} of {counted(total, 'replay')}", highlight=False, markup=False)

    with bar:
        yield advance


def print_study(study: Study, console: Console) -> None:
    """All tables of one trace."""
    console.print(f"[bold]{escape(study.trace)}[/bold]", highlight=False)
    console.print(
        f"{counted(study.requests, 'request')} of {counted(study.distinct, 'row')}, {study.how}", highlight=False
    )
    if study.kept < 1:
        note = f"a sample of {study.kept:.3g} of the rows: {study.kept:.3g} of a tier's rows are the sizes here"
        console.print(note, highlight=False)
    estimate = f"estimated from {study.question.rate:.3g} of the rows" if study.question.rate is not None else ""
    of = "" if study.question.exact else f", {estimate}"
    if study.has_budgets:
        _show(console, f"misses a request by budget{of}, and what the step to the next one saves", _budgets(study))
    else:
        _show_sizes(console, f"misses a request by rows in the tier{of}", *_ratios(study, study.curves))
        if study.control:
            _show_sizes(console, "hits in 100: by popularity (requests shuffled), and what recency adds", *_hits(study))
    if study.sampled:
        _show_sizes(console, f"misses a request, {estimate}", *_ratios(study, study.sampled, study.sampling_error))


def _show(console: Console, title: str, table: Table) -> None:
    console.print(f"\n{title}", highlight=False, markup=False)
    console.print(table)


def _show_sizes(console: Console, title: str, names: list[str], lines: list[list[str]]) -> None:
    """Tables of as many sizes each as the console has room for, so that no number is folded."""
    console.print(f"\n{title}", highlight=False, markup=False)
    widths = [max(_word(names[i]), *(len(line[i]) for line in lines)) + _GAP for i in range(len(names))]
    left = 1
    while left < len(names):
        right, cells = left + 1, _EDGES + widths[0] + widths[left]
        while right < len(names) and cells + widths[right] <= console.width:
            cells, right = cells + widths[right], right + 1
        table = _table(names[0], *names[left:right])
        for line in lines:
            table.add_row(line[0], *line[left:right])
        console.print(table)
        left = right


def _word(heading: str) -> int:
    """Cells of the longest word: a heading of several may take several lines."""
    return max(map(len, heading.split()))


def _table(*names: str) -> Table:
    """A table whose first column is text."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=" " not in name)
    return table


def _ratios(
    study: Study, curves: Curves, error: Callable[[str], float] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line for each policy: a cell for each size, and the time or the error."""
    lines = []
    for name, curve in curves.items():
        last = f"{curve.seconds:.2f}" if error is None else f"{error(name):.4f}"
        lines.append([name, *(f"{ratio:.4f}" for ratio in curve.miss_ratios), last])
    return ["policy", *_sizes(study), "s" if error is None else "mean error"], lines


def _hits(study: Study) -> tuple[list[str], list[list[str]]]:
    """Headings, and popularity and recency of every policy and size."""
    lines = []
    for name, curve in study.control.items():
        pairs = zip(curve.miss_ratios, study.recency(name), strict=True)
        lines.append([name, *(f"{100 - 100 * ratio:.1f} {100 * more:+.1f}" for ratio, more in pairs)])
    return ["policy", *_sizes(study)], lines


def _sizes(study: Study) -> list[str]:
    """Headings of the columns: budgets, which are other sizes for each policy, or rows."""
    if study.has_budgets:
        return [size(budget) for budget in study.question.budgets]
    return [f"{rows:,}" for rows in next(iter(study.curves.values())).sizes]


def _budgets(study: Study) -> Table:
    """A line for each policy and budget, with what the step to the next budget saves."""
    unit, unit_name = (_GIB, "GiB") if study.question.budgets[-1] >= _GIB else (_MIB, "MiB")
    control = ["shuffled"] if study.control else []
    table = _table("policy", "budget", "rows", "misses", *control, "saved", f"a {unit_name}", "of all")
    for policy, curve in study.curves.items():
        steps = study.gains(policy)
        for i, budget in enumerate(study.question.budgets):
            shuffled = [f"{study.control[policy].miss_ratios[i]:.4f}"] if study.control else []
            cells = [size(budget), f"{curve.sizes[i]:,}", f"{curve.miss_ratios[i]:.4f}", *shuffled]
            if i < len(steps):
                gain = steps[i]
                cells += [f"{gain.saved:,}", f"{gain.saved_per(unit):,.0f}", f"{gain.relative:.1%}"]
            table.add_row(policy if i == 0 else "", *cells, end_section=i == len(steps))
    return table


def write_csv(studies: Sequence[Study], file: str) -> None:
    """A line for each trace, policy and size."""
    with open(file, "w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, CSV_COLUMNS)
        writer.writeheader()
        for study in studies:
            writer.writerows(study.csv_lines())

"""What a measurement says: a table for people and a flat JSON object for machines."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

Figure = float | int | str | None | list["Figure"] | dict[str, "Figure"]


@dataclass
class Report:
    """The answer to one question.

    Attributes:
        title: one line above the table.
        columns: the table's headings; the first column is text, the others are numbers.
        lines: the table's lines.
        figures: what ``--json`` gives; null (None) for what could not be measured.
        notes: shown under the table: reasons for nulls, what a figure does not cover.
        failed: what was measured is not as it must be, so that the command ends with 1.
    """

    title: str
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: bool = False

    def show(self) -> None:
        """Print the table and the notes."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.columns):
            table.add_column(name, justify="left" if number == 0 else "right")
        for line in self.lines:
            table.add_row(*line)
        console = Console()
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)

    def shown(self, key: str, unit: str) -> str:
        """A figure in a line of the table: with its unit, "-" if it could not be measured, nothing if it was not."""
        figure = self.figures.get(key, "")
        if figure is None:
            return "-"
        return f"{figure:,} {unit}".strip() if figure != "" else ""

    def note_seconds(self) -> None:
        """Tell how long each phase took, from the figure of that name."""
        seconds = self.figures["phase_seconds"]
        assert isinstance(seconds, dict)
        self.notes.append("Seconds: " + ", ".join(f"{name} {one}" for name, one in seconds.items()))

    def write_json(self, target: str) -> None:
        """Write the figures and the machine to the file ``target``, or to stdout as one line if it is ``-``."""
        figures = {**self.figures, "machine": machine()}
        if target == "-":
            sys.stdout.flush()
            print(json.dumps(figures), flush=True)
        else:
            Path(target).write_text(json.dumps(figures, indent=2) + "\n")


def machine() -> dict[str, Figure]:
    """The processor and the versions that the figures belong to."""
    import numba
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

"""What a run found, as a table for people and as one JSON object for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_emb.errors import ConfigError
from tiered_emb.metrics import EngineStats, TierStats
from tiered_emb.reference.progress import hit_rate
from tiered_emb.reference.training import Evaluation
from tiered_emb.reference.words import counted, size

_TIER_NUMBERS = ("capacity_bytes", "bytes", "peak_bytes", "capacity_rows", "rows")
_TIER_COUNTS = ("hits", "misses", "evictions", "write_backs")


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        settings: what was run, option by option.
        evaluation: quality on the held-out part.
        stats: tiers and store after the last flush.
        samples: trained on, over all epochs.
        steps: batches trained on.
        seconds: of training alone; a first run also compiles its kernels in them.
        row_bytes: of one row as it rests, with its optimizer state.
        hashes: "losses_sha256" and "rows_sha256", the second where it was asked for.
        dense_check: the verdict of ``--check dense``, or None.
    """

    settings: Mapping[str, Any]
    evaluation: Evaluation
    stats: EngineStats
    samples: int
    steps: int
    seconds: float
    row_bytes: int
    hashes: Mapping[str, str] = field(default_factory=dict)
    dense_check: str | None = None

    @property
    def samples_per_s(self) -> float:
        """Samples trained on a second."""
        return self.samples / max(self.seconds, 1e-9)

    @property
    def distance_closed(self) -> float | None:
        """Share of the way from an AUC of 0.5 to the planted one; None where nothing was planted."""
        planted = self.evaluation.planted_auc
        return None if planted is None else (self.evaluation.auc - 0.5) / (planted - 0.5)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; a missing number is null."""
        found: dict[str, Any] = {
            "auc": _number(self.evaluation.auc),
            "log_loss": _number(self.evaluation.log_loss),
            "samples_per_s": round(self.samples_per_s, 1),
            "seconds": round(self.seconds, 3),
            "samples": self.samples,
            "steps": self.steps,
        }
        if self.evaluation.planted_auc is not None:
            found["planted_auc"] = _number(self.evaluation.planted_auc)
            found["distance_closed"] = _number(self.distance_closed)
        if self.dense_check is not None:
            found["dense_check"] = self.dense_check
        found.update(self.hashes)
        found["tiers"] = [_tier(tier) for tier in self.stats.tiers]
        found["store"] = {
            "rows": self.stats.store.rows,
            "row_bytes": self.row_bytes,
            "bytes_read": self.stats.store.bytes_read,
            "bytes_written": self.stats.store.bytes_written,
        }
        return found | {"settings": dict(self.settings)}


def check_target(target: str) -> None:
    """Raise ConfigError where :func:`write_json` could not write, before there is anything to lose."""
    path = Path(target)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        what = "is a directory" if path.is_dir() else f"is in {path.parent}, which is no directory to write in"
        raise ConfigError(f"--json {target} {what}; expected the name of a file, or - for standard output")


def write_json(report: Report, target: str) -> None:
    """To the file ``target``, replaced as a whole; links stay, and a device or a pipe is written to. Raises ConfigError
    where it cannot be written."""
    file, text = Path(os.path.realpath(target)), json.dumps(report.to_json(), indent=2) + "\n"
    whole = not file.exists() or file.is_file()
    part = Path(f"{file}.{os.getpid()}.tmp") if whole else file
    try:
        part.write_text(text, encoding="utf-8")
        if whole:
            part.replace(file)
    except OSError as error:
        if whole:
            part.unlink(missing_ok=True)
        raise ConfigError(f"--json {target} cannot be written: {error.strerror or error}") from error


def print_report(report: Report, console: Console) -> None:
    """Quality and speed, then a row a tier."""
    for line in _headlines(report):
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tier", no_wrap=True)
    for name in ("rows", "bytes", "peak", "budget", "hits", "evicted", "stored"):
        table.add_column(name, justify="right", no_wrap=True)
    for tier in report.stats.tiers:
        counts = (hit_rate(tier), f"{tier.evictions:,}", f"{tier.write_backs:,}")
        sizes = (size(tier.bytes), size(tier.peak_bytes), size(tier.capacity_bytes))
        table.add_row(tier.name, f"{tier.rows:,}", *sizes, *counts)
    store = report.stats.store
    table.add_row("store", f"{store.rows:,}", size(store.rows * report.row_bytes), *[""] * 5)
    console.print(table)
    console.print(f"store: {size(store.bytes_read)} read, {size(store.bytes_written)} written", highlight=False)


def _headlines(report: Report) -> list[str]:
    quality = report.evaluation
    lines = [f"AUC {quality.auc:.4f}, log loss {quality.log_loss:.4f} on the last tenth, held out"]
    if quality.planted_auc is not None:
        lines[0] += f"; best reachable AUC {quality.planted_auc:.4f}, {report.distance_closed:.0%} of the way from 0.5"
    lines.append(
        f"{counted(report.samples, 'sample')} in {counted(report.steps, 'step')} and {report.seconds:.1f} s: "
        f"{report.samples_per_s:,.0f} samples/s"
    )
    if report.dense_check is not None:
        lines.append(f"against whole tables in memory: {report.dense_check}")
    return lines


def _tier(tier: TierStats) -> dict[str, Any]:
    numbers = {name: getattr(tier, name) for name in (*_TIER_NUMBERS, *_TIER_COUNTS)}
    return {"name": tier.name, **numbers}


def _number(number: float | None) -> float | None:
    """JSON has no NaN."""
    return None if number is None or number != number else number

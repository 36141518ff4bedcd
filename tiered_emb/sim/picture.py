"""draw_studies: miss-ratio curves as a picture, a panel for each trace.

Needs matplotlib (`pip install 'tiered-emb[plots]'`), which is imported with this module. Belady's bound is the edge of
the grey area: no policy that admits what it misses gets there. Thin dotted lines are the same policies on the same
requests in random order: what lies between them and the full lines is what a policy owes to the order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from tiered_emb.errors import ConfigError
from tiered_emb.sim.curves import BELADY
from tiered_emb.sim.laboratory import Study

__all__ = ["check_picture", "draw_studies"]

_COLOURS = (
    "#1f6f8b", "#b5651d", "#8a3b5d", "#3f7d3f", "#6a5acd", "#c0392b", "#17a2a2", "#8c8c2a", "#d17fb0", "#4d4d4d",
    "#e0a030", "#2c4a9a",
)  # fmt: skip
_BOUND = "#9aa5ad"
_LOG_FROM = 30  # sizes that differ by more than this factor are drawn on a logarithmic axis


def check_picture(file: str | os.PathLike[str]) -> None:
    """Raises ConfigError for a file whose name ends with none of the formats there are."""
    ending = os.path.splitext(os.fspath(file))[1].lstrip(".").lower()
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if ending not in formats:
        raise ConfigError(f"{os.fspath(file)} ends with {ending!r}: pictures end with one of {', '.join(formats)}")


def draw_studies(studies: Sequence[Study], file: str | os.PathLike[str]) -> None:
    """Draw each study's curves to a file, in the format that its name ends with (png, svg, pdf, ...).

    Raises:
        ConfigError: there is no such format.
        OSError: the file could not be written.
    """
    check_picture(file)
    figure = Figure(figsize=(9, 4.6 * len(studies)), layout="constrained")
    for axes, study in zip(figure.subplots(len(studies), 1, squeeze=False)[:, 0], studies, strict=True):
        _draw(axes, study)
    figure.savefig(file, dpi=130)


def _draw(axes: Any, study: Study) -> None:
    title = f"{study.trace}: {study.requests:,} requests of {study.distinct:,} rows, {study.how}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    colours = iter(_COLOURS * (1 + len(study.curves) // len(_COLOURS)))
    for name, curve in study.curves.items():
        if name == BELADY:
            axes.fill_between(curve.sizes, curve.miss_ratios, color=_BOUND, alpha=0.18, linewidth=0)
            axes.plot(curve.sizes, curve.miss_ratios, color=_BOUND, linewidth=1.6, label="belady, the bound")
            continue
        colour = next(colours)
        axes.plot(curve.sizes, curve.miss_ratios, color=colour, linewidth=1.5, marker="o", markersize=3, label=name)
        if study.control:
            axes.plot(curve.sizes, study.control[name].miss_ratios, color=colour, linewidth=0.8, linestyle=":")
        if study.sampled:
            ratios = study.sampled[name].miss_ratios
            axes.plot(curve.sizes, ratios, color=colour, linewidth=0, marker="x", markersize=5)
    if study.control:
        axes.plot([], [], color="#555555", linewidth=0.8, linestyle=":", label="requests shuffled")
    if study.sampled:
        label = f"sampled, {study.question.rate:.3g} of the rows"
        axes.plot([], [], color="#555555", linewidth=0, marker="x", markersize=5, label=label)
    _finish(axes, [size for curve in study.curves.values() for size in curve.sizes])


def _finish(axes: Any, sizes: Sequence[int]) -> None:
    axes.set(xlabel="rows in the tier", ylabel="misses a request", ylim=(0, 1))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if max(sizes) > _LOG_FROM * min(sizes):
        axes.set_xscale("log")
    axes.grid(axis="y", color="#e6e9eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))

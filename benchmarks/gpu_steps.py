"""Training steps of `benchmarks.gpu`: all rows in HBM, and a table spread over HBM, DDR and SSD, prefetched or not.

All sides are given the same batches, of which none comes twice, and hold the same rows, each of them written before the
first clock. A turn is some steps of a loop and ends when the device is done with them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import Figure
from benchmarks.sides import LEARNING_RATE
from benchmarks.timing import ratio, take_turns
from benchmarks.workloads import ClickStream, Zipf
from tiered_emb import RowwiseAdagrad, TierConfig, TieredEmbeddingBag
from tiered_emb.pipeline import prefetch

EXPONENT = 1.05
ALL_HBM, TIERS, PREFETCHED = "all in HBM", "HBM + DDR + SSD", "HBM + DDR + SSD, prefetched"
_BLOCK_ROWS = 1 << 14
_HOST_BYTES = 256 << 20  # for what is no row: the store's index and buffers, directories
_BOOKKEEPING = 128  # bytes a row, rounded up


@dataclass(frozen=True)
class Steps:
    """What the sides have in common.

    Attributes:
        rows, dim: of the table.
        samples, features: N = samples * features ids a batch, one a bag.
        hbm_share, ddr_share: of the rows' bytes that HBM and DDR hold on the sides with all tiers.
        lookahead: batches that are prepared ahead.
        warm_up, steps, rounds: batches before the first clock, of a turn, and turns.
        directory: where the store of the rows is made, and removed.
    """

    rows: int
    dim: int
    samples: int
    features: int
    hbm_share: float
    ddr_share: float
    lookahead: int
    warm_up: int
    steps: int
    rounds: int
    directory: str | None

    @property
    def table_bytes(self) -> int:
        """Of all rows, each with its optimizer state, one float."""
        return self.rows * (4 * self.dim + 4)


def measure_steps(setting: Steps, device: torch.device) -> dict[str, Figure]:
    """Milliseconds a step of each side; how many times the step of all in HBM the others take; and what prefetching
    hides: the share of what the tiers add to a step that it takes away."""
    law = Zipf(setting.rows, EXPONENT)
    lookahead = {ALL_HBM: 0, TIERS: 0, PREFETCHED: setting.lookahead}
    with ExitStack() as stack:
        sides: dict[str, Callable[[], float]] = {}
        for name, ahead in lookahead.items():
            bag = stack.enter_context(_bag(setting, name, device))
            stream = ClickStream(law, setting.dim, setting.samples, setting.features)
            sides[name] = _turns(bag, stream, setting, ahead, device)
        seconds = take_turns(sides, setting.rounds)
    medians = {name: statistics.median(one) for name, one in seconds.items()}
    added = medians[TIERS] - medians[ALL_HBM]
    return {
        "step_ms": {name: round(one * 1000, 3) for name, one in medians.items()},
        "tiers_vs_hbm": round(ratio(seconds, TIERS, ALL_HBM), 3),
        "prefetched_vs_hbm": round(ratio(seconds, PREFETCHED, ALL_HBM), 3),
        "prefetch_hides": round((medians[TIERS] - medians[PREFETCHED]) / added, 3) if added > 0 else None,
    }


@contextmanager
def _bag(setting: Steps, side: str, device: torch.device) -> Iterator[TieredEmbeddingBag]:
    """The module of a side, all of its rows written."""
    host = _HOST_BYTES + setting.rows * _BOOKKEEPING
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=setting.directory) as directory:
        if side == ALL_HBM:
            tiers = TierConfig(hbm_bytes=setting.table_bytes + (1 << 16), ddr_bytes=host, store=None)
        else:
            hbm, ddr = (int(setting.table_bytes * share) for share in (setting.hbm_share, setting.ddr_share))
            tiers = TierConfig(hbm_bytes=hbm, ddr_bytes=ddr + host, store=Path(directory) / "rows")
        with TieredEmbeddingBag(
            setting.rows,
            setting.dim,
            mode="sum",
            name="clicks",
            tiers=tiers,
            optimizer=RowwiseAdagrad(lr=LEARNING_RATE),
            seed=0,
            device=device,
        ) as bag:
            for first in range(0, setting.rows, _BLOCK_ROWS):
                ids = torch.arange(first, min(setting.rows, first + _BLOCK_ROWS))
                bag.set_rows(ids, torch.randn(len(ids), setting.dim) * 0.01)
            yield bag


def _turns(
    bag: TieredEmbeddingBag, stream: ClickStream, setting: Steps, ahead: int, device: torch.device
) -> Callable[[], float]:
    """Turns of a side that has been warmed up; each gives the seconds of one step."""
    grad, done = stream.grad.to(device), 0

    def run(count: int) -> float:
        nonlocal done
        stream.make(done + count)
        batches = [stream.batch(step).unsqueeze(1) for step in range(done, done + count)]
        stream.forget(done)
        done += count
        begun = _now(device)
        with prefetch(batches, bag, lookahead=ahead) as loop:
            for batch in loop:
                bag(batch).backward(grad)
        return (_now(device) - begun) / count

    run(setting.warm_up)
    return lambda: run(setting.steps)


def _now(device: torch.device) -> float:
    """The time at which the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

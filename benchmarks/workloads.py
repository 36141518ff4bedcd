"""The id streams and gradients that questions are asked with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

HUGE_ROWS = 1 << 40
_ODD = 0x9E3779B97F4A7C15 & (HUGE_ROWS - 1)  # odd, so that multiplying by it permutes 0 .. 2^40 - 1


@dataclass(frozen=True)
class Workload:
    """Batches of single-id bags over one table, and the gradient of their outputs.

    Attributes:
        rows: of the table; ids are below it.
        dim: floats a row.
        batches: each (N,) int64 ids.
        offsets: (N + 1,) int64, every bag holds one id.
        grad: (N, dim) float32.
    """

    rows: int
    dim: int
    batches: list[torch.Tensor]
    offsets: torch.Tensor
    grad: torch.Tensor

    @property
    def ids_a_step(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def unique_share(self) -> float:
        """Mean share of a batch's ids that are different."""
        return float(np.mean([len(np.unique(ids.numpy())) / len(ids) for ids in self.batches]))

    def batch(self, step: int) -> torch.Tensor:
        """The ids of a step; they come round again."""
        return self.batches[step % len(self.batches)]


def click_batches(rows: int, dim: int, batches: int = 24, samples: int = 4096, features: int = 26) -> Workload:
    """Zipf 1.2 over ``rows`` ids, scattered over the table; one id a bag, as in a click log's columns."""
    random, n = np.random.default_rng(0), samples * features
    ids = [((random.zipf(1.2, n) % rows * 2654435761) % rows).astype(np.int64) for _ in range(batches)]
    grad = torch.from_numpy(random.standard_normal((n, dim), dtype=np.float32))
    return Workload(rows, dim, [torch.from_numpy(one) for one in ids], torch.arange(n + 1), grad)


def column_batches(rows: int, dim: int, features: int, batches: int = 24, samples: int = 4096) -> Workload:
    """As :func:`click_batches`, each column with ids of its own: column f has those of its part of the table."""
    random, part = np.random.default_rng(0), rows // features
    first = np.repeat(np.arange(features) * part, samples)
    drawn = [random.zipf(1.2, samples * features) % part * 2654435761 % part for _ in range(batches)]
    ids = [torch.from_numpy((first + one).astype(np.int64)) for one in drawn]
    grad = torch.from_numpy(random.standard_normal((samples * features, dim), dtype=np.float32))
    return Workload(part * features, dim, ids, torch.arange(samples * features + 1), grad)


def spread_over_huge(ids: torch.Tensor) -> torch.Tensor:
    """The ids below 2^40 moved by a bijection of 0 .. 2^40 - 1, so that neighbours lie far apart."""
    wide = ids.numpy().astype(np.uint64) * np.uint64(_ODD) & np.uint64(HUGE_ROWS - 1)
    return torch.from_numpy(wide.astype(np.int64))


class Zipf:
    """A finite Zipf law over the ids below ``rows``: rank k (from 1) is drawn in proportion to k^-exponent.

    Ranks are scattered over the ids by a permutation, so that popular rows are no neighbours.

    Attributes:
        rows, exponent: as above.
        ids: (rows,) int32, the id of each rank.
    """

    def __init__(self, rows: int, exponent: float, seed: int = 0) -> None:
        self.rows = rows
        self.exponent = exponent
        self.ids = np.random.default_rng(seed).permutation(np.arange(rows, dtype=np.int32))
        self._cumulated = np.cumsum(_powers(rows, exponent))
        self._cumulated /= self._cumulated[-1]

    def draw(self, random: np.random.Generator, count: int, from_rank: int = 0) -> NDArray[np.int64]:
        """``count`` ids in random order, of ranks from ``from_rank`` (the most popular one is 0)."""
        least = self._cumulated[from_rank - 1] if from_rank else 0.0
        drawn = np.sort(random.uniform(least, 1.0, count))  # sorted, the search stays in the processor's caches
        ranks = np.minimum(np.searchsorted(self._cumulated, drawn, side="right"), self.rows - 1)
        return random.permutation(self.ids[ranks]).astype(np.int64)


def exponent_of_skew(rows: int, top: float, share: float) -> float:
    """The exponent of the finite Zipf law whose ``top`` (a share) most popular rows take ``share`` of requests."""
    low, high = 0.0, 4.0
    for _ in range(24):
        middle = (low + high) / 2
        powers = _powers(rows, middle)
        low, high = (
            (middle, high) if powers[: max(1, round(rows * top))].sum() < share * powers.sum() else (low, middle)
        )
    return (low + high) / 2


def _powers(rows: int, exponent: float) -> NDArray[np.float64]:
    """(rows,) the weight of each rank."""
    powers: NDArray[np.float64] = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return powers


class ClickStream:
    """Batches without end, never the same twice: ``samples`` x ``features`` ids of a law, one id a bag.

    A batch is kept while it may be asked for, so that several sides can be given the same ones.

    Attributes:
        law: of the ids.
        offsets: (N + 1,) int64, every bag holds one id.
        grad: (N, dim) float32, of every batch's output.
    """

    def __init__(self, law: Zipf, dim: int, samples: int, features: int, seed: int = 1) -> None:
        self.law = law
        self._random = np.random.default_rng(seed)
        self.offsets = torch.arange(samples * features + 1)
        self.grad = torch.from_numpy(self._random.standard_normal((samples * features, dim), dtype=np.float32))
        self._batches: dict[int, torch.Tensor] = {}
        self._made = 0

    @property
    def ids_a_step(self) -> int:
        """N."""
        return len(self.offsets) - 1

    def make(self, end: int) -> None:
        """Have the batches of the steps before ``end``."""
        while self._made < end:
            self._batches[self._made] = torch.from_numpy(self.law.draw(self._random, self.ids_a_step))
            self._made += 1

    def forget(self, end: int) -> None:
        """Nobody will ask for the batches of the steps before ``end`` again."""
        for number in [number for number in self._batches if number < end]:
            del self._batches[number]

    def batch(self, step: int) -> torch.Tensor:
        """(N,) int64 ids of a step that has been made."""
        return self._batches[step]

    def batches_from(self, step: int) -> Iterator[torch.Tensor]:
        """The batches of this step and all that follow; a loader."""
        while True:
            self.make(step + 1)
            yield self.batch(step)
            step += 1

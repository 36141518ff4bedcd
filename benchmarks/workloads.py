"""The id streams and gradients that questions are asked with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

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


def spread_over_huge(ids: torch.Tensor) -> torch.Tensor:
    """The ids below 2^40 moved by a bijection of 0 .. 2^40 - 1, so that neighbours lie far apart."""
    wide = ids.numpy().astype(np.uint64) * np.uint64(_ODD) & np.uint64(HUGE_ROWS - 1)
    return torch.from_numpy(wide.astype(np.int64))

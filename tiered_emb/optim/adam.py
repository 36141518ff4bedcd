"""Adam for rows (Kingma, Ba: "Adam", ICLR 2015), lazy as torch.optim.SparseAdam: only rows of the batch decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tiered_emb.optim._moments import AdamRows, check_betas, corrections
from tiered_emb.optim._rule import check_numbers


@dataclass(frozen=True)
class Adam(AdamRows):
    """m += (g - m) * (1 - b1); v += (g * g - v) * (1 - b2); w -= m / (sqrt(v) + eps) * s, as torch.optim.SparseAdam.

    s = lr * sqrt(1 - b2**step) / (1 - b1**step), in float64, rounded once. `step` is the module's, not the row's.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf), eps=(0.0, math.inf))
        check_betas(self, self.betas)

    def _numbers(self, step: int) -> tuple[float, float, float]:
        mean, root = corrections(self.betas, step)
        return self.eps, self.lr * root / mean, 1.0

"""AdamW for rows (Loshchilov, Hutter: "Decoupled weight decay regularization", ICLR 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tiered_emb.optim._moments import AdamRows, check_betas, decoupled_numbers
from tiered_emb.optim._rule import check_numbers


@dataclass(frozen=True)
class AdamW(AdamRows):
    """w *= 1 - lr * decay; m, v as Adam's; w -= m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps) * lr.

    This is torch.optim.AdamW, which decays beside the gradient and not through it.
    Lazy: a row decays, and its averages move, in the steps that touch it. t is the module's step. The corrections are
    drawn together in float64 and rounded once, as m / (sqrt(v) + eps * c) * s.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    name: ClassVar[str] = "adamw"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf), eps=(0.0, math.inf), weight_decay=(0.0, math.inf))
        check_betas(self, self.betas)

    def _numbers(self, step: int) -> tuple[float, float, float]:
        return decoupled_numbers(self, step)

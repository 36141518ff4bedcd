"""Adam for rows (Kingma, Ba: "Adam", ICLR 2015), lazy as torch.optim.SparseAdam: only rows of the batch decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from storage.schema import Column
from tiered_emb.optim._moments import adam_cpu, adam_reference, check_betas, corrections
from tiered_emb.optim._rule import apply_on_device, check_numbers


@dataclass(frozen=True)
class Adam:
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

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """`exp_avg` and `exp_avg_sq`: running averages of each weight's gradient and of its square."""
        return Column("exp_avg", "float32", dim), Column("exp_avg_sq", "float32", dim)

    def state_width(self, dim: int) -> int:
        """2 D."""
        return 2 * dim

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """As `RowRule.apply`."""
        if weight.device.type == "cpu":
            adam_cpu(weight, state, slots, grads, self.betas, self._numbers(step))
        else:
            apply_on_device(self, weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        adam_reference(weight, state, slots, grads, self.betas, self._numbers(step))

    def _numbers(self, step: int) -> tuple[float, float, float]:
        mean, root = corrections(self.betas, step)
        return self.eps, self.lr * root / mean, 1.0

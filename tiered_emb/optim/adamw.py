"""AdamW for rows (Loshchilov, Hutter: "Decoupled weight decay regularization", ICLR 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from storage.schema import Column
from tiered_emb.optim._moments import adam_cpu, adam_reference, check_betas, corrections
from tiered_emb.optim._rule import apply_on_device, check_numbers


@dataclass(frozen=True)
class AdamW:
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
        return self.eps * root, self.lr * root / mean, 1 - self.lr * self.weight_decay

"""Adagrad (Duchi, Hazan, Singer: "Adaptive subgradient methods", JMLR 2011): a sum of squares for every weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit

from storage.schema import Column
from tiered_emb.intrinsics import prefetch_row
from tiered_emb.optim._rule import apply_on_device, check_numbers, rounded_sqrt

_AHEAD = 4  # rows between asking for a row and using it


@dataclass(frozen=True)
class Adagrad:
    """sum += g * g; w -= g / (sqrt(sum) + eps) * lr, as torch.optim.Adagrad without decay."""

    lr: float
    eps: float = 1e-10
    name: ClassVar[str] = "adagrad"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf), eps=(0.0, math.inf))

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """`sum`: of the squared gradients of each weight."""
        return (Column("sum", "float32", dim),)

    def state_width(self, dim: int) -> int:
        """D."""
        return dim

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """As `RowRule.apply`."""
        if weight.device.type == "cpu":
            lr, eps = np.float32(self.lr), np.float32(self.eps)
            _apply(weight.numpy(), state.numpy(), slots.numpy(), grads.numpy(), lr, eps)
        else:
            apply_on_device(self, weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows = slots.long()
        sums = state[rows] + grads * grads
        state[rows] = sums
        weight[rows] = weight[rows] - grads / (rounded_sqrt(sums) + self.eps) * self.lr


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(weight: Any, state: Any, slots: Any, grads: Any, lr: Any, eps: Any) -> None:
    dim = weight.shape[1]
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
            prefetch_row(state, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            state[row, d] += grads[n, d] * grads[n, d]
        for d in range(dim):
            weight[row, d] -= grads[n, d] / (np.sqrt(state[row, d]) + eps) * lr

"""Row-wise Adagrad: one sum of mean squares a row, the usual optimizer of large embedding tables.

As FBGEMM's EXACT_ROWWISE_ADAGRAD: Adagrad with the mean of a row's squared gradients in place of each weight's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit

from storage.schema import Column
from tiered_emb.intrinsics import prefetch_row
from tiered_emb.kernels._lanes import lane_dot, lane_sum
from tiered_emb.optim._rule import apply_on_device, check_numbers, rounded_sqrt

_AHEAD = 4  # rows between asking for a row and using it


@dataclass(frozen=True)
class RowwiseAdagrad:
    """sum += mean(g * g); w -= g * (lr / (sqrt(sum) + eps)).

    The squares are added in lane order (`kernels._lanes`).
    """

    lr: float
    eps: float = 1e-8
    name: ClassVar[str] = "rowwise_adagrad"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf), eps=(0.0, math.inf))

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """`row_sum`: of the mean squared gradients of the row."""
        return (Column("row_sum", "float32", 1),)

    def state_width(self, dim: int) -> int:
        """1."""
        return 1

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
        columns = grads.new_full((len(grads),), grads.shape[1])  # a scalar divisor is made a factor on some devices
        sums = state[rows, 0] + lane_sum(grads * grads) / columns
        state[rows, 0] = sums
        scale = torch.full_like(sums, self.lr) / (rounded_sqrt(sums) + self.eps)
        weight[rows] = weight[rows] - grads * scale[:, None]


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(weight: Any, state: Any, slots: Any, grads: Any, lr: Any, eps: Any) -> None:
    dim = weight.shape[1]
    columns = np.float32(dim)
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
            prefetch_row(state, slots[n + _AHEAD])
        row = slots[n]
        state[row, 0] += lane_dot(grads, n, grads, n) / columns
        scale = lr / (np.sqrt(state[row, 0]) + eps)
        for d in range(dim):
            weight[row, d] -= grads[n, d] * scale

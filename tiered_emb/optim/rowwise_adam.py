"""Row-wise Adam: Adam with one average of mean squares a row in place of one for each weight.

As FBGEMM's PARTIAL_ROWWISE_ADAM: little more than half of Adam's state.
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
from tiered_emb.optim._moments import averaged, check_betas, decoupled_numbers, shares
from tiered_emb.optim._rule import apply_on_device, check_numbers, rounded_sqrt

_AHEAD = 4  # rows between asking for a row and using it


@dataclass(frozen=True)
class RowwiseAdam:
    """m += (g - m) * (1 - b1); v += (mean(g * g) - v) * (1 - b2); w = w * (1 - lr * decay) - m * (s / (sqrt(v) + e)).

    s and e are lr and eps with the corrections of both averages, in float64, rounded once. Decay and averages are
    lazy: they move in the steps that touch the row. The squares are added in lane order (`kernels._lanes`).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    name: ClassVar[str] = "rowwise_adam"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf), eps=(0.0, math.inf), weight_decay=(0.0, math.inf))
        check_betas(self, self.betas)

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """`exp_avg` of each weight's gradient, and `row_exp_avg_sq` of the row's mean square."""
        return Column("exp_avg", "float32", dim), Column("row_exp_avg_sq", "float32", 1)

    def state_width(self, dim: int) -> int:
        """D + 1."""
        return dim + 1

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """As `RowRule.apply`."""
        if weight.device.type == "cpu":
            numbers = (np.float32(number) for number in (*shares(self.betas), *self._numbers(step)))
            _apply(weight.numpy(), state.numpy(), slots.numpy(), grads.numpy(), *numbers)
        else:
            apply_on_device(self, weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows, dim = slots.long(), weight.shape[1]
        (share_1, share_2), (eps, size, keep) = shares(self.betas), self._numbers(step)
        columns = grads.new_full((len(grads),), dim)  # a scalar divisor is made a factor on some devices
        mean = averaged(state[rows, :dim], grads, share_1)
        square = averaged(state[rows, dim], lane_sum(grads * grads) / columns, share_2)
        state[rows] = torch.cat([mean, square[:, None]], 1)
        scale = torch.full_like(square, size) / (rounded_sqrt(square) + eps)
        weight[rows] = weight[rows] * keep - mean * scale[:, None]

    def _numbers(self, step: int) -> tuple[float, float, float]:
        return decoupled_numbers(self, step)


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(
    weight: Any, state: Any, slots: Any, grads: Any, share_1: Any, share_2: Any, eps: Any, size: Any, keep: Any
) -> None:
    dim = weight.shape[1]
    columns = np.float32(dim)
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
            prefetch_row(state, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            state[row, d] += (grads[n, d] - state[row, d]) * share_1
        state[row, dim] += (lane_dot(grads, n, grads, n) / columns - state[row, dim]) * share_2
        scale = size / (np.sqrt(state[row, dim]) + eps)
        for d in range(dim):
            weight[row, d] = weight[row, d] * keep - state[row, d] * scale

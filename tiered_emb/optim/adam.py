"""Adam for rows (Kingma, Ba: "Adam", ICLR 2015), lazy as torch.optim.SparseAdam: only rows of the batch decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit

from storage.schema import Column
from tiered_emb.errors import ConfigError
from tiered_emb.intrinsics import prefetch_row
from tiered_emb.optim._rule import check_numbers, rounded_sqrt

_AHEAD = 4  # rows between asking for a row and using it


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
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"Adam: betas are {self.betas}, but must be two numbers of at least 0 and less than 1")

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
            numbers = (np.float32(number) for number in (*self._shares(), self.eps, self._step_size(step)))
            _apply(weight.numpy(), state.numpy(), slots.numpy(), grads.numpy(), *numbers)
        else:
            self.reference(weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows, dim = slots.long(), weight.shape[1]
        share_1, share_2 = self._shares()
        mean, square = state[rows, :dim], state[rows, dim:]
        mean = mean + (grads - mean) * share_1
        square = square + (grads * grads - square) * share_2
        state[rows] = torch.cat([mean, square], 1)
        weight[rows] = weight[rows] - mean / (rounded_sqrt(square) + self.eps) * self._step_size(step)

    def _shares(self) -> tuple[float, float]:
        """What a new gradient counts for in the two averages."""
        return 1 - self.betas[0], 1 - self.betas[1]

    def _step_size(self, step: int) -> float:
        assert step >= 1, step
        return self.lr * math.sqrt(1 - self.betas[1] ** step) / (1 - self.betas[0] ** step)


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(
    weight: Any, state: Any, slots: Any, grads: Any, share_1: Any, share_2: Any, eps: Any, step_size: Any
) -> None:
    dim = weight.shape[1]
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
            prefetch_row(state, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            state[row, d] += (grads[n, d] - state[row, d]) * share_1
        for d in range(dim):
            state[row, dim + d] += (grads[n, d] * grads[n, d] - state[row, dim + d]) * share_2
        for d in range(dim):
            weight[row, d] -= state[row, d] / (np.sqrt(state[row, dim + d]) + eps) * step_size

"""Stochastic gradient descent, with momentum (Polyak 1964, Nesterov 1983) and weight decay where they are asked for."""

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
from tiered_emb.optim._rule import apply_on_device, check_numbers

_AHEAD = 4  # rows between asking for a row and using it


@dataclass(frozen=True)
class SGD:
    """g += w * decay; m = m * momentum + g; w -= m * lr, as torch.optim.SGD (which rounds once less).

    With `nesterov`, w -= (m * momentum + g) * lr. Momentum and decay are lazy: a row coasts and decays in the steps
    that touch it. Without momentum there is no state.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf), momentum=(0.0, 1.0), weight_decay=(0.0, math.inf))
        if self.nesterov and self.momentum == 0:
            raise ConfigError("SGD: nesterov=True needs a momentum above 0")

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """`momentum_buffer`: of each weight; none without momentum."""
        return (Column("momentum_buffer", "float32", dim),) if self.momentum else ()

    def state_width(self, dim: int) -> int:
        """D; 0 without momentum."""
        return dim if self.momentum else 0

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """As `RowRule.apply`."""
        if weight.device.type != "cpu":
            apply_on_device(self, weight, state, slots, grads, step)
        elif self.momentum or self.weight_decay:
            numbers = (np.float32(number) for number in (self.lr, self.momentum, self.weight_decay))
            arrays = weight.numpy(), state.numpy(), slots.numpy(), grads.numpy()
            _apply_momentum(*arrays, *numbers, self.nesterov)
        else:
            _apply(weight.numpy(), slots.numpy(), grads.numpy(), np.float32(self.lr))

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows = slots.long()
        if self.weight_decay:
            grads = grads + weight[rows] * self.weight_decay
        change = grads
        if self.momentum:
            change = state[rows] * self.momentum + grads
            state[rows] = change
            if self.nesterov:
                change = change * self.momentum + grads
        weight[rows] = weight[rows] - change * self.lr


@njit(nogil=True, cache=True)
def _apply(weight: Any, slots: Any, grads: Any, lr: Any) -> None:
    dim = weight.shape[1]
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            weight[row, d] -= grads[n, d] * lr


@njit(nogil=True, cache=True)
def _apply_momentum(
    weight: Any, state: Any, slots: Any, grads: Any, lr: Any, momentum: Any, decay: Any, nesterov: Any
) -> None:
    dim, kept = weight.shape[1], state.shape[1] > 0
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
            prefetch_row(state, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            change = grad = grads[n, d] + weight[row, d] * decay if decay else grads[n, d]
            if kept:
                change = state[row, d] * momentum + grad
                state[row, d] = change
                if nesterov:
                    change = change * momentum + grad
            weight[row, d] -= change * lr

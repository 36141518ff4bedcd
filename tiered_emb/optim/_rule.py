"""RowRule: how the summed gradient of a row changes the row.

A rule's optimizer state lies beside the row's weights, moves through the tiers with them and starts from zero.
`apply` is written twice in each rule's file: in torch ops (any device, the definition) and in Numba (CPU). For a GPU it
may stand in `tiered_emb.optim._gpu` a third time, in Triton. All do the same float32 operations in the same order, one
rounding each, so they agree to the bit.

A new rule is one file with one frozen dataclass, one line in `RULES` (`tiered_emb.optim`) and one in
`tests/tiered_emb/optim/test_rules.py`.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from storage.schema import Column
from tiered_emb.errors import ConfigError
from tiered_emb.kernels import has_triton


class RowRule(Protocol):
    """What a table group needs of an optimizer. Rules are values: frozen, hashable, compared by their numbers."""

    @property
    def name(self) -> str:
        """The rule's name in `RULES`, on the command line and in messages."""

    @property
    def lr(self) -> float:
        """Learning rate."""

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """Columns of state of a row of `dim` weights, in the order in which they lie in `state`."""

    def state_width(self, dim: int) -> int:
        """K: numbers of state of a row of `dim` weights; the widths of `state_columns` added up."""

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """Change rows `slots` of weight (S, D) and state (S, K) by their summed gradients grads (n, D).

        slots int32 (n,), distinct; float32 elsewhere, C-contiguous, all on one device; grads is left as it was. `step`
        counts the module's updates from 1, this one included. Rows not in `slots` are not touched.
        """


def apply_on_device(
    rule: Any, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
) -> None:
    """`RowRule.apply` off the host: on a GPU by the rule's Triton kernel, if it has one, else by its `reference`."""
    if runs_in_triton(rule, weight.device):
        from tiered_emb.optim._gpu import LAUNCHES

        LAUNCHES[rule.name](rule, weight, state, slots, grads, step)
    else:
        rule.reference(weight, state, slots, grads, step)


def runs_in_triton(rule: RowRule, device: torch.device) -> bool:
    """Whether a rule has a Triton kernel that runs it on this device; `apply` takes negative slots then, as no rows."""
    if device.type != "cuda" or not has_triton():
        return False
    from tiered_emb.optim._gpu import LAUNCHES

    return rule.name in LAUNCHES


def check_numbers(rule: object, **limits: tuple[float, float]) -> None:
    """Raise ConfigError unless each named number of the rule is finite, >= its lower and < its upper limit."""
    for name, (low, high) in limits.items():
        number = getattr(rule, name)
        if not (math.isfinite(number) and low <= number < high):
            raise ConfigError(
                f"{type(rule).__name__}: {name} is {number}, but must be at least {low} and less than {high}"
            )


def rounded_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Square root of float32 rounded as IEEE 754 says; torch's own on the CPU is a last bit off for some numbers.

    The root of a float32 keeps so far from the midpoints between float32 numbers that rounding it twice does no harm.
    """
    return x.double().sqrt().float()

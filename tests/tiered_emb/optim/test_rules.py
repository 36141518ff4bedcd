"""Every row rule: Numba against torch (bits), against independent float64 formulas and torch.optim (tolerance)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tiered_emb.errors import ConfigError
from tiered_emb.optim import RULES, SGD, Adagrad, Adam, RowRule, RowwiseAdagrad

Array = npt.NDArray[np.float64]
Step = Callable[[Array, Array, Array, int], None]


def sgd64(w: Array, s: Array, g: Array, step: int) -> None:
    w -= 0.1 * g


def adagrad64(w: Array, s: Array, g: Array, step: int) -> None:
    s += g**2
    w -= 0.1 * g / (np.sqrt(s) + 1e-10)


def rowwise_adagrad64(w: Array, s: Array, g: Array, step: int) -> None:
    s += (g**2).mean(1, keepdims=True)
    w -= 0.1 * g / (np.sqrt(s) + 1e-8)


def adam64(w: Array, s: Array, g: Array, step: int) -> None:
    m, v = s[:, : w.shape[1]], s[:, w.shape[1] :]
    m[:] = 0.9 * m + 0.1 * g
    v[:] = 0.999 * v + 0.001 * g**2
    corrected_m, corrected_v = m / (1 - 0.9**step), v / (1 - 0.999**step)
    # SparseAdam adds eps before it corrects the bias
    w -= 0.1 * corrected_m / (np.sqrt(corrected_v) + 1e-8 / math.sqrt(1 - 0.999**step))


CASES: list[tuple[RowRule, Step]] = [
    (SGD(0.1), sgd64),
    (Adagrad(0.1), adagrad64),
    (RowwiseAdagrad(0.1), rowwise_adagrad64),
    (Adam(0.1), adam64),
]
RULE = pytest.mark.parametrize(("rule", "step64"), CASES, ids=[rule.name for rule, _ in CASES])
SLOTS = 400


class Slab:
    """Random weights and states of a rule that has run for some steps."""

    def __init__(self, rule: RowRule, dim: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.weight = torch.from_numpy(rng.standard_normal((SLOTS, dim)).astype(np.float32))
        self.state = torch.from_numpy(rng.random((SLOTS, rule.state_width(dim))).astype(np.float32))

    def slots(self, n: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.permutation(SLOTS)[:n].astype(np.int32))

    def grads(self, n: int) -> torch.Tensor:
        dim = self.weight.shape[1]
        sizes = 10.0 ** self.rng.integers(-12, 6, (n, 1))
        grads = self.rng.standard_normal((n, dim)) * sizes * (self.rng.random((n, dim)) < 0.8)
        return torch.from_numpy(grads.astype(np.float32))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule, _ in CASES} == set(RULES)
    assert all(type(rule) is RULES[rule.name] for rule, _ in CASES)


@RULE
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 64, 1000])
@pytest.mark.parametrize("n", [0, 1, 5, 300])
def test_twins(rule: Any, step64: Step, n: int, dim: int) -> None:
    fast, plain, draw = Slab(rule, dim), Slab(rule, dim), Slab(rule, dim, seed=1)
    for step in (1, 2, 1000):
        slots, grads = draw.slots(n), draw.grads(n)
        before = bits(grads)
        rule.apply(fast.weight, fast.state, slots, grads, step)
        rule.reference(plain.weight, plain.state, slots, grads, step)
        assert bits(grads) == before
        assert bits(fast.weight) == bits(plain.weight)
        assert bits(fast.state) == bits(plain.state)


@RULE
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_float64(rule: RowRule, step64: Step, dim: int) -> None:
    slab = Slab(rule, dim)
    slab.state.zero_()
    weight, state = slab.weight.double().numpy(), slab.state.double().numpy()
    for step in range(1, 21):
        slots, grads = slab.slots(50), torch.from_numpy(slab.rng.standard_normal((50, dim)).astype(np.float32))
        rule.apply(slab.weight, slab.state, slots, grads, step)
        w, s = weight[slots], state[slots]
        step64(w, s, grads.double().numpy(), step)
        weight[slots], state[slots] = w, s
    np.testing.assert_allclose(slab.weight.numpy(), weight, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slab.state.numpy(), state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (SGD(0.1), lambda weight: torch.optim.SGD([weight], lr=0.1)),
        (Adagrad(0.1), lambda weight: torch.optim.Adagrad([weight], lr=0.1)),
        (Adam(0.1), lambda weight: torch.optim.SparseAdam([weight], lr=0.1)),
        (Adam(0.01, (0.5, 0.9), 1e-3), lambda w: torch.optim.SparseAdam([w], lr=0.01, betas=(0.5, 0.9), eps=1e-3)),
    ],
)
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_torch_optim(rule: RowRule, make: Callable[[torch.Tensor], torch.optim.Optimizer], dim: int) -> None:
    slab = Slab(rule, dim)
    slab.state.zero_()
    weight = slab.weight.clone().requires_grad_()
    optimizer = make(weight)
    for step in range(1, 21):
        slots, grads = slab.slots(50), torch.from_numpy(slab.rng.standard_normal((50, dim)).astype(np.float32))
        rule.apply(slab.weight, slab.state, slots, grads, step)
        with torch.sparse.check_sparse_tensor_invariants():
            weight.grad = torch.sparse_coo_tensor(slots.long()[None], grads, weight.shape)
            optimizer.step()
    torch.testing.assert_close(slab.weight, weight.detach(), rtol=1e-5, atol=1e-5)


@RULE
def test_only_the_named_rows_change_and_chunks_do_not_matter(rule: RowRule, step64: Step) -> None:
    whole, chunks, before = Slab(rule, 16), Slab(rule, 16), Slab(rule, 16)
    slots, grads = before.slots(200), torch.ones(200, 16)
    rule.apply(whole.weight, whole.state, slots, grads, 1)
    for first in range(0, 200, 30):
        rule.apply(chunks.weight, chunks.state, slots[first : first + 30], grads[first : first + 30], 1)
    assert bits(whole.weight) == bits(chunks.weight)
    assert bits(whole.state) == bits(chunks.state)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots.long()] = False
    assert bits(whole.weight[others]) == bits(before.weight[others])
    assert bits(whole.state[others]) == bits(before.state[others])
    assert not (whole.weight[~others] == before.weight[~others]).any()


@RULE
def test_two_gradients_of_one_row_fall_together(rule: RowRule, step64: Step) -> None:
    """Case 8: ids [7, 7, 9] with gradients g1, g2, g3: row 7 moves by the sum, once."""
    slab = Slab(rule, 2)
    expected_w, expected_s = slab.weight.double().numpy()[[7, 9]], slab.state.double().numpy()[[7, 9]]
    summed = torch.tensor([[1.0 + 2.0, 3.0], [5.0, -6.0]])
    rule.apply(slab.weight, slab.state, torch.tensor([7, 9], dtype=torch.int32), summed, 1)
    step64(expected_w, expected_s, summed.double().numpy(), 1)
    np.testing.assert_allclose(slab.weight.numpy()[[7, 9]], expected_w, rtol=1e-5)


@RULE
def test_a_rule_is_a_value(rule: RowRule, step64: Step) -> None:
    assert rule == type(rule)(lr=0.1)  # type: ignore[call-arg]
    assert hash(rule) == hash(type(rule)(lr=0.1))  # type: ignore[call-arg]
    for dim in (1, 5):
        columns = rule.state_columns(dim)
        assert sum(column.width for column in columns) == rule.state_width(dim)
        assert all(column.dtype == "float32" for column in columns)
        assert len({column.name for column in columns} | {"weight"}) == len(columns) + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), "SGD: lr is -0.1"),
        (lambda: SGD(math.nan), "SGD: lr is nan"),
        (lambda: Adagrad(0.1, eps=-1), "Adagrad: eps is -1"),
        (lambda: RowwiseAdagrad(math.inf), "RowwiseAdagrad: lr is inf"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), r"Adam: betas are \(0.9, 1.0\)"),
    ],
)
def test_numbers_that_make_no_sense(make: Callable[[], RowRule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()

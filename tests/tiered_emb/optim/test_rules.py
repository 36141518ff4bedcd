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
from tiered_emb.optim import FTRL, LAMB, RULES, SGD, Adagrad, Adam, AdamW, RowRule, RowwiseAdagrad, RowwiseAdam

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


def momentum64(w: Array, s: Array, g: Array, step: int) -> None:
    g = g + 0.01 * w
    s[:] = 0.9 * s + g
    w -= 0.1 * s


def nesterov64(w: Array, s: Array, g: Array, step: int) -> None:
    s[:] = 0.9 * s + g
    w -= 0.1 * (g + 0.9 * s)


def decay64(w: Array, s: Array, g: Array, step: int) -> None:
    w -= 0.1 * (g + 0.01 * w)


def corrected_averages(s: Array, g: Array, g2: Array, step: int) -> tuple[Array, Array]:
    """Moves the averages, and divides both by what they lack."""
    m, v = s[:, : g.shape[1]], s[:, g.shape[1] :]
    m[:] = 0.9 * m + 0.1 * g
    v[:] = 0.999 * v + 0.001 * g2
    return m / (1 - 0.9**step), v / (1 - 0.999**step)


def adamw64(w: Array, s: Array, g: Array, step: int) -> None:
    m, v = corrected_averages(s, g, g**2, step)
    w -= 0.1 * (m / (np.sqrt(v) + 1e-8) + 0.01 * w)


def rowwise_adam64(w: Array, s: Array, g: Array, step: int) -> None:
    m, v = corrected_averages(s, g, (g**2).mean(1, keepdims=True), step)
    w -= 0.1 * m / (np.sqrt(v) + 1e-8)


def decaying_rowwise_adam64(w: Array, s: Array, g: Array, step: int) -> None:
    w *= 1 - 0.1 * 0.02
    rowwise_adam64(w, s, g, step)


def lamb64(w: Array, s: Array, g: Array, step: int, decay: float = 0) -> None:
    m, v = corrected_averages(s, g, g**2, step)
    u = m / (np.sqrt(v) + 1e-6) + decay * w
    of_w, of_u = (np.linalg.norm(x, axis=1, keepdims=True) for x in (w, u))
    w -= 0.1 * u * np.where((of_w > 0) & (of_u > 0), of_w / np.where(of_u > 0, of_u, 1), 1)


def decaying_lamb64(w: Array, s: Array, g: Array, step: int) -> None:
    lamb64(w, s, g, step, 0.02)


def ftrl64(w: Array, s: Array, g: Array, step: int, l1: float = 0, l2: float = 0) -> None:
    z, n = s[:, : w.shape[1]], s[:, w.shape[1] :]
    z += g - (np.sqrt(n + g**2) - np.sqrt(n)) / 0.1 * w
    n += g**2
    w[:] = np.where(np.abs(z) > l1, -(z - np.sign(z) * l1) / ((1 + np.sqrt(n)) / 0.1 + l2), 0)


def sparse_ftrl64(w: Array, s: Array, g: Array, step: int) -> None:
    ftrl64(w, s, g, step, 0.5, 0.25)


CASES: list[tuple[RowRule, Step]] = [
    (SGD(0.1), sgd64),
    (Adagrad(0.1), adagrad64),
    (RowwiseAdagrad(0.1), rowwise_adagrad64),
    (Adam(0.1), adam64),
    (RowwiseAdam(0.1), rowwise_adam64),
    (AdamW(0.1), adamw64),
    (LAMB(0.1), lamb64),
    (FTRL(0.1), ftrl64),
]
OPTIONS: list[tuple[RowRule, Step]] = [
    (SGD(0.1, momentum=0.9, weight_decay=0.01), momentum64),
    (SGD(0.1, momentum=0.9, nesterov=True), nesterov64),
    (SGD(0.1, weight_decay=0.01), decay64),
    (RowwiseAdam(0.1, weight_decay=0.02), decaying_rowwise_adam64),
    (LAMB(0.1, weight_decay=0.02), decaying_lamb64),
    (FTRL(0.1, l1=0.5, l2=0.25), sparse_ftrl64),
]
RULE = pytest.mark.parametrize(("rule", "step64"), CASES, ids=[rule.name for rule, _ in CASES])
WITH_OPTIONS = pytest.mark.parametrize(
    ("rule", "step64"), CASES + OPTIONS, ids=[repr(one) for one, _ in CASES + OPTIONS]
)
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


@WITH_OPTIONS
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


@WITH_OPTIONS
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
        (SGD(0.1, 0.9, 0.01), lambda w: torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01)),
        (SGD(0.1, 0.9, nesterov=True), lambda w: torch.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=True)),
        (AdamW(0.1), lambda weight: torch.optim.AdamW([weight], lr=0.1)),
        (AdamW(0.1, (0.5, 0.9), 1e-3, 0.1), lambda w: torch.optim.AdamW([w], 0.1, (0.5, 0.9), 1e-3, 0.1)),
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
    sparse = rule in (SGD(0.1), Adagrad(0.1)) or isinstance(rule, Adam)
    for step in range(1, 21):
        # rules that torch has for dense gradients only move all rows in every step
        slots = slab.slots(50 if sparse else SLOTS)
        grads = torch.from_numpy(slab.rng.standard_normal((len(slots), dim)).astype(np.float32))
        rule.apply(slab.weight, slab.state, slots, grads, step)
        with torch.sparse.check_sparse_tensor_invariants():
            gradient = torch.sparse_coo_tensor(slots.long()[None], grads, weight.shape)
            weight.grad = gradient if sparse else gradient.to_dense()
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
        (lambda: AdamW(0.1, betas=(-0.1, 0.9)), r"AdamW: betas are \(-0.1, 0.9\)"),
        (lambda: AdamW(0.1, weight_decay=-1), "AdamW: weight_decay is -1"),
        (lambda: SGD(0.1, momentum=1), "SGD: momentum is 1"),
        (lambda: SGD(0.1, nesterov=True), "SGD: nesterov=True needs a momentum"),
        (lambda: LAMB(0.1, weight_decay=math.nan), "LAMB: weight_decay is nan"),
        (lambda: RowwiseAdam(0.1, eps=-1), "RowwiseAdam: eps is -1"),
        (lambda: FTRL(0.0), "FTRL: lr is 0"),
        (lambda: FTRL(0.1, l1=-1), "FTRL: l1 is -1"),
    ],
)
def test_numbers_that_make_no_sense(make: Callable[[], RowRule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()

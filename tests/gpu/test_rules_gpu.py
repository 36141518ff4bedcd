"""Every row rule in Triton and by its reference on the same rows, bit by bit; see `conftest` for where."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiered_emb.optim import FTRL, LAMB, RULES, SGD, Adagrad, Adam, AdamW, RowRule, RowwiseAdagrad, RowwiseAdam
from tiered_emb.optim._rule import apply_on_device

pytest.importorskip("triton")
from tiered_emb.optim import _gpu

# The interpreter computes what is masked, with numpy, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLOTS = 50
CASES: list[RowRule] = [
    SGD(0.1),
    SGD(0.1, momentum=0.9, weight_decay=0.01),
    SGD(0.1, momentum=0.9, nesterov=True),
    SGD(0.1, weight_decay=0.01),
    Adagrad(0.1),
    RowwiseAdagrad(0.1),
    Adam(0.1),
    AdamW(0.1),
    RowwiseAdam(0.1),
    RowwiseAdam(0.1, weight_decay=0.02),
    LAMB(0.1),
    LAMB(0.1, weight_decay=0.02),
    FTRL(0.1),
    FTRL(0.1, l1=0.5, l2=0.25),
]


def slab(rule: RowRule, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and states, some of both zero or not normal."""
    rng = np.random.default_rng(dim)
    weight = rng.standard_normal((SLOTS, dim)).astype(np.float32)
    state = rng.random((SLOTS, rule.state_width(dim))).astype(np.float32)
    for array in (weight, state):
        array[rng.random(array.shape) < 0.1] = 0
        array[rng.random(array.shape) < 0.05] = 3e-42
        array[7:9] = 0
    return torch.from_numpy(weight), torch.from_numpy(state)


def grads_of(n: int, dim: int) -> torch.Tensor:
    """Of very different sizes, rows of zeros among them."""
    rng = np.random.default_rng(n)
    sizes = 10.0 ** rng.integers(-30, 6, (n, 1)) * (rng.random((n, 1)) < 0.9)
    return torch.from_numpy((rng.standard_normal((n, dim)) * sizes).astype(np.float32))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


@pytest.mark.parametrize("dim", [1, 3, 8, 33, 64, 200])
@pytest.mark.parametrize("rule", CASES, ids=repr)
def test_twins(rule: RowRule, dim: int, device: torch.device) -> None:
    weight, state = (one.to(device) for one in slab(rule, dim))
    expected_weight, expected_state = weight.clone(), state.clone()
    for step in (1, 1000):
        slots = torch.from_numpy(np.random.default_rng(step).permutation(SLOTS)[:40].astype(np.int32)).to(device)
        grads = grads_of(40, dim).to(device)
        _gpu.LAUNCHES[rule.name](rule, weight, state, slots, grads, step)
        rule.reference(expected_weight, expected_state, slots, grads, step)  # type: ignore[attr-defined]
    assert bits(weight) == bits(expected_weight)
    assert bits(state) == bits(expected_state)


def test_every_rule_has_a_kernel() -> None:
    assert set(_gpu.LAUNCHES) == set(RULES)
    assert {rule.name for rule in CASES} == set(RULES)


@pytest.mark.parametrize("rule", CASES, ids=repr)
def test_negative_slots_and_empty_batches_change_nothing(rule: RowRule, device: torch.device) -> None:
    weight, state = (one.to(device) for one in slab(rule, 5))
    before = bits(weight), bits(state)
    for slots in (torch.full((3,), -1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)):
        grads = torch.ones(len(slots), 5, device=device)
        _gpu.LAUNCHES[rule.name](rule, weight, state, slots.to(device), grads, 1)
    assert (bits(weight), bits(state)) == before


def test_a_rule_without_a_kernel_runs_by_its_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = SGD(0.5)
    monkeypatch.delitem(_gpu.LAUNCHES, rule.name)
    weight = torch.ones(4, 2, device=device)
    slots = torch.tensor([2], dtype=torch.int32, device=device)
    apply_on_device(rule, weight, torch.empty(4, 0, device=device), slots, torch.ones(1, 2, device=device), 1)
    assert weight.tolist() == [[1, 1], [1, 1], [0.5, 0.5], [1, 1]]

"""Every kernel and its reference twin on the same batches, bit by bit; pooling against torch's embedding_bag."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tiered_emb import kernels
from tiered_emb.kernels import cpu, reference
from tiered_emb.kernels.batch import Deduper, UniqueIds, bags_of, group_positions
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

DIMS = [1, 2, 3, 7, 8, 64, 1000]
ONE = WorkerPool(1)


@dataclass(frozen=True)
class Batch:
    """A batch over a slab, as tensors: see the signatures of the kernels."""

    weight: torch.Tensor
    slots: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    bags: torch.Tensor
    start: torch.Tensor
    position: torch.Tensor
    per_sample: torch.Tensor
    grad: torch.Tensor

    @property
    def unique(self) -> int:
        return len(self.slots)

    @property
    def rows(self) -> torch.Tensor:
        return self.slots[self.inverse].long()


LENGTHS: dict[str, list[int]] = {
    "no bags": [],
    "all empty": [0, 0, 0],
    "one id": [1],
    "bags of one": [1] * 50,
    "mixed": [0, 1, 5, 0, 2, 13, 1, 1, 0, 40, 0],
    "one long": [300],
    "many": [i % 4 for i in range(3000)],
}


def make_batch(lengths: list[int], dim: int, seed: int = 0, distinct: int = 40) -> Batch:
    rng = np.random.default_rng(seed)
    n, slots_in_slab = sum(lengths), 2 * distinct
    ids = rng.integers(0, distinct, n)
    found = UniqueIds.empty(n)
    unique = Deduper().dedupe(ids, np.array([0, n]), np.zeros(1, np.uint32), found)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bags, start, position = np.empty(n, np.int32), np.empty(unique + 1, np.int64), np.empty(n, np.int32)
    bags_of(offsets, bags)
    group_positions(found.inverse, unique, start, position)
    weight = rng.standard_normal((slots_in_slab, dim)).astype(np.float32)
    weight[rng.integers(0, slots_in_slab, 20)] = -0.0
    arrays = (
        weight,
        rng.permutation(slots_in_slab)[:unique].astype(np.int32),
        found.inverse,
        offsets,
        bags,
        start,
        position,
        rng.standard_normal(n).astype(np.float32),
        rng.standard_normal((len(lengths), dim)).astype(np.float32),
    )
    return Batch(*map(torch.from_numpy, arrays))


def run_pool(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    outs = []
    for mode in ("sum", "mean"):
        for per_sample in (None, b.per_sample):
            out = torch.full_like(b.grad, torch.nan)
            k.pool(b.weight, b.slots, b.inverse, b.offsets, per_sample, mode, out, workers)
            outs.append(out)
    return outs


def run_pool_max(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    out, arg = torch.full_like(b.grad, torch.nan), torch.full(b.grad.shape, -7, dtype=torch.int32)
    k.pool_max(b.weight, b.slots, b.inverse, b.offsets, out, arg, workers)
    return [out, arg]


def run_gather(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    out = torch.full((len(b.inverse), b.weight.shape[1]), torch.nan)
    k.gather(b.weight, b.slots, b.inverse, out, workers)
    return [out]


def run_per_sample_gradients(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    out = torch.full((len(b.inverse),), torch.nan)
    k.per_sample_gradients(b.weight, b.slots, b.inverse, b.bags, b.grad, out, workers)
    return [out]


def run_sum_gradients(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    outs = []
    for first, last in ((0, b.unique), (b.unique // 3, b.unique // 2), (b.unique, b.unique)):
        for per_sample in (None, b.per_sample):
            out = torch.full((last - first, b.weight.shape[1]), torch.nan)
            k.sum_gradients(
                k.locate_gradients([b.grad], b.bags, Scratch()), per_sample, b.start, b.position, first, last, out
            )
            outs.append(out)
    return outs


def run_sum_gradients_max(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    arg = run_pool_max(reference, b, workers)[1]
    outs = []
    for first, last in ((0, b.unique), (b.unique // 3, b.unique // 2)):
        out = torch.full((last - first, b.weight.shape[1]), torch.nan)
        located = k.locate_gradients([b.grad], b.bags, Scratch())
        k.sum_gradients_max(located, arg, b.bags, b.start, b.position, first, last, out)
        outs.append(out)
    return outs


def run_read_rows(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    outs = []
    for width in (0, 1, 5):
        state = torch.arange(len(b.weight) * width, dtype=torch.float32).view(len(b.weight), width)
        out = torch.full((b.unique, b.weight.shape[1] + width), torch.nan)
        k.read_rows(b.weight, state, b.slots, out)
        outs.append(out)
    return outs


def run_write_rows(k: ModuleType, b: Batch, workers: WorkerPool) -> list[torch.Tensor]:
    outs = []
    for width in (0, 1, 5):
        weight, state = torch.full_like(b.weight, 3), torch.full((len(b.weight), width), 4.0)
        columns = b.weight.shape[1] + width
        rows = torch.arange(b.unique * columns, dtype=torch.float32).view(b.unique, columns)
        k.write_rows(weight, state, b.slots, rows)
        outs += [weight, state]
    return outs


RUNS: dict[str, Callable[[ModuleType, Batch, WorkerPool], list[torch.Tensor]]] = {
    "pool": run_pool,
    "pool_max": run_pool_max,
    "gather": run_gather,
    "per_sample_gradients": run_per_sample_gradients,
    "sum_gradients": run_sum_gradients,
    "sum_gradients_max": run_sum_gradients_max,
    "read_rows": run_read_rows,
    "write_rows": run_write_rows,
}


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(got.contiguous().view(torch.int32), expected.contiguous().view(torch.int32)), (got, expected)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", RUNS)
def test_twins(name: str, dim: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_GRAIN", 16)  # several parts even in a small batch
    batch = make_batch(lengths, dim)
    with WorkerPool(3) as workers:
        for got, expected in zip(RUNS[name](cpu, batch, workers), RUNS[name](reference, batch, ONE), strict=True):
            assert_same_bits(got, expected)


def functions(module: Any) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(module, inspect.isfunction)
    return {
        name: inspect.signature(function, eval_str=True)
        for name, function in found
        if not name.startswith("_") and function.__module__ == module.__name__
    }


def test_twins_have_the_signatures_of_the_protocol() -> None:
    protocol = {
        name: inspect.signature(function, eval_str=True)
        for name, function in vars(kernels.Kernels).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    expected = {
        name: signature.replace(parameters=list(signature.parameters.values())[1:])
        for name, signature in protocol.items()
    }
    assert functions(cpu) == functions(reference) == expected
    assert set(RUNS) == set(expected) - {"locate_gradients"}, "which is run for sum_gradients"


def test_for_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.for_device(torch.device("cpu")) is cpu
    assert kernels.for_device(torch.device("meta")) is reference
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    assert kernels.for_device(torch.device("cuda", 0)) is reference


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("lengths", [v for v in LENGTHS.values() if v], ids=[k for k, v in LENGTHS.items() if v])
@pytest.mark.parametrize("dim", DIMS)
class TestAgainstTorch:
    def test_sum_and_mean_are_equal_to_the_bit(self, module: ModuleType, lengths: list[int], dim: int) -> None:
        batch = make_batch(lengths, dim, seed=1)
        got = run_pool(module, batch, ONE)
        for mode, out in (("sum", got[0]), ("mean", got[2])):
            expected = torch.nn.functional.embedding_bag(
                batch.rows, batch.weight, batch.offsets, mode=mode, include_last_offset=True
            )
            assert_same_bits(out, expected)

    def test_per_sample_weights(self, module: ModuleType, lengths: list[int], dim: int) -> None:
        batch = make_batch(lengths, dim, seed=2)
        expected = torch.nn.functional.embedding_bag(
            batch.rows,
            batch.weight,
            batch.offsets,
            mode="sum",
            per_sample_weights=batch.per_sample,
            include_last_offset=True,
        )
        # torch fuses multiplication and addition here; we round both
        torch.testing.assert_close(run_pool(module, batch, ONE)[1], expected, rtol=1e-5, atol=1e-5)

    def test_max_and_its_gradient(self, module: ModuleType, lengths: list[int], dim: int) -> None:
        batch = make_batch(lengths, dim, seed=3, distinct=3)  # the same row several times in a bag: the first one wins
        weight = batch.weight.clone().requires_grad_()
        expected = torch.nn.functional.embedding_bag(
            batch.rows, weight, batch.offsets, mode="max", include_last_offset=True
        )
        out, arg = run_pool_max(module, batch, ONE)
        assert torch.equal(out, expected)
        sums = torch.full((batch.unique, dim), torch.nan)
        located = module.locate_gradients([batch.grad], batch.bags, Scratch())
        module.sum_gradients_max(located, arg, batch.bags, batch.start, batch.position, 0, batch.unique, sums)
        expected.backward(batch.grad)
        assert weight.grad is not None
        torch.testing.assert_close(sums, weight.grad[batch.slots], rtol=1e-5, atol=1e-5)

    def test_gradients(self, module: ModuleType, lengths: list[int], dim: int) -> None:
        batch = make_batch(lengths, dim, seed=4)
        weight, per_sample = batch.weight.double().requires_grad_(), batch.per_sample.double().requires_grad_()
        torch.nn.functional.embedding_bag(
            batch.rows, weight, batch.offsets, mode="sum", per_sample_weights=per_sample, include_last_offset=True
        ).backward(batch.grad.double())
        assert weight.grad is not None
        assert per_sample.grad is not None
        sums = run_sum_gradients(module, batch, ONE)[1]
        torch.testing.assert_close(sums.double(), weight.grad[batch.slots], rtol=1e-4, atol=1e-4)
        got = run_per_sample_gradients(module, batch, ONE)[0]
        torch.testing.assert_close(got.double(), per_sample.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("module", [cpu, reference])
def test_sums_are_sequential_and_not_fused(module: ModuleType) -> None:
    """Order and rounding are part of the definition: checked against float32 arithmetic one operation at a time."""
    batch = make_batch([60, 0, 40], 3, seed=5)
    pooled, summed = run_pool(module, batch, ONE)[1], run_sum_gradients(module, batch, ONE)[1]
    weight, factor, grad = batch.weight.numpy(), batch.per_sample.numpy(), batch.grad.numpy()
    for bag in range(3):
        total = np.zeros(3, np.float32)
        for p in range(batch.offsets[bag], batch.offsets[bag + 1]):
            total = total + weight[batch.rows[p]] * factor[p]
        assert pooled[bag].numpy().tobytes() == total.tobytes()
    for u in range(batch.unique):
        total = np.zeros(3, np.float32)
        for p in np.flatnonzero(batch.inverse.numpy() == u):
            total = total + grad[batch.bags[p]] * factor[p]
        assert summed[u].numpy().tobytes() == total.tobytes()


@pytest.mark.parametrize("module", [cpu, reference])
def test_a_weight_gradient_is_summed_in_eight_lanes(module: ModuleType) -> None:
    batch = make_batch([1, 1, 1], 21, seed=6)
    got = run_per_sample_gradients(module, batch, ONE)[0]
    for p in range(3):
        lanes = [np.float32(0)] * 8
        for d, term in enumerate(batch.weight.numpy()[batch.rows[p]] * batch.grad.numpy()[p]):
            lanes[d % 8] = lanes[d % 8] + term
        for half in (4, 2, 1):
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        assert got[p].numpy().tobytes() == lanes[0].tobytes()


@pytest.mark.parametrize("module", [cpu, reference])
def test_gather_copies_and_pool_adds_to_zero(module: ModuleType) -> None:
    batch = make_batch([1], 4)
    weight = torch.full_like(batch.weight, -0.0)
    gathered, pooled = torch.empty(1, 4), torch.empty(1, 4)
    module.gather(weight, batch.slots, batch.inverse, gathered, ONE)
    module.pool(weight, batch.slots, batch.inverse, batch.offsets, None, "sum", pooled, ONE)
    assert torch.signbit(gathered).all()
    assert not torch.signbit(pooled).any()


@pytest.mark.parametrize("dim", [1, 3, 16, 64])
@pytest.mark.parametrize("laid", ["apart", "stacked", "side by side", "expanded", "transposed"])
def test_gradients_of_several_features_are_found_however_they_lie(laid: str, dim: int) -> None:
    features, size = 5, 7
    whole = torch.randn(size, features, dim)
    grads = {
        "apart": [whole[:, f].contiguous() for f in range(features)],
        "stacked": [whole[:, f] for f in range(features)],
        "side by side": list(whole.reshape(size, -1).split(dim, 1)),
        "expanded": [whole[0, 0, :1].expand(size, dim) for _ in range(features)],
        "transposed": [whole[:, f].t().contiguous().t() for f in range(features)],
    }[laid]
    bags = torch.arange(features * size, dtype=torch.int32).repeat_interleave(2)[3:]
    inverse = torch.randint(0, 9, (len(bags),), dtype=torch.int32)
    start, position = torch.empty(10, dtype=torch.int64), torch.empty(len(bags), dtype=torch.int32)
    group_positions(inverse.numpy(), 9, start.numpy(), position.numpy())
    sums = []
    for module in (cpu, reference):
        out = torch.empty(9, dim)
        module.sum_gradients(module.locate_gradients(grads, bags, Scratch()), None, start, position, 0, 9, out)
        sums.append(out)
    assert torch.equal(*sums)
    assert torch.equal(sums[0][0], sum((torch.cat(grads)[bags[p]] for p in position[: start[1]]), torch.zeros(dim)))

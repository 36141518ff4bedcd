"""Every Triton kernel of rows and its reference twin on the same batches, bit by bit; see `conftest` for where."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch

from tiered_emb import kernels
from tiered_emb.kernels import reference
from tiered_emb.kernels.batch import Deduper, UniqueIds, bags_of, group_positions
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

pytest.importorskip("triton")
from tiered_emb.kernels import gpu

# The interpreter computes what is masked, with numpy, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ONE = WorkerPool(1)
LENGTHS = {"no bags": [], "all empty": [0, 0, 0], "mixed": [0, 1, 5, 0, 2, 13, 1, 1, 0, 40, 0]}
DIMS = [1, 3, 8, 33, 64, 200]


@dataclass(frozen=True)
class Batch:
    """A batch over a slab, as tensors of one device: see the signatures of the kernels."""

    weight: torch.Tensor
    slots: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    bags: torch.Tensor
    start: torch.Tensor
    position: torch.Tensor
    per_sample: torch.Tensor
    grad: torch.Tensor


def make_batch(lengths: list[int], dim: int, device: torch.device, distinct: int = 17) -> Batch:
    rng, n, slots_in_slab = np.random.default_rng(dim), sum(lengths), 2 * distinct
    found = UniqueIds.empty(n)
    ids = rng.integers(0, distinct, n)
    unique = Deduper().dedupe(ids, np.array([0, n]), np.zeros(1, np.uint32), found)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bags, start, position = np.empty(n, np.int32), np.empty(unique + 1, np.int64), np.empty(n, np.int32)
    bags_of(offsets, bags)
    group_positions(found.inverse, unique, start, position)
    arrays = (
        rng.standard_normal((slots_in_slab, dim)).astype(np.float32),
        rng.permutation(slots_in_slab)[:unique].astype(np.int32),
        *(found.inverse, offsets, bags, start, position),
        rng.standard_normal(n).astype(np.float32),
        rng.standard_normal((len(lengths), dim)).astype(np.float32),
    )
    for special, number in enumerate((-0.0, np.nan, np.inf, -np.inf, 3e-42)):  # 3e-42 is not normal
        for array in (arrays[0], arrays[-1]):
            array[rng.random(array.shape) < 0.02 * special] = number
    return Batch(*(torch.from_numpy(array).to(device) for array in arrays))


def nothing_yet(rows: int, b: Batch, extra: int = 0) -> torch.Tensor:
    return torch.full((rows, b.weight.shape[1] + extra), torch.nan, device=b.weight.device)


def run_pool(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    outs = []
    for mode in ("sum", "mean"):
        for per_sample in (None, b.per_sample):
            outs.append(nothing_yet(len(b.offsets) - 1, b))
            k.pool(b.weight, b.slots, b.inverse, b.offsets, per_sample, mode, outs[-1], ONE)
    return outs


def run_pool_max(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    out = nothing_yet(len(b.offsets) - 1, b)
    arg = torch.full(out.shape, -7, dtype=torch.int32, device=out.device)
    k.pool_max(b.weight, b.slots, b.inverse, b.offsets, out, arg, ONE)
    return [out, arg]


def run_gather(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    out = nothing_yet(len(b.inverse), b)
    k.gather(b.weight, b.slots, b.inverse, out, ONE)
    return [out]


def run_per_sample_gradients(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    out = nothing_yet(len(b.inverse), b)[:, 0].contiguous()
    k.per_sample_gradients(b.weight, b.slots, b.inverse, b.bags, b.grad, out, ONE)
    return [out]


def parts(b: Batch) -> list[tuple[int, int]]:
    unique = len(b.slots)
    return [(0, unique), (unique // 3, unique // 2), (unique, unique)]


def run_sum_gradients(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    outs = []
    located = k.locate_gradients([b.grad], b.bags, Scratch())
    for first, last in parts(b):
        for per_sample in (None, b.per_sample):
            outs.append(nothing_yet(last - first, b))
            k.sum_gradients(located, per_sample, b.start, b.position, first, last, outs[-1])
    return outs


def run_sum_gradients_max(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    arg, outs = run_pool_max(reference, b)[1], []
    located = k.locate_gradients([b.grad], b.bags, Scratch())
    for first, last in parts(b):
        outs.append(nothing_yet(last - first, b))
        k.sum_gradients_max(located, arg, b.bags, b.start, b.position, first, last, outs[-1])
    return outs


def run_read_rows(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    outs = []
    for width in (0, 1, 5):
        state = torch.arange(len(b.weight) * width, dtype=torch.float32, device=b.weight.device).view(-1, width or 1)
        outs.append(nothing_yet(len(b.slots), b, width))
        k.read_rows(b.weight, state.view(len(b.weight), width), b.slots, outs[-1])
    return outs


def run_write_rows(k: ModuleType, b: Batch) -> list[torch.Tensor]:
    outs = []
    for width in (0, 1, 5):
        weight, state = torch.full_like(b.weight, 3), torch.full((len(b.weight), width), 4.0, device=b.weight.device)
        rows = torch.arange(nothing_yet(len(b.slots), b, width).numel(), dtype=torch.float32, device=b.weight.device)
        k.write_rows(weight, state, b.slots, rows.view(len(b.slots), -1 if len(b.slots) else weight.shape[1] + width))
        outs += [weight, state]
    return outs


RUNS: dict[str, Callable[[ModuleType, Batch], list[torch.Tensor]]] = {
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
    """But for the bits of NaN, which are the processor's."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    same = got.contiguous().view(torch.int32) == expected.contiguous().view(torch.int32)
    assert (same | (got.isnan() & expected.isnan())).all(), (got, expected)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", RUNS)
def test_twins(name: str, dim: int, lengths: list[int], device: torch.device) -> None:
    batch = make_batch(lengths, dim, device)
    for got, expected in zip(RUNS[name](gpu, batch), RUNS[name](reference, batch), strict=True):
        assert_same_bits(got, expected)


def test_every_function_is_run_and_has_the_signature_of_its_twin() -> None:
    def functions(module: ModuleType) -> dict[str, inspect.Signature]:
        found = inspect.getmembers(module, inspect.isfunction)
        mine = {name: one for name, one in found if one.__module__ == module.__name__ and not name.startswith("_")}
        return {name: inspect.signature(one, eval_str=True) for name, one in mine.items()}

    assert functions(gpu) == functions(reference)
    assert set(RUNS) == set(functions(gpu)) - {"locate_gradients"}, "which is run for sum_gradients"


@pytest.mark.parametrize("laid", ["apart", "expanded", "transposed", "one, side by side"])
def test_gradients_are_found_however_they_lie(laid: str, device: torch.device) -> None:
    size, dim, whole = 7, 5, torch.randn(7, 3, 5, device=device)
    grads = {
        "apart": [whole[:, f].contiguous() for f in range(3)],
        "expanded": [whole[0, 0, :1].expand(size, dim)],
        "transposed": [whole[:, 0].t().contiguous().t()],
        "one, side by side": [whole.reshape(size, -1)[:, dim : 2 * dim]],
    }[laid]
    bags = torch.arange(len(grads) * size, dtype=torch.int32).repeat_interleave(2)
    start, position = torch.empty(5, dtype=torch.int64), torch.empty(len(bags), dtype=torch.int32)
    group_positions((bags % 4).numpy(), 4, start.numpy(), position.numpy())
    sums = []
    for module in (gpu, reference):
        sums.append(torch.empty(4, dim, device=device))
        located = module.locate_gradients(grads, bags.to(device), Scratch())
        module.sum_gradients(located, None, start.to(device), position.to(device), 0, 4, sums[-1])
    assert_same_bits(*sums)


def test_gather_copies_and_pool_adds_to_zero(device: torch.device) -> None:
    b = make_batch([1], 4, device)
    weight = torch.full_like(b.weight, -0.0)
    gathered, pooled = nothing_yet(1, b), nothing_yet(1, b)
    gpu.gather(weight, b.slots, b.inverse, gathered, ONE)
    gpu.pool(weight, b.slots, b.inverse, b.offsets, None, "sum", pooled, ONE)
    assert torch.signbit(gathered).all()
    assert not torch.signbit(pooled).any()


def test_a_gpu_gets_them() -> None:
    assert kernels.for_device(torch.device("cuda", 0)) is gpu

"""The engines that are compared: each is a function from a step's number to one whole training step.

A step is forward, backward and update of one table. Every row and every optimizer state is written here, before anybody
times anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.timing import Step
from benchmarks.workloads import Workload
from tiered_emb import (
    JaggedIds,
    RowwiseAdagrad,
    TableConfig,
    TierConfig,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
)

LEARNING_RATE = 0.01
_BLOCK_ROWS = 1 << 17
_ROW_EXTRA_BYTES = 128  # bookkeeping of a resident row, rounded up


def _resident(rows: int, dim: int) -> TierConfig:
    """Budgets in which so many rows fit."""
    budget = rows * (4 * dim + _ROW_EXTRA_BYTES) + (256 << 20)
    return TierConfig(hbm_bytes=0, ddr_bytes=budget, store=None)


def _check_resident(module: TieredEmbeddingBag | TieredEmbeddingBagCollection) -> None:
    (tier,) = module.stats().tiers
    if tier.evictions:
        raise RuntimeError(f"{tier.evictions} rows were evicted: not all are resident in {tier.capacity_bytes} bytes")


def tiered(
    workload: Workload, table_rows: int | None = None, rename: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
) -> Step:
    """Ours, through the public module, all rows of the workload resident.

    ``table_rows`` is the size of the table when it is larger than the workload's, ``rename`` where its ids lie in it.
    """
    bag = resident_bag(workload.rows, workload.dim, table_rows, rename)
    batches = [rename(ids) for ids in workload.batches]

    def step(number: int) -> None:
        bag(batches[number % len(batches)], workload.offsets).backward(workload.grad)

    return step


def tiered_collection(workload: Workload, tables: int) -> Step:
    """Ours, the same rows and ids as ``tables`` tables of one collection, each with its part of a batch.

    Requires: the workload's ids are those of :func:`benchmarks.workloads.column_batches`.
    """
    rows, size = workload.rows // tables, workload.ids_a_step // tables
    configs = [TableConfig(f"t{table}", rows, workload.dim, mode="sum") for table in range(tables)]
    bags = TieredEmbeddingBagCollection(
        configs, tiers=_resident(workload.rows, workload.dim), optimizer=RowwiseAdagrad(lr=LEARNING_RATE), seed=0
    )
    for config in configs:
        for ids in _blocks(rows):
            bags.set_rows(config.name, ids, torch.randn(len(ids), workload.dim))
    _check_resident(bags)
    names = tuple(config.name for config in configs)
    starts = (torch.arange(tables) * rows).repeat_interleave(size)
    batches = [JaggedIds(names, ids - starts, workload.offsets) for ids in workload.batches]
    grads = list(workload.grad.split(size))

    def step(number: int) -> None:
        torch.autograd.backward(list(bags(batches[number % len(batches)]).values()), grads)  # type: ignore[no-untyped-call]

    return step


def resident_bag(
    rows: int,
    dim: int,
    table_rows: int | None = None,
    rename: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids,
) -> TieredEmbeddingBag:
    """Our module with ``rows`` rows, all of them resident; the other arguments are those of `tiered`."""
    bag = TieredEmbeddingBag(
        table_rows or rows,
        dim,
        mode="sum",
        include_last_offset=True,
        tiers=_resident(rows, dim),
        optimizer=RowwiseAdagrad(lr=LEARNING_RATE),
        seed=0,
    )
    for ids in _blocks(rows):
        bag.set_rows(rename(ids), torch.randn(len(ids), dim))
    _check_resident(bag)
    return bag


def torch_sgd(workload: Workload) -> Step:
    """torch.nn.EmbeddingBag with sparse gradients and SGD."""
    return _torch_step(workload, lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))


def torch_sparse_adam(workload: Workload) -> Step:
    """torch.nn.EmbeddingBag with sparse gradients and SparseAdam; the first step writes its state, all of it."""
    step = _torch_step(workload, lambda parameters: torch.optim.SparseAdam(parameters, lr=LEARNING_RATE))
    step(0)
    return step


def fbgemm_rowwise_adagrad(workload: Workload) -> Step:
    """FBGEMM's CPU table-batched embeddings with exact row-wise Adagrad. Raises ImportError where it is missing."""
    module = fbgemm_module(workload.rows, workload.dim)

    def step(number: int) -> None:
        module(workload.batch(number), workload.offsets).backward(workload.grad)

    return step


def fbgemm_module(rows: int, dim: int) -> torch.nn.Module:
    """FBGEMM's module, called like ours. Raises ImportError where it is missing."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module: torch.nn.Module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        pooling_mode=PoolingMode.SUM,
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)
    return module


def _torch_step(workload: Workload, make: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]) -> Step:
    module = torch.nn.EmbeddingBag(workload.rows, workload.dim, mode="sum", sparse=True, include_last_offset=True)
    optimizer = make(module.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        module(workload.batch(number), workload.offsets).backward(workload.grad)
        optimizer.step()

    return step


def _blocks(rows: int) -> Iterator[torch.Tensor]:
    """All ids below ``rows``, block by block."""
    for first in range(0, rows, _BLOCK_ROWS):
        yield torch.arange(first, min(rows, first + _BLOCK_ROWS))

"""The engines that are compared: each is a function from a step's number to one whole training step.

A step is forward, backward and update of one table. Every row and every optimizer state is written here, before anybody
times anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.timing import Step
from benchmarks.workloads import Workload
from tiered_emb import RowwiseAdagrad, TierConfig, TieredEmbeddingBag

LEARNING_RATE = 0.01
_BLOCK_ROWS = 1 << 17
_ROW_EXTRA_BYTES = 128  # bookkeeping of a resident row, rounded up


def tiered(
    workload: Workload, table_rows: int | None = None, rename: Callable[[torch.Tensor], torch.Tensor] = lambda ids: ids
) -> Step:
    """Ours, through the public module, all rows of the workload resident.

    ``table_rows`` is the size of the table when it is larger than the workload's, ``rename`` where its ids lie in it.
    """
    budget = workload.rows * (4 * workload.dim + _ROW_EXTRA_BYTES) + (256 << 20)
    bag = TieredEmbeddingBag(
        table_rows or workload.rows,
        workload.dim,
        mode="sum",
        include_last_offset=True,
        tiers=TierConfig(hbm_bytes=0, ddr_bytes=budget, store=None),
        optimizer=RowwiseAdagrad(lr=LEARNING_RATE),
        seed=0,
    )
    for ids in _blocks(workload.rows):
        bag.set_rows(rename(ids), torch.randn(len(ids), workload.dim))
    evicted = bag.stats().tiers[0].evictions
    if evicted:
        raise RuntimeError(f"{evicted} rows were evicted: the rows are not resident with ddr_bytes = {budget}")
    batches = [rename(ids) for ids in workload.batches]

    def step(number: int) -> None:
        bag(batches[number % len(batches)], workload.offsets).backward(workload.grad)

    return step


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
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.rows, workload.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        pooling_mode=PoolingMode.SUM,
    )
    module.init_embedding_weights_uniform(-0.01, 0.01)

    def step(number: int) -> None:
        module(workload.batch(number), workload.offsets).backward(workload.grad)

    return step


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

"""A step on resident rows allocates no array of a batch's size once such a batch was seen."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tiered_emb import JaggedIds, RowwiseAdagrad, TableConfig, TierConfig, TieredEmbeddingBag
from tiered_emb import TieredEmbeddingBagCollection as Collection

SIZE = 50_000
LARGE = 64 << 10  # bytes; an array of int32 for each id takes 200,000, an array of int64 for each bag 400,000
TIERS = TierConfig(0, "64MiB")


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_bag(update: str) -> None:
    rng, offsets, grad = np.random.default_rng(0), torch.arange(SIZE + 1), torch.randn(SIZE, 4)
    batches = [torch.from_numpy(rng.zipf(1.2, SIZE) % 100_000) for _ in range(4)]
    options = {"mode": "sum", "include_last_offset": True, "tiers": TIERS, "update": update}
    with TieredEmbeddingBag(None, 4, optimizer=RowwiseAdagrad(0.1), **options) as bag:  # type: ignore[arg-type]

        def step(number: int) -> None:
            bag(batches[number % 4], offsets).backward(grad)
            bag.optimizer.step()

        assert most_allocated(step) < LARGE


def test_a_collection() -> None:
    rng, names, bags = np.random.default_rng(0), tuple("abcd"), SIZE // 4
    ids = [torch.from_numpy(rng.zipf(1.2, SIZE) % 20_000) for _ in range(4)]
    batches = [JaggedIds(names, one, torch.arange(SIZE + 1)) for one in ids]
    grads = list(torch.randn(bags, 4, 4).unbind(1))
    with Collection([TableConfig(name, None, 4) for name in names], tiers=TIERS) as collection:

        def step(number: int) -> None:
            torch.autograd.backward(list(collection(batches[number % 4]).values()), grads)

        assert most_allocated(step) < LARGE


def most_allocated(step: Callable[[int], None]) -> int:
    """Most bytes that steps hold beyond what they found, by Python's and numpy's own count."""
    for number in range(8):
        step(number)
    tracemalloc.start()
    try:
        step(0)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for number in range(4):
            step(number)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()

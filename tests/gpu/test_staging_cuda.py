"""Rows on their way to a GPU, on one: skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage.memory_store import MemoryStore
from tiered_emb import RowwiseAdagrad, TierConfig, TieredEmbeddingBag, prefetch
from tiered_emb.cache import Directory
from tiered_emb.tier import Slab, Tier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_rows_go_to_the_device_and_come_back() -> None:
    slab = Slab(1 << 15, 64, 1, torch.device("cuda"))
    tier = Tier("hbm", Directory(1 << 15, "lru"), slab)
    rng = np.random.default_rng(0)
    for _ in range(20):
        slots = rng.permutation(1 << 15)[:9000].astype(np.int32)
        sent, back = rng.random((9000, 65), np.float32), np.empty((9000, 65), np.float32)
        tier.write(slots, sent)
        with tier.working():
            there = slab.weight[torch.from_numpy(slots).cuda()]
            slab.weight[torch.from_numpy(slots).cuda()] = there * 2
        tier.read(slots, back)
        assert np.array_equal(back[:, :64], sent[:, :64] * 2)
        assert np.array_equal(back[:, 64], sent[:, 64])


@pytest.mark.parametrize("lookahead", [0, 2])
def test_training_gives_what_the_host_gives(lookahead: int) -> None:
    def trained(device: str) -> torch.Tensor:
        rng = np.random.default_rng(5)
        batches = [torch.from_numpy(rng.zipf(1.3, (64, 1)) % 5000) for _ in range(60)]
        tiers = TierConfig(hbm_bytes=400 * 68, ddr_bytes=1 << 20, store=MemoryStore())
        rule = RowwiseAdagrad(lr=0.1)
        with TieredEmbeddingBag(
            5000, 16, mode="sum", name="t", tiers=tiers, optimizer=rule, seed=3, device=device
        ) as table:
            for batch in prefetch(batches, table, lookahead=lookahead):
                out = table(batch)
                (out * out).sum().backward()
            return table.rows(torch.arange(5000))

    assert torch.allclose(trained("cuda"), trained("cpu"), rtol=1e-5, atol=1e-6)

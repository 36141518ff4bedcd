"""What the host budget takes from a tier for a moment's need, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from storage import LmdbStore, StoreConfig
from tiered_emb import SGD, TierConfig, TieredEmbeddingBag

WIDEST = 200  # distinct rows of a batch
USUAL = WIDEST * 9 // 8
ROW = 128  # bytes
BUDGET = 300_000


class Swelling(LmdbStore):
    """Takes more memory than it does, for a while."""

    more = 0

    def memory_after(self, inserts: int) -> int:
        return super().memory_after(inserts) + self.more


@pytest.mark.parametrize("share", [0.5, *(0.88 + step / 400 for step in range(8))])
def test_a_tier_keeps_what_batches_have_needed_unless_there_is_no_room(tmp_path: Path, share: float) -> None:
    """It is never raised again: a tier that just held one batch would refuse the next one, which has two rows more."""
    sizes = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=4, compact_bytes_per_s=0)
    with Swelling(tmp_path / "s", durability="snapshot", config=sizes) as store:
        tiers = TierConfig(ddr_bytes=BUDGET, store=store)
        with TieredEmbeddingBag(None, 32, mode="sum", tiers=tiers, optimizer=SGD(0.1), seed=0) as bag:
            top, budget = bag._lookup.group.top, bag.engine._budget
            schema = bag._lookup.group.schema
            for step in range(30):
                bag(torch.arange(step * 50, step * 50 + WIDEST)[None]).sum().backward()
            store.more = int((BUDGET - budget.charged_bytes() + top.capacity_rows * ROW) * share)
            for step in range(30, 32):
                bag(torch.arange(step * 50, step * 50 + WIDEST // 2)[None]).sum().backward()
                missing = budget._tier_bytes(USUAL, schema) - budget._tier_bytes(top.capacity_rows, schema)
                assert top.capacity_rows >= USUAL or budget.charged_bytes() + missing > BUDGET

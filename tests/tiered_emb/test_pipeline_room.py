"""What is prepared ahead never stands in the way of what would have room without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from storage.heap_store import HeapStore
from tiered_emb import SGD, Prefetch, TierConfig, TieredEmbeddingBag, prefetch

DIM, ROW = 4, 16
HELD = 8  # rows of the HBM tier


def bag(tiers: TierConfig, name: str, dim: int = DIM) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(None, dim, mode="sum", tiers=tiers, optimizer=SGD(0.1), name=name, seed=0, device="cpu")


def settle(ahead: Prefetch[torch.Tensor]) -> None:
    """Wait until nothing is left to be prepared, or it was refused."""
    for entry in ahead._entries:
        assert entry.done.wait(60)


@pytest.mark.parametrize("verb", ["set_rows", "another module's forward", "another module"])
def test_pins_of_later_batches_make_room(verb: str) -> None:
    tiers = TierConfig(HELD * ROW * (2 if "another" in verb else 1), 0, HeapStore())
    with bag(tiers, "a") as model:
        others = [bag(tiers, "b")] if verb == "another module's forward" else []
        held = model.stats().tiers[0].capacity_rows
        halves = [torch.arange(i * held // 2, (i + 1) * held // 2)[None] for i in range(4)]
        verbs: dict[str, Callable[[], object]] = {
            "set_rows": lambda: model.set_rows(torch.tensor([99]), torch.ones(1, DIM)),
            "another module's forward": lambda: others[0](torch.tensor([[99]])).sum().backward(),
            "another module": lambda: others.extend([bag(tiers, "c", 2 * DIM)]),
        }
        ahead = prefetch(halves, model, lookahead=1)
        for batch in ahead:
            if batch is halves[0]:
                settle(ahead)
                assert model._lookup.group.top.directory.pinned_rows == held
                verbs[verb]()
            model(batch[:, :2]).sum().backward()
        for other in others:
            other.close()


def test_what_had_to_make_room_and_what_had_none_is_prepared_again() -> None:
    with bag(TierConfig(HELD * ROW, 0, HeapStore()), "a") as model:
        batches = [torch.arange(i * 4, i * 4 + 4)[None] for i in range(5)]
        ahead = prefetch(batches, model, lookahead=4)
        for batch in ahead:
            if batch is batches[0]:
                settle(ahead)
                model(torch.arange(90, 98)[None]).sum().backward()
            settle(ahead)
            model(batch).sum().backward()
        assert ahead.stats.failed == 0
        assert ahead.stats.prepared >= 4

"""Reading rows without moving them: whole rows wherever they are, and rows pooled into bags.

Nothing here admits, pins or counts anything. Rows are looked for in the tiers from the top down, then below them.

Shapes: N ids, U unique ids, B bags, S slots, D dimension, K state width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiered_emb.cold import ColdRows
from tiered_emb.plan import IdBatch, Ids, Rows, Slots, TableNumbers
from tiered_emb.tier import Tier
from tiered_emb.workers import WorkerPool


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """Pooled rows ``out`` (B, D); ``winners`` (B, D) int32 are the positions they come from in mode "max"."""

    out: torch.Tensor
    winners: torch.Tensor | None


def read_rows(tiers: Sequence[Tier], cold: ColdRows, tables: TableNumbers, ids: Ids, width: int) -> Rows:
    """Whole rows (N, D + K = ``width``) by table and id, each from its authoritative place."""
    rows = np.empty((len(ids), width), np.float32)
    rest = np.arange(len(ids))
    for tier in tiers:
        slots = np.empty(len(rest), np.int32)
        if tier.directory.find(tables[rest], ids[rest], slots):
            here = slots >= 0
            found = np.empty((int(here.sum()), width), np.float32)
            tier.read(slots[here], found)
            rows[rest[here]] = found
            rest = rest[~here]
    if len(rest):
        outside = np.empty((len(rest), width), np.float32)
        cold.read(tables[rest], ids[rest], outside)
        rows[rest] = outside
    return rows


def pool_rows(tier: Tier, weight: torch.Tensor, slots: Slots, batch: IdBatch, workers: WorkerPool) -> Pooled:
    """Pool rows ``weight[slots]`` of ``weight`` (S, D), which is on the tier's device; ``slots`` (U,) by unique id."""
    bags, kernels, device = batch.bags, tier.kernels, tier.on_device
    at, inverse, ends = device(slots), device(batch.inverse), device(bags.offsets)
    out = torch.empty((bags.num_bags, weight.shape[1]), dtype=torch.float32, device=weight.device)
    if bags.mode == "max":
        winners = torch.empty(out.shape, dtype=torch.int32, device=weight.device)
        kernels.pool_max(weight, at, inverse, ends, out, winners, workers)
        return Pooled(out, winners)
    if bags.copied:
        kernels.gather(weight, at, inverse, out, workers)
    else:
        factors = None if bags.weights is None else device(bags.weights)
        kernels.pool(weight, at, inverse, ends, factors, bags.mode, out, workers)
    return Pooled(out, None)

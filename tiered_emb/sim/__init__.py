"""The policy laboratory: traces of ids replayed through the production Directory. What is kept, for how much memory."""

from __future__ import annotations

from tiered_emb.sim.budgets import Gain, gains, rows_for
from tiered_emb.sim.control import shuffled
from tiered_emb.sim.curves import POLICY_NAMES, Curve, miss_ratio_curve
from tiered_emb.sim.requests import Batches, Requests
from tiered_emb.sim.shards import exact_lru_curve, sampled_curve

__all__ = [
    "POLICY_NAMES",
    "Batches",
    "Curve",
    "Gain",
    "Requests",
    "exact_lru_curve",
    "gains",
    "miss_ratio_curve",
    "rows_for",
    "sampled_curve",
    "shuffled",
]

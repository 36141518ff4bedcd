"""Bookkeeping of one tier: which row sits in which slot, and which leaves first. No rows, no device, no torch."""

from __future__ import annotations

from tiered_emb.cache.arrays import ArrayPolicy
from tiered_emb.cache.directory import Directory
from tiered_emb.cache.owners import Shortage
from tiered_emb.cache.policy import LABORATORY_ONLY, POLICIES, refusal
from tiered_emb.cache.victims import Admission, Evicted

__all__ = ["LABORATORY_ONLY", "POLICIES", "Admission", "ArrayPolicy", "Directory", "Evicted", "Shortage", "refusal"]

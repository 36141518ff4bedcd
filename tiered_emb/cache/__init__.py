"""Bookkeeping of one tier: which row sits in which slot, and which leaves first. No rows, no device, no torch."""

from __future__ import annotations

from tiered_emb.cache.directory import Admission, Directory, Evicted
from tiered_emb.cache.policy import POLICIES, Policy

__all__ = ["POLICIES", "Admission", "Directory", "Evicted", "Policy"]

"""The rows of a Directory as it is saved: arrays by name, checked before they are believed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache.arrays import Arrays

_POLICY = "policy."  # in front of the names of its arrays


def saved_arrays(rows: Arrays, policy: Arrays) -> Arrays:
    """What is saved of a Directory: its rows, and what the policy knows of them."""
    return rows | {_POLICY + name: array for name, array in policy.items()}


def policy_arrays(saved: Arrays) -> Arrays:
    """The policy's part of what was saved."""
    return {name[len(_POLICY) :]: array for name, array in saved.items() if name.startswith(_POLICY)}


def saved_rows(
    saved: Arrays, capacity_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.uint32], NDArray[np.int64], NDArray[np.int32]]:
    """The rows of what `Directory.save` gave, and its free slots; raises ValueError for what cannot be that."""
    missing = {"slots", "tables", "ids", "free"} - set(saved)
    if missing:
        raise ValueError(f"a saved Directory has arrays {sorted(missing)} too: this is something else")
    slots, tables, ids, free = (saved[name] for name in ("slots", "tables", "ids", "free"))
    used = np.sort(np.concatenate([slots, free]))
    whole = np.array_equal(used, np.arange(len(used))) and bool((np.diff(slots) > 0).all())
    if not len(slots) == len(tables) == len(ids) or not whole or len(used) > capacity_rows:
        raise ValueError(f"{len(slots)} saved slots are not distinct ones of a Directory of {capacity_rows} rows")
    return slots.astype(np.int32), tables.astype(np.uint32), ids.astype(np.int64), free.astype(np.int32)

"""What an admission gives back: slots, and the rows that left for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Evicted:
    """Rows that left: slot (V,), table (V,) and id (V,) of each."""

    slots: NDArray[np.int32]
    tables: NDArray[np.uint32]
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Admission:
    """Result of `admit`: the slot of each admitted row (N,), and the `evicted` rows that had to go, first victim first.

    The victims' arrays are views of buffers that the next `admit` of the same Directory overwrites.
    """

    slots: NDArray[np.int32]
    evicted: int
    victim_slots: NDArray[np.int32]
    victim_tables: NDArray[np.uint32]
    victim_ids: NDArray[np.int64]


def victim_buffers(rows: int) -> Evicted:
    """Arrays that so many victims go into."""
    return Evicted(np.empty(rows, np.int32), np.empty(rows, np.uint32), np.empty(rows, np.int64))

"""What a Directory has room for, with pins, floors and quotas: the questions of whoever plans. They change nothing.

Thread: the Directory's owner.

Shapes: N rows by the numbers of their tables.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache.directory import Directory
from tiered_emb.cache.owners import Shortage

Tables = NDArray[np.uint32]
_NONE = np.empty(0, np.uint32)


def shortage(directory: Directory, new: Tables, kept: Tables = _NONE) -> Shortage | None:
    """Why absent rows `new` (N,) cannot be admitted; None = they can.

    Args:
        kept: (M,), rows that are there without a pin and must stay.
    """
    if directory.owners is not None:
        return directory.owners.shortage(directory.owners.of(new), directory.owners.of(kept))
    needed = directory.pinned_rows + len(new) + len(kept)
    return Shortage(None, needed, directory.capacity_rows) if needed > directory.capacity_rows else None


def fitting(directory: Directory, tables: Tables) -> NDArray[np.bool_]:
    """Which of absent rows (N,) can be admitted together, bool (N,): as many as can be, later ones first."""
    if directory.owners is not None:
        return directory.owners.fitting(directory.owners.of(tables))
    return np.arange(len(tables)) >= len(tables) - directory.room()


def lacking(directory: Directory, tables: Tables) -> NDArray[np.bool_]:
    """Which of rows (N,) that have just left floors still keep, bool (N,): later ones first."""
    if directory.owners is None:
        return np.zeros(len(tables), np.bool_)
    return directory.owners.lacking(directory.owners.of(tables))


def most_at_once(directory: Directory, table: int) -> int:
    """Most rows of a table that can be there together, whatever the floors of others keep."""
    return directory.capacity_rows if directory.owners is None else directory.owners.most_at_once(table)


def floors_in(directory: Directory, tables: Tables) -> int:
    """How many of distinct rows (N,) floors would keep beside the pinned ones."""
    return 0 if directory.owners is None else directory.owners.floors_in(directory.owners.of(tables))


def pinned_above_floors(directory: Directory) -> int:
    """Pinned rows that no floor keeps."""
    return directory.pinned_rows if directory.owners is None else directory.owners.pinned_above_floors()


def floor_rows(directory: Directory) -> int:
    """Rows that all floors keep together."""
    return 0 if directory.owners is None else directory.owners.floor_rows

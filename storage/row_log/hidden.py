"""What tombstones still hide, looked up in the ids of all segments: a tombstone that hides nothing may go.

That stays so: an older version of a deleted id never comes anew, since compaction copies live rows only. So the answer
is good for as long as it is needed. It reads ids of every committed segment, without the store's lock.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.row_log.group_rows import GroupRows
from storage.row_log.move import collect_tombstones, count_tombstones, mark_needed
from storage.row_log.places import NUMBER

Hidden: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.bool_]]


def hidden_by(group: GroupRows, burying: list[int]) -> Hidden:
    """The tombstones of some committed segments as a set of hashes, and which of them still hide a row.

    Requires: not the lock; the thread that deletes segments; no moved rows in memory, so that rows older than a
    tombstone lie in committed segments only.

    Args:
        burying: slots of those segments.

    Returns:
        `hashes` and `needed` of `storage.row_log.move.move_rows`.
    """
    with group.lock:
        lines, in_memory = group.segments.lines.copy(), group.slots_in_memory()
    count = sum(int(count_tombstones(lines, slot)) for slot in burying)
    hashes = np.zeros(1 << (2 * count + 1).bit_length(), np.uint64)
    epochs = np.zeros(len(hashes), np.int64)
    needed = np.zeros(len(hashes), np.bool_)
    for slot in burying:
        collect_tombstones(lines, slot, hashes, epochs)
    for slot in np.flatnonzero(lines[:, NUMBER]).tolist() if count else []:
        if slot not in in_memory:
            mark_needed(lines, slot, hashes, epochs, needed)
    return hashes, needed

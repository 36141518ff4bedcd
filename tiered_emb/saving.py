"""Saving: the rows of one group that belong to a state which is written while training goes on.

The state is that of one moment, at which it was begun in the Store (`storage.store.BegunStore`). Rows that were clean
then are in the Store. Those that were dirty are marked (`Tier.unsaved`), and each is given to the state as it was, by
whoever comes first:

- a cleaner, who goes through the tiers at its own pace (:mod:`tiered_emb.background`); the row is clean then, unless it
  was changed meanwhile;
- whoever is about to change it: a copy is kept here, in a buffer of bounded size, for the cleaner to give. If that is
  full, whoever comes gives what is in it;
- whoever moves it out of the tiers: it is given instead of put, and clean.

A mark moves with its row from tier to tier. What was changed since is put as ever; the Store keeps the two apart.

A failure ends it: nothing is given any more, marks mean nothing, and rows that were to be given are put, or stay dirty
where they are. So the state is lost and no row is.

Threads: `keep` belongs to who changes rows and holds the group's `updating`; `give` and `drain` are for anyone. There
are two buffers, so that a copy waits for a drain only when both are full.

Shapes: N rows, D dimension, K state width.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cold import ColdRows
from tiered_emb.plan import Ids, Rows, Slots, Steps, TableNumbers
from tiered_emb.tier import Tier


class _Kept:
    """Rows that are to be given, with room for more."""

    def __init__(self, capacity_rows: int, row_width: int) -> None:
        self.count = 0
        self.rows: Rows = np.empty((capacity_rows, row_width), np.float32)
        self.tables: TableNumbers = np.empty(capacity_rows, np.uint32)
        self.ids: Ids = np.empty(capacity_rows, np.int64)
        self.stored = np.empty(capacity_rows, np.bool_)
        self.steps: Steps = np.empty(capacity_rows, np.uint32)

    def add(self, tier: Tier, slots: Slots) -> int:
        """Copy marked rows of slots (N,), which are marked no more, as far as there is room; how many."""
        slots = slots[: len(self.ids) - self.count]
        part = slice(self.count, self.count + len(slots))
        tier.read(slots, self.rows[part])
        self.tables[part], self.ids[part] = tier.directory.slot_tables[slots], tier.directory.slot_ids[slots]
        self.stored[part], self.steps[part] = tier.stored[slots], tier.steps_of(slots)
        tier.unsaved[slots] = False
        self.count = part.stop
        return len(slots)


class Saving:
    """See the module's essay.

    Args:
        cold: of the group.
        capacity_rows: of each of two buffers for rows that are about to change.
        row_width: D + K.

    Attributes:
        error: what ended it early.
    """

    def __init__(self, cold: ColdRows, capacity_rows: int, row_width: int) -> None:
        self.error: BaseException | None = None
        self._cold = cold
        self._filling, self._draining = threading.Lock(), threading.Lock()  # the latter is taken first
        self._kept, self._spare = _Kept(capacity_rows, row_width), _Kept(capacity_rows, row_width)

    @staticmethod
    def bytes_for(capacity_rows: int, row_width: int) -> int:
        """Host memory that it takes."""
        return 2 * capacity_rows * (4 * row_width + 17)

    def keep(self, tier: Tier, slots: Slots) -> None:
        """Rows of ``slots`` (N,), distinct, are about to change: copy those that are marked."""
        marked = slots[tier.unsaved[slots]]
        while len(marked) and self.error is None:
            with self._filling:
                copied = self._kept.add(tier, marked)
            marked = marked[copied:]
            if len(marked):
                self.drain()

    def drain(self) -> None:
        """Give what was kept."""
        with self._draining:
            with self._filling:
                self._kept, self._spare = self._spare, self._kept
            full, n = self._spare, self._spare.count
            if n:
                self.give(full.tables[:n], full.ids[:n], full.rows[:n], full.stored[:n], full.steps[:n])
            full.count = 0

    def give(self, tables: TableNumbers, ids: Ids, rows: Rows, stored: NDArray[np.bool_], steps: Steps) -> bool:
        """Give rows (N, D + K), changed last in ``steps`` (N,), to the state; False if it has failed, before or now:
        they must be put then."""
        if self.error is None:
            try:
                self._cold.give(tables, ids, rows, stored, steps)
                return True
            except Exception as error:
                self.error = error
        return False

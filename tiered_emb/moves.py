"""Moves: how rows of a group get from one place to another - through two buffers of bounded size, which the host budget
counts. What goes where is decided by :mod:`tiered_emb.group`.

One thread at a time.

Shapes: N rows, D dimension, K state width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cold import ColdRows
from tiered_emb.plan import Rows, Slots, Victims
from tiered_emb.row_form import RowForm
from tiered_emb.saving import Saving
from tiered_emb.scratch import Scratch
from tiered_emb.tier import Tier

_MOVE_BYTES, _MOST_MOVE_BYTES = 1 << 18, 1 << 20  # of the buffer that rows move through: for any tier, for a large one
_VICTIM_BYTES = 32  # a Directory's arrays of victims, which grow by doubling: 16 bytes each


def move_bytes(tier_bytes: int) -> int:
    """Size of the buffer that rows move through, for a top tier of so many bytes: at most an eighth of it.

    Each move to the Store costs a call of the Store, and much of the buffer's time; a large tier has room for fewer.
    """
    return max(min(_MOVE_BYTES, tier_bytes // 8), min(_MOST_MOVE_BYTES, tier_bytes // 128))


class Moves:
    """See the module's docstring.

    Attributes:
        most_missing: the most rows that a batch has brought in so far.
        saving_bytes: host memory set aside for that.
        saving: while a state is written beside training, who takes the rows that belong to it.
    """

    def __init__(self, tiers: Sequence[Tier], cold: ColdRows, form: RowForm) -> None:
        self.most_missing = 0
        self.saving: Saving | None = None
        self.saving_bytes = 0
        self._tiers = tiers
        self._cold = cold
        self._form = form
        self._row_bytes = 4 * form.width
        self._buffers = Scratch()

    def staging_bytes(self, missing: int) -> int:
        """Most host memory that moving rows takes once a batch that misses ``missing`` rows has been planned."""
        most = max(missing, self.most_missing)
        moving = (most + self._move_rows) * self._row_bytes + most * _VICTIM_BYTES * len(self._tiers)
        return moving + self._cold.packing_bytes(most, self._move_rows) + self.saving_bytes

    @property
    def memory_bytes(self) -> int:
        """What the buffers hold now."""
        return self._buffers.memory_bytes

    @property
    def _move_rows(self) -> int:
        """Rows that move at once."""
        return max(1, move_bytes(self._tiers[0].capacity_rows * self._row_bytes) // self._row_bytes)

    def row_buffer(self, rows: int) -> Rows:
        """Where the missing rows of a batch come together; the same memory until a larger batch is planned."""
        return self._buffers.take("rows", (rows, self._row_bytes // 4), np.float32)

    def copied(self, tier: Tier, slots: Slots) -> Rows:
        """The rows (N, D + K) of ``slots`` (N,), no more than a chunk; valid until the next call."""
        rows = self._buffers.take("moving", (len(slots), self._row_bytes // 4), np.float32)
        tier.read(slots, rows)
        return rows

    def chunks(self, items: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """``items`` in parts that may move at once."""
        step = self._move_rows
        return (items[i : i + step] for i in range(0, len(items), step))

    def tier_shrank(self) -> None:
        """Let go of the buffer whose size follows the tier's."""
        self._buffers.drop("moving")

    def to_store(self, tier: Tier, victims: Victims, which: NDArray[np.intp]) -> Exception | None:
        """Hand some of a tier's victims to the Store; its last error, after all of them were written or kept."""
        error = None
        for part in self.chunks(which):
            rows = self.copied(tier, victims.slots[part])
            tier.counters.add("write_backs", victims.tables[part])
            error = self._write(victims.part(part), rows) or error
        return error

    def _write(self, victims: Victims, rows: Rows) -> Exception | None:
        """Hand rows to the Store; those that have not changed since a state was begun are a part of that."""
        if self.saving is not None and victims.unsaved.any():
            mine = victims.part(victims.unsaved)
            if self.saving.give(mine.tables, mine.ids, rows[victims.unsaved], mine.stored, mine.steps):
                victims, rows = victims.part(~victims.unsaved), rows[~victims.unsaved]
        if not len(rows):
            return None
        return self._cold.write(victims.tables, victims.ids, rows, victims.stored, victims.steps)

    def down(self, tier: Tier, lower: Tier, victims: Victims) -> None:
        """Copy a tier's victims to the slots that the lower tier has given them."""
        for part in self.chunks(np.flatnonzero(victims.lower_slots >= 0)):
            draws = self._cold.draws(victims.tables[part], victims.ids[part], victims.steps[part])
            lower.write(victims.lower_slots[part], self.copied(tier, victims.slots[part]), draws)

    def bring_back(self, tier: Tier, rows: Victims) -> Exception | None:
        """Give rows that had to leave a tier which has just shrunk other slots in it. What leaves for them goes to the
        Store, whose last error is returned."""
        error, step = None, max(1, min(self._move_rows, self.most_missing))  # no more victims at once than of a batch
        tier.counters.add("evictions", rows.tables, -1)
        for part in (rows.part(slice(first, first + step)) for first in range(0, len(rows.ids), step)):
            to, counts = np.empty(len(part.ids), np.int32), np.ones(len(part.ids), np.int32)
            gone = tier.admit(part.tables, part.ids, counts, to)
            error = self.to_store(tier, gone, np.flatnonzero(gone.dirty)) or error
            tier.write(to, self.copied(tier, part.slots))
            tier.take_marks(to, part.dirty, part.stored, part.unsaved, part.steps)
        return error

"""Upkeep: what a group does with its Store beside the road of a batch - changed rows handed over while they stay where
they are, all of them or those of a state that is written beside training, and rows that no tier holds.

A part of :class:`tiered_emb.group.TableGroup`, not used by itself. Whoever calls holds the engine's road; rows are
copied and marked under `updating`, so that an update of another thread comes before or after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from storage.interrupts import Uninterrupted
from tiered_emb.cold import ColdRows
from tiered_emb.errors import TierCapacityError
from tiered_emb.moves import Moves
from tiered_emb.plan import Ids, Rows, Slots, TableNumbers
from tiered_emb.row_form import RowForm
from tiered_emb.tier import Flags, Tier

Cancels: TypeAlias = dict[int, Callable[[int], None]]

_WINDOW_ROWS = 1 << 16  # slots looked through at once for changed rows


def cancel_all(cancels: Cancels) -> None:
    """Let go of what is prepared for later forwards."""
    for module, cancel in list(cancels.items()):
        cancel(module)


def marked(marks: Flags, first: int, last: int) -> Slots:
    """Slots ``first`` .. ``last - 1`` that are marked, ascending, as of now.

    Of a copy: who trains may change marks meanwhile, and numpy counts them before it lists them - what it lists beyond
    those that are left is whatever the memory held.
    """
    return (first + np.flatnonzero(marks[first:last].copy())).astype(np.int32)


class Upkeep:
    """See the module's docstring; attributes as of `TableGroup`."""

    tiers: list[Tier]
    cold: ColdRows
    moves: Moves
    updating: threading.Lock
    cancels: Cancels
    make_room: Callable[[int, int, int], bool]

    form: RowForm

    @property
    def row_width(self) -> int:
        """D + K: floats of a whole row."""
        return self.form.width

    def retry(self) -> None:
        """Hand over what the Store refused; forget what it is known to have if others have deleted rows there."""
        self.cold.retry()
        if self.cold.notice_deletions():
            for tier in self.tiers:
                tier.stored[:] = False

    def write_back(self) -> None:
        """Hand every changed row to the Store; the rows stay where they are. Raises what the Store raises."""
        self.retry()
        for tier in self.tiers:
            first = 0
            while first < tier.capacity_rows:  # which falls when the Store's index grows at the tier's cost
                for slots in self.moves.chunks(
                    marked(tier.dirty, first, min(first + _WINDOW_ROWS, tier.capacity_rows))
                ):
                    self._write_back(tier, slots)
                first += _WINDOW_ROWS
                if first >= tier.capacity_rows and tier.dirty.any():
                    first = 0  # rows that floors keep got slots of a lowered tier that had been looked through

    def _write_back(self, tier: Tier, slots: Slots) -> None:
        """Hand the rows of ``slots`` to the Store, which may need room for the first time it sees them."""
        with Uninterrupted():
            self._make_room_to_write(len(slots))
        directory, slots = tier.directory, slots[slots < tier.capacity_rows]
        slots = slots[tier.dirty[slots]]  # others may have the rows of a lowered tier that floors keep
        with self.updating:  # else what changes between the copy and the mark would pass for written
            rows = self.moves.copied(tier, slots)
            tables, ids = directory.slot_tables[slots], directory.slot_ids[slots]
            if error := self.cold.write(tables, ids, rows, tier.stored[slots], tier.steps_of(slots)):
                raise error
            tier.dirty[slots], tier.stored[slots] = False, True

    def save_some(self, tier: Tier, first: int, last: int) -> int:
        """Give rows that are marked, of slots ``first`` .. ``last - 1``, to the state that is written beside training;
        how many, 0 = none is left there.

        They are clean then, unless they change meanwhile: nobody moves them, since this has the road.
        """
        saving = self.moves.saving
        slots = marked(tier.unsaved, first, last)
        if saving is None or not len(slots):
            return 0
        slots = next(self.moves.chunks(slots))
        with suppress(TierCapacityError):  # for want of room in memory nothing is kept from the disk
            self._lower_tiers_for(len(slots))
        with self.updating:
            slots = slots[tier.unsaved[slots]]
            rows = self.moves.copied(tier, slots)
            tables, ids = tier.directory.slot_tables[slots], tier.directory.slot_ids[slots]
            stored, steps = tier.stored[slots], tier.steps_of(slots)
            tier.unsaved[slots] = tier.dirty[slots] = False
        if saving.give(tables, ids, rows, stored, steps):
            tier.stored[slots] = True
        else:
            tier.dirty[slots] = True
        return max(1, len(slots))

    def _make_room_to_write(self, rows: int) -> None:
        """Lower tiers for the Store's growth; if need be let go of what is prepared for later forwards.

        For want of room in memory nothing is kept from the disk.
        """
        try:
            self._lower_tiers_for(rows)
        except TierCapacityError:
            cancel_all(self.cancels)
            with suppress(TierCapacityError):
                self._lower_tiers_for(rows)

    def _lower_tiers_for(self, rows: int) -> None:
        while self.make_room(rows, 0, 0):
            pass

    def fill(self, tier: Tier, slots: Slots) -> None:
        """Read the rows of slots (N,) that a loaded directory names. Raises what the Store raises."""
        for part in self.moves.chunks(slots):
            tables, ids = tier.directory.slot_tables[part], tier.directory.slot_ids[part]
            rows = np.empty((len(part), self.row_width), np.float32)
            tier.stored[part] = self.cold.read(tables, ids, rows)
            tier.write(part, rows)

    def put_cold(self, tables: TableNumbers, ids: Ids, rows: Rows) -> None:
        """Hand rows (N, D + K) that no tier holds to the Store. Raises what the Store raises."""
        with Uninterrupted():
            self._make_room_to_write(len(ids))
            if error := self.cold.write(tables, ids, rows, np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.uint32)):
                raise error

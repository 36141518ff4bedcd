"""A complete state written beside training: what the rows are at one step boundary, at the cost of what changed.

::

    state = engine.begin_state()       at the boundary: marks what is dirty; no row moves
    state.complete(name, drop)         in another thread: gives all that is marked, then makes the state durable

Between the two the trainer goes on. Who changes or moves a marked row sees to it that the state gets it as it was
(:mod:`tiered_emb.saving`). The cleaner, who is whoever calls `complete`, takes the road for some rows at a time and
rests as long as that took, so that it never has more than half of it.

Whoever would make another state, go back to one or close the Store waits until this one has ended. Who has more to do
than the rows, as a checkpoint's files, calls `make` instead, and `end` when all of it is there.

Nothing is lost by a failure: the state is abandoned in the Store, and what it was to have is dirty still, or was put.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np

from storage.interrupts import Uninterrupted
from storage.store import BegunStore
from tiered_emb.errors import TierCapacityError
from tiered_emb.group import TableGroup
from tiered_emb.saving import Saving
from tiered_emb.tier import Tier

_WINDOW_ROWS = 1 << 16  # slots looked through at once
_LONGEST_REST_S = 0.02
_MOST_KEPT_BYTES = 8 << 20  # of rows that are about to change
_KEPT_SHARE = 32  # of the host budget may be for them


def reserve(
    groups: Sequence[TableGroup],
    budget_bytes: int,
    make_room: Callable[[Sequence[Any]], bool],
    cancel_ahead: Callable[[], None],
) -> dict[int, int]:
    """By group number, how many rows may be kept for being about to change; their memory is charged from now on.

    Args:
        groups: of an engine.
        budget_bytes: of it in host memory; 0 = nothing is charged.
        make_room: as `HostBudget.make_room`.
        cancel_ahead: lets go of what is prepared, for tiers that have to be lowered.
    """
    most = min(_MOST_KEPT_BYTES, budget_bytes // _KEPT_SHARE if budget_bytes else _MOST_KEPT_BYTES) // len(groups)
    rows = {group.number: max(1, most // Saving.bytes_for(1, group.row_width)) for group in groups}
    if not all(group.moves.saving_bytes for group in groups):
        cancel_ahead()
    for group in groups:
        group.moves.saving_bytes = Saving.bytes_for(rows[group.number], group.row_width)
    try:
        while make_room([]):
            pass
    except TierCapacityError:  # a forward holds what would have to go: less is kept, and more is waited for
        for group in groups:
            group.moves.saving_bytes, rows[group.number] = Saving.bytes_for(1, group.row_width), 1
    return rows


class BackgroundState:
    """See the module's essay.

    Args:
        road: of the engine.
        store: that begins states.
        groups: of the engine, all of them.
        note: of the state.
    """

    def __init__(
        self, road: AbstractContextManager[bool], store: BegunStore, groups: Sequence[TableGroup], note: bytes
    ) -> None:
        self._road = road
        self._note = note
        self._store = store
        self._groups = groups
        self._stopping = False
        self._ended = threading.Event()

    def wait(self) -> None:
        """Return once it has ended, in whatever thread. Requires: not the road."""
        self._ended.wait()

    def end(self) -> None:
        """Let those go on who wait for it."""
        self._ended.set()

    def begin(self, buffer_rows: dict[int, int]) -> None:
        """Begin the state of now. Requires: the road; no update is under way.

        Args:
            buffer_rows: by group number, rows that may be kept for being about to change.

        Raises:
            What the Store raises, also for rows that it has refused before; nothing is begun then.
        """
        for group in self._groups:
            group.cold.retry()
        rows = {one.number: sum(int(tier.dirty.sum()) for tier in one.tiers) for one in self._groups}
        with Uninterrupted():
            self._store.begin_state(rows)
            try:
                for group in self._groups:
                    saving = Saving(group.cold, max(1, buffer_rows[group.number]), group.row_width)
                    with group.updating:  # of another module, perhaps
                        group.moves.saving = saving
                        for tier in group.tiers:
                            np.copyto(tier.unsaved, tier.dirty)
            except BaseException:  # no memory for the buffers
                self.abandon()
                raise

    def complete(self, name: str | None, drop: Collection[str] = ()) -> None:
        """As `make`, after which it has ended."""
        try:
            self.make(name, drop)
        finally:
            self.end()

    def make(self, name: str | None, drop: Collection[str] = ()) -> None:
        """Give the state all of its rows and make it durable. In any thread, without the road.

        Raises:
            What the Store raised, now or when it was given a row: the state is abandoned then.
        """
        try:
            for group in self._groups:
                for tier in group.tiers[::-1]:  # what moves up meanwhile is found there
                    self._clean(group, tier)
            with self._road, Uninterrupted():
                self._finish()
            self._store.complete_state(self._note, snapshot=name, drop=drop)
        except BaseException:
            self._abandon()
            raise

    def stop(self) -> None:
        """Have `complete` give up soon, from another thread."""
        self._stopping = True

    def _clean(self, group: TableGroup, tier: Tier) -> None:
        """Give marked rows of a tier, window by window."""
        first = 0
        while first < tier.capacity_rows:
            begin = time.perf_counter()
            with self._road, Uninterrupted():
                given = group.save_some(tier, first, min(first + _WINDOW_ROWS, tier.capacity_rows))
            self._check(group)
            if not given:
                first += _WINDOW_ROWS
            else:
                time.sleep(min(_LONGEST_REST_S, time.perf_counter() - begin))

    def _finish(self) -> None:
        """Give what moved or was changed behind the cleaner's back."""
        for group in self._groups:
            for tier in group.tiers:
                while group.save_some(tier, 0, tier.capacity_rows):
                    pass
            saving = group.moves.saving
            assert saving is not None
            with group.updating:
                saving.drain()
                group.moves.saving = None
            self._raise_error(saving)

    def _check(self, group: TableGroup) -> None:
        saving = group.moves.saving
        assert saving is not None
        saving.drain()
        self._raise_error(saving)
        if self._stopping:
            raise InterruptedError("the state that was written beside training was given up")

    def _raise_error(self, saving: Saving) -> None:
        if saving.error is not None:
            raise saving.error

    def abandon(self) -> None:
        """Give it up, where it is not made; nothing once it has ended, since another one may be begun by then."""
        if not self._ended.is_set():
            self._abandon()
            self.end()

    def _abandon(self) -> None:
        with self._road, Uninterrupted():
            for group in self._groups:
                with group.updating:
                    group.moves.saving = None
                    for tier in group.tiers:
                        tier.unsaved[:] = False
            with suppress(Exception):  # the error to report is another
                self._store.abandon_state()

"""States: how an engine keeps its rows as of a moment, under a name, and goes back to them.

A part of :class:`tiered_emb.engine.Engine`, not used by itself. What a state costs and how it is kept is the Store's
business (`storage.snapshot`); here the tiers above it are brought in line, before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol
from uuid import UUID
from weakref import WeakSet

from storage.interrupts import Uninterrupted
from storage.lmdb_store import LmdbStore
from storage.schema import RowSchema
from storage.snapshot import Snapshot
from storage.store import BegunStore, Store, TableRef
from tiered_emb.background import BackgroundState, reserve
from tiered_emb.budget import HostBudget
from tiered_emb.config import TierConfig
from tiered_emb.errors import ConfigError
from tiered_emb.group import TableGroup
from tiered_emb.progress import Progress, note_of, progress_of
from tiered_emb.upkeep import Cancels, cancel_all


class Member(Protocol):
    """A module over an engine."""

    def went_back(self) -> None:
        """Rows and progress are others now: what was recorded of the ones before is void."""


class States:
    """See the module's docstring; attributes as of `Engine`."""

    config: TierConfig
    road: threading.RLock
    store: Store
    groups: dict[RowSchema, TableGroup]
    tables: dict[str, TableRef]
    progress: dict[int, Progress]
    cancels: Cancels
    _budget: HostBudget
    _identity: UUID
    _members: WeakSet[Member]
    _state: BackgroundState | None

    def cancel_ahead(self) -> None:
        """Let go of everything that is prepared for later forwards, whichever module's: they share the tiers."""
        cancel_all(self.cancels)

    def begin_state(self) -> BackgroundState | None:
        """Begin a complete state of all tables as they are now, which somebody completes while training goes on.

        None if the Store cannot do that. Requires: a step boundary.

        Raises what the Store raises for rows that it has refused before; nothing is begun then.
        """
        if not isinstance(self.store, BegunStore):
            return None
        with self.settled():
            groups = list(self.groups.values())
            rows = reserve(groups, self.config.ddr_budget_bytes, self._budget.make_room, self.cancel_ahead)
            state = BackgroundState(self.road, self.store, groups, note_of(self.progress))
            with Uninterrupted():  # else it would be begun in the Store, and nobody would know of it
                state.begin(rows)
                self._state = state
            return state

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The road, with no state begun: for who makes one, goes back, or has rows be clean that a state lacks.

        Requires: not the road, unless it was taken by this.
        """
        while True:
            if (state := self._state) is not None:
                state.wait()
            with self.road:
                if self._state is state:  # else another thread has begun one meanwhile
                    self._state = None
                    yield
                    return

    def join(self, member: Member) -> None:
        """Have a module notice when the engine goes back; as long as it lives."""
        self._members.add(member)

    @property
    def identity(self) -> str:
        """Of the Store, wherever it is; of one without a uuid, in this process only."""
        return str(self._identity if self.keeper is None else self.keeper.uuid)

    @property
    def keeper(self) -> LmdbStore | None:
        """The Store, if it keeps states by name."""
        return self.store if isinstance(self.store, LmdbStore) else None

    def write_back(self) -> None:
        """Hand every changed row to the Store; nothing is made durable by that."""
        with self.settled():
            for group in self.groups.values():
                group.write_back()

    def snapshot(self, name: str, drop: Collection[str] = ()) -> Snapshot:
        """As :meth:`flush`, and keep that state under a name; arguments and errors as of `LmdbStore.snapshot`.

        Raises ConfigError if the Store keeps no states by name.
        """
        with self.settled():
            store = self._keeps()
            self.write_back()
            with Uninterrupted():
                return store.snapshot(name, note_of(self.progress), drop=drop)

    def rollback(self, name: str) -> None:
        """Go back to a snapshot of the Store: rows, optimizer state, steps. Whatever changed since is gone, in tiers,
        among rows the Store has refused and in what is prepared ahead; newer snapshots go too. Modules stay as they
        are but for their steps, also those of others over this Store. Forwards made before cannot be gone backward
        from (PlanReleasedError).

        Requires: no backward pass is under way.
        Raises ConfigError if the Store keeps no states by name, or has other seeds in that one, and as
        `LmdbStore.rollback`; nothing has changed then.
        """
        with self.settled():
            store = self._keeps()
            self._check_seeds(store, name)
            self.cancel_ahead()
            with Uninterrupted():
                store.rollback(name, drop_later=True)
                self.forget()

    def forget(self) -> None:
        """Let go of all that is not in the Store, without writing it; progress is what the Store's note says.

        Requires: the road, and nothing prepared ahead.
        """
        noted = progress_of(self.store.note)
        self.progress = {number: replace(one, steps=0) for number, one in self.progress.items()} | noted
        self.forget_tiers()
        self._budget.forget()
        for member in list(self._members):
            member.went_back()

    def forget_tiers(self) -> None:
        """Have the tiers be empty. Requires: the road, nothing prepared ahead, and nothing that is not in the Store."""
        for group in self.groups.values():
            group.forget()

    def _keeps(self) -> LmdbStore:
        if self.keeper is None:
            raise ConfigError(
                f"the rows are in a {type(self.store).__name__}, which keeps no states by name: give TierConfig a path "
                f"or an LmdbStore as store"
            )
        return self.keeper

    def _check_seeds(self, store: LmdbStore, name: str) -> None:
        found = [one for one in store.snapshots() if one.name == name]
        noted = progress_of(found[0].note) if found else {}
        for table in self.tables.values():
            mine, other = self.progress[table.number].seed, noted.get(table.number)
            if other is not None and other.seed != mine:
                raise ConfigError(
                    f"table {table.name!r} has seed {mine}, but {other.seed} in snapshot {name!r}: make its module "
                    f"with seed={other.seed}"
                )

"""Directory: which row sits in which slot of a tier, which slots are pinned, and who leaves to make room.

A Directory is host memory only and holds no row. It names a row by (table u32, id i64), both of any value, and a slot
by an int32 below `capacity_rows`. The tier above it, the tier below it and the policy simulator use the same class.

A batch goes through it so:

    found = directory.find(tables, ids, slots)              reads only
    directory.touch(slots of the hits, their counts)        in the order of the batch
    directory.pin(slots of the hits)                        so that the next line cannot take them
    admission = directory.admit(tables, ids, counts of the misses, slots)
    directory.pin(admission.slots)
    ...
    directory.unpin(slots)                                  when the batch is over

Invariants (the Hypothesis machine in the tests holds them against a plain model):

- Every slot is either free or holds exactly one row; every row sits in at most one slot.
- A slot with a pin is never a victim, is not removed, and survives a resize or stops it.
- A verb that raises has changed nothing.
- Hits are touched before misses are admitted, and rows admitted together never evict each other.
- No verb of the batch allocates memory; the victims' buffers grow to the largest batch and are reused. (With floors or
  quotas `admit` takes a few arrays of the batch's size for a moment.)

Each verb is one to three Numba kernels over preallocated arrays (`probing.py` and the policy's file) that hold no GIL.

Thread: one owner, the planner. Nothing here is safe against a second thread.
It does not know whether a row is dirty, where its bytes are, or what a tier below does with a victim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache import probing
from tiered_emb.cache.arrays import ArrayPolicy, Arrays, resized
from tiered_emb.cache.owners import Owners, Positions, check_quotas, check_shares
from tiered_emb.cache.policy import POLICIES, policy_of
from tiered_emb.cache.replay import replay
from tiered_emb.cache.saved import policy_arrays, saved_arrays, saved_rows
from tiered_emb.cache.sizes import MAX_CAPACITY_ROWS, most_rows
from tiered_emb.cache.verbs import Guard
from tiered_emb.cache.victims import Admission, Evicted, victim_buffers

_SLOT_BYTES = 8 + 4 + 2  # id, table, pins
_LEDGER_BYTES = 32
_NOBODY_STAYS = Guard.of_pins(np.zeros(0, np.uint16))
_NOBODY = np.empty(0, np.uint16), np.empty(0, np.int64)  # whose slots and pins are, where no table is set apart


class Directory:
    """The rows of a tier of `capacity_rows` slots, with the eviction order of `policy`.

    `policy` is a name in `POLICIES`, or a policy of this many slots, which is the Directory's from then on: one that a
    name does not make, such as Belady with its trace.

    Attributes: `capacity_rows`; `slot_tables` u32 (S,) and `slot_ids` i64 (S,), the name of the row in each occupied
    slot (what they say of a free slot means nothing); `owners`, whose rows floors keep and quotas limit, if any. Read
    them, never write them; `resize` replaces them. What there is room for is said by `tiered_emb.cache.room`.

    `min_rows` and `max_rows` are floors and quotas, by table number: see `tiered_emb.cache.owners`.

    Raises ValueError for an unknown policy, one of another capacity, a capacity that is not between 1 and 2^31 - 2, and
    floors and quotas that cannot be kept.
    """

    def __init__(
        self,
        capacity_rows: int,
        policy: str | ArrayPolicy[Any] = "lru",
        *,
        min_rows: Mapping[int, int] | None = None,
        max_rows: Mapping[int, int] | None = None,
    ) -> None:
        _check_capacity(capacity_rows)
        self.capacity_rows = capacity_rows
        self.policy_name = policy if isinstance(policy, str) else type(policy).__name__.lower()
        self._policy = policy_of(policy, capacity_rows)
        self._pins = zeros(capacity_rows, np.uint16)
        self._guard = Guard.of_pins(self._pins)
        self.slot_tables = zeros(capacity_rows, np.uint32)
        self.slot_ids = zeros(capacity_rows, np.int64)
        self._buckets = zeros(probing.bucket_count(capacity_rows), np.uint64)
        self._ledger = np.array([0, 0, probing.NO_SLOT, 0], np.int64)
        self._victims = victim_buffers(0)
        self._codes = np.zeros(capacity_rows * self._policy.has_ghosts, np.int8)
        check_quotas(capacity_rows, max_rows or {})
        self.owners: Owners | None = None
        self._shares: tuple[dict[int, int], dict[int, int]] = {}, {}
        self.set_shares(min_rows or {}, max_rows or {})

    def set_shares(self, min_rows: Mapping[int, int], max_rows: Mapping[int, int]) -> None:
        """Keep these floors and quotas, by table number, from now on. A quota may be above the capacity.

        Rows stay where they are: what a table has above its quota it gives up when it gets new rows.
        Raises ValueError, with nothing changed, for what cannot be kept.
        """
        shares = dict(min_rows), dict(max_rows)
        if shares == self._shares:
            return
        self.owners = Owners(self.capacity_rows, *shares) if any(shares) else None
        self._shares = shares
        if self.owners is not None and self.rows:
            occupied = self.occupied()
            self.owners.enter(occupied, self.owners.of(self.slot_tables[occupied]))
            self.owners.count_pins(self._pins)

    @property
    def rows(self) -> int:
        """Occupied slots."""
        return int(self._ledger[probing.ROWS])

    @property
    def pinned_rows(self) -> int:
        """Slots with at least one pin."""
        return int(self._ledger[probing.PINNED])

    def room(self) -> int:
        """Rows that can be admitted now: free slots, and occupied ones without a pin."""
        return self.capacity_rows - self.pinned_rows

    def find(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], slots: NDArray[np.int32]) -> int:
        """Write the slot of each row (N,) into `slots` (N,), -1 where the row is absent; returns how many were found.

        Changes nothing, the policy's order included. Repeated rows are allowed.
        """
        assert len(tables) == len(ids) == len(slots)
        return int(probing.find_rows(self._buckets, self.slot_ids, tables, ids, slots))

    def touch(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Tell the policy that the rows in `slots` (N,) were requested `counts` (N,) times each, in this order."""
        assert len(slots) == len(counts)
        self._policy.touch(slots, counts)

    def foresee(self, slots: NDArray[np.int32], batch: int) -> None:
        """Tell the policy that batch number `batch` (1 or more) will need the rows in `slots` (N,)."""
        self._policy.foresee(slots, batch)

    def advance(self, batch: int) -> None:
        """Tell the policy that it is the turn of batch number `batch`."""
        self._policy.advance(batch)

    def pin(self, slots: NDArray[np.int32]) -> None:
        """Add one pin to each slot (N,), which must hold a row. A slot given twice gets two pins."""
        done = probing.pin_slots(self._pins, self._ledger, slots, *self._owned())
        assert done == len(slots), f"slot {slots[done]} would have more than {probing.MAX_PINS} pins"

    def unpin(self, slots: NDArray[np.int32]) -> None:
        """Take one pin off each slot (N,)."""
        done = probing.unpin_slots(self._pins, self._ledger, slots, *self._owned())
        assert done == len(slots), f"slot {slots[done]} is unpinned without a pin"

    def _owned(self) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        return _NOBODY if self.owners is None else (self.owners.of_slot, self.owners.pinned)

    def unpinned(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of the slots (N,) that have no pin."""
        free: NDArray[np.int32] = slots[self._pins[slots] == 0]
        return free

    def admit(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        counts: NDArray[np.int32],
        slots: NDArray[np.int32],
    ) -> Admission:
        """Give each row (N,) a slot, written to `slots` (N,): free slots first, then those of the policy's victims.

        Requires: the rows are distinct and absent. `counts` (N,) says how often each was requested. New rows have no
        pin.
        Raises ValueError, with nothing changed, when N is above `room()`, or floors keep too many of the others.
        """
        n = len(ids)
        assert n == len(tables) == len(counts) == len(slots)
        if n > self.room():
            raise ValueError(
                f"{n} rows cannot be admitted: {self.room()} of {self.capacity_rows} slots are without a pin"
            )
        owners = None if self.owners is None else self.owners.of(tables)
        evicted = self._make_room(tables, ids) if owners is None else self._make_room_within(tables, ids, owners)
        used = evicted.slots[: max(0, n - (self.capacity_rows - self.rows))]
        probing.place_rows(self._buckets, self.slot_tables, self.slot_ids, self._ledger, used, tables, ids, slots)
        if len(used) < len(evicted.slots):  # of a table at its quota
            probing.free_slots(self.slot_ids, self._ledger, evicted.slots[len(used) :])
        self._policy.insert(slots, tables, ids, counts, self._codes[:n])
        if self.owners is not None and owners is not None:
            self.owners.enter(slots, owners, counted=True)
        return Admission(slots, len(evicted.slots), evicted.slots, evicted.tables, evicted.ids)

    def replay(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], missed: NDArray[np.bool_]) -> int:
        """Request rows (N,) one after the other, each admitted if it is absent; returns how many were.

        As `find`, `touch` and `admit` of one row at a time, in one kernel. No slot may have a pin.

        Args:
            missed: (N,), written: which were absent.
        """
        assert self.pinned_rows == 0 and self.owners is None, "requests one at a time know no pins, floors and quotas"
        done = 0
        while True:
            done = int(self._replay_from(tables, ids, missed, done))
            if done == len(ids):
                return int(np.count_nonzero(missed))
            self._policy.grow()

    def _replay_from(
        self, tables: NDArray[np.uint32], ids: NDArray[np.int64], missed: NDArray[np.bool_], start: int
    ) -> int:
        names = self.slot_tables, self.slot_ids
        done: int = replay(
            self._buckets,
            *names,
            self._ledger,
            self._policy.state,
            _NOBODY_STAYS,
            self._policy.cursor,
            tables,
            ids,
            missed,
            start,
        )
        return done

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Free slots (N,), distinct, each with a row and without a pin."""
        if len(slots) == 0:
            return
        assert not self._pins[slots].any(), "a pinned slot cannot be removed"
        gone = self._take_out(slots)
        self._policy.remove(gone.slots)
        probing.free_slots(self.slot_ids, self._ledger, gone.slots)
        if self.owners is not None:
            self.owners.leave(gone.slots)

    def resize(self, capacity_rows: int) -> Evicted:
        """Change the number of slots; rows in slots at or above the new capacity leave, the others keep their slots.

        Raises ValueError, with nothing changed, when a row that would have to leave is pinned.
        """
        _check_capacity(capacity_rows)
        check_shares(capacity_rows, *self._shares)
        pinned = np.count_nonzero(self._pins[capacity_rows:])
        if pinned:
            raise ValueError(
                f"{pinned} rows in slots at or above {capacity_rows} are pinned: release them and resize again"
            )
        occupied = self.occupied()
        leaving = occupied[np.searchsorted(occupied, capacity_rows) :]
        gone = Evicted(leaving, self.slot_tables[leaving], self.slot_ids[leaving])
        self._policy.remove(leaving)
        self._policy.resize(capacity_rows)
        if self.owners is not None:
            self.owners.leave(leaving)
            self.owners.resize(capacity_rows)
        self._move_to(capacity_rows, occupied[: len(occupied) - len(leaving)])
        return gone

    def occupied(self) -> NDArray[np.int32]:
        """Slots that hold a row, ascending. Allocates and looks at every slot: not for every batch."""
        slots = zeros(self.rows, np.int32)
        probing.list_occupied(self._buckets, zeros(self.capacity_rows, np.bool_), slots)
        return slots

    def save(self) -> Arrays:
        """What `load` needs to go on from here, by name: the rows, and what the policy knows of them."""
        occupied = self.occupied()
        free = zeros(int(self._ledger[probing.FRESH]) - self.rows, np.int32)
        probing.list_free(self.slot_ids, self._ledger, free)
        rows = {"slots": occupied, "tables": self.slot_tables[occupied], "ids": self.slot_ids[occupied], "free": free}
        return saved_arrays(rows, self._policy.save())

    def load(self, saved: Arrays) -> None:
        """Hold the rows that another Directory of this capacity and policy held when it was saved, with no pins.

        It goes on with the same victims. Rows get the slots that they had, new ones those that they would have got.

        Raises ValueError, with nothing changed, for what `save` did not give for this capacity and policy.
        """
        slots, tables, ids, free = saved_rows(saved, self.capacity_rows)
        self._policy.load(policy_arrays(saved))
        self._forget()
        if self.owners is not None:
            self.owners.enter(slots, self.owners.of(tables))
        self.slot_tables[slots], self.slot_ids[slots] = tables, ids
        probing.enter_rows(self._buckets, self.slot_tables, self.slot_ids, self._ledger, slots)
        probing.chain_free(self.slot_ids, self._ledger, free, len(slots) + len(free))

    def clear(self) -> None:
        """Forget every row and every pin."""
        self._policy.clear()
        self._forget()

    def _forget(self) -> None:
        if self.owners is not None:
            self.owners.clear()
        self._pins[:] = 0
        self._buckets[:] = 0
        self._ledger[:] = (0, 0, probing.NO_SLOT, 0)

    @property
    def memory_bytes(self) -> int:
        """Host memory held now, the victims' buffers (16 bytes a row of the largest eviction) included."""
        own = (self._pins, self.slot_tables, self.slot_ids, self._buckets, self._ledger)
        owners = 0 if self.owners is None else self.owners.memory_bytes
        buffers = (self._victims.slots, self._victims.tables, self._victims.ids, self._codes)
        return sum(array.nbytes for array in (*own, *buffers)) + self._policy.memory_bytes + owners

    @staticmethod
    def bytes_for(capacity_rows: int, policy: str = "lru", shares: int = 0) -> int:
        """Most bytes a Directory of this capacity holds, its victims' buffers (16 bytes a row of a batch) left out.

        Args:
            shares: tables with a floor or a quota.
        """
        kind = POLICIES[policy]
        slots = capacity_rows * (_SLOT_BYTES + kind.bytes_per_slot + kind.has_ghosts)
        beside = 8 * probing.bucket_count(capacity_rows) + _LEDGER_BYTES + kind.reserve_bytes(capacity_rows)
        return slots + beside + Owners.bytes_for(capacity_rows, shares)

    @staticmethod
    def capacity_for(budget_bytes: int, row_bytes: int, policy: str = "lru") -> int:
        """Most slots, 0 included, whose rows of `row_bytes` each and whose Directory fit in `budget_bytes` together."""
        return most_rows(
            budget_bytes, row_bytes + _SLOT_BYTES, lambda rows: rows * row_bytes + Directory.bytes_for(rows, policy)
        )

    def _make_room(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> Evicted:
        """Take the policy's victims for rows (N,) out of order and table; their slots belong to the caller."""
        free = self.capacity_rows - self.rows
        slots = self._buffer_for(max(0, len(ids) - free))
        chosen = self._policy.make_room(self._guard, tables, ids, free, self._codes[: len(ids)], slots)
        assert chosen == len(slots), f"policy {self.policy_name} gave {chosen} victims of {len(slots)}"
        return self._take_out(slots)

    def _make_room_within(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], owners: Positions) -> Evicted:
        """The same within floors and quotas: tables at their quota give up rows of their own first."""
        assert self.owners is not None
        if short := self.owners.shortage(owners):
            whose = "there are" if short.table is None else f"table {short.table} may have"
            raise ValueError(
                f"with what pins and floors keep {short.rows} slots would be needed, and {whose} {short.limit}: "
                "use smaller batches, lower floors, a higher quota or a larger tier"
            )
        excess = self.owners.excess(owners)
        others = max(0, len(ids) - (self.capacity_rows - self.rows) - int(excess.sum()))
        self.owners.expect(owners)
        slots, codes = self._buffer_for(int(excess.sum()) + others), self._codes[: len(ids)]
        self._policy.miss(tables, ids, codes)
        chosen = 0
        for owner in np.flatnonzero(excess).tolist():
            part = slots[chosen : chosen + int(excess[owner])]
            chosen += self._policy.take(self.owners.guard(self._pins, owner), codes, part)
        chosen += self._policy.take(self.owners.guard(self._pins), codes, slots[chosen:])
        assert chosen == len(slots), f"policy {self.policy_name} gave {chosen} victims of {len(slots)}"
        self.owners.leave(slots, counted=True)
        return self._take_out(slots)

    def _buffer_for(self, victims: int) -> NDArray[np.int32]:
        """Where so many victims go."""
        if victims > len(self._victims.slots):
            self._victims = victim_buffers(max(victims, 2 * len(self._victims.slots)))
        return self._victims.slots[:victims]

    def _take_out(self, slots: NDArray[np.int32]) -> Evicted:
        """Take the rows in `slots` out of the hash table and name them."""
        n = len(slots)
        buffers = self._victims if n <= len(self._victims.slots) else victim_buffers(n)
        gone = Evicted(slots, buffers.tables[:n], buffers.ids[:n])
        if n:
            done = probing.evict_rows(self._buckets, self.slot_tables, self.slot_ids, slots, gone.tables, gone.ids)
            assert done == n, f"slot {slots[done]} holds no row"
        return gone

    def _move_to(self, capacity_rows: int, kept: NDArray[np.int32]) -> None:
        """Rebuild every array for a new capacity around the rows in slots `kept` (ascending)."""
        self._buckets = np.zeros(0, np.uint64)  # let go before the new ones are made: never two tables at once
        self._pins = resized(self._pins, capacity_rows)
        self._guard = Guard.of_pins(self._pins)
        self._codes = np.zeros(capacity_rows * self._policy.has_ghosts, np.int8)
        self.slot_tables = resized(self.slot_tables, capacity_rows)
        self.slot_ids = resized(self.slot_ids, capacity_rows)
        self._buckets = zeros(probing.bucket_count(capacity_rows), np.uint64)
        self.capacity_rows = capacity_rows
        probing.enter_rows(self._buckets, self.slot_tables, self.slot_ids, self._ledger, kept)


def _check_capacity(capacity_rows: int) -> None:
    if not 1 <= capacity_rows <= MAX_CAPACITY_ROWS:
        raise ValueError(
            f"a Directory holds 1 to {MAX_CAPACITY_ROWS} rows, not {capacity_rows}: a tier of 0 rows has none"
        )

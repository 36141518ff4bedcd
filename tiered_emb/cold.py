"""ColdRows: the rows of a group that no tier holds - in the Store, not yet taken by it, or never stored.

A read finds each row in its authoritative place: ``unwritten`` (rows that a failing Store refused), else the Store,
else the table's initializer with zero optimizer state. A write that the Store refuses, for whatever reason, is kept in
``unwritten``: readable, in memory beyond the budget, and handed over before anything else is written. So a full disk
stops training with an error and loses nothing.

Rows rest packed by their codec (:mod:`tiered_emb.row_form`), also those that wait in ``unwritten``.

One thread at a time, but for ``give`` and ``draws``. It does not know tiers, slots or plans.

Shapes: N rows, D dimension, K state width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.codecs import Draws
from storage.heap_store import HeapStore
from storage.interrupts import Uninterrupted
from storage.store import BegunStore, HintedStore, Mask, RowIds, Store, Stored
from tiered_emb.init import Initializer
from tiered_emb.plan import Ids, Rows, Steps, TableNumbers
from tiered_emb.row_form import RowForm
from tiered_emb.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a group.

    Attributes:
        name: in the Store and in messages.
        number: names it in ids of rows.
        init: the numbers of a row never stored.
        seed: of ``init``, and of stochastic rounding.
        stochastic: whether rows are rounded so, where they rest in fewer bits.
    """

    name: str
    number: int
    init: Initializer
    seed: int
    stochastic: bool = False


class ColdRows:
    """Reads and writes rows below the tiers; see the module's essay.

    Attributes:
        tables: by table number.
        unwritten: number of rows the Store has refused so far.
        initialised, lately: rows that were made by initializers, since the start and by the last read: the Store has
            not got them.
    """

    def __init__(self, store: Store, group: int, form: RowForm) -> None:
        self.tables: dict[int, Table] = {}
        self.unwritten = self.initialised = self.lately = 0
        self._store = store
        self._hinted = store if isinstance(store, HintedStore) else None
        self._deletions = 0 if self._hinted is None else self._hinted.deletions
        self._group = group
        self._form = form
        self._buffers = Scratch()
        self._kept = HeapStore()
        self._kept_group = self._kept.open_table("unwritten", form.schema).group

    @property
    def waits_for_disk(self) -> bool:
        """Whether it is of use to announce what will be read."""
        return self._hinted is not None and self._hinted.waits_for_disk

    def announce(self, tables: TableNumbers, ids: Ids) -> None:
        """Have the Store begin to read rows (N,)."""
        if self._hinted is not None and len(ids):
            self._hinted.will_need(RowIds(self._group, tables, ids))

    def notice_deletions(self) -> bool:
        """Whether others have deleted rows in the Store since the last call: what is known to be there is not known any
        more."""
        if self._hinted is None or self._deletions == self._hinted.deletions:
            return False
        self._deletions = self._hinted.deletions
        return True

    def read(self, tables: TableNumbers, ids: Ids, out: Rows) -> Mask:
        """Fill ``out`` (N, D + K); which of the rows the Store has. Raises what the Store raises; ``out`` is then
        undefined."""
        data, found = self._room("read", out), np.zeros(len(ids), np.bool_)
        self._store.get(RowIds(self._group, tables, ids), data, found)
        stored = found
        if self.unwritten:
            kept = np.zeros(len(ids), np.bool_)
            self._kept.get(RowIds(self._kept_group, tables, ids), data, kept)
            found = found | kept
        if self._form.lossy:
            self._form.unpack(data, out)
        new = np.flatnonzero(~found)
        self.lately = len(new)
        self.initialised += len(new)
        if len(new):
            self._initialise(new, tables, ids, out)
        return stored

    def write(self, tables: TableNumbers, ids: Ids, rows: Rows, stored: Mask, steps: Steps) -> Exception | None:
        """Store ``rows`` (N, D + K), some of which are known to be ``stored`` (N,), changed last in ``steps`` (N,); if
        the Store cannot take them, keep them and return its error."""
        with Uninterrupted():
            data = self._packed(rows, self._room("write", rows), tables, ids, steps)
            try:
                known = None if self._hinted is None else Stored(stored, self._deletions)
                self._store.put(RowIds(self._group, tables, ids, known), data)
            except Exception as error:  # a Store of the user's may raise anything; the rows have no other place
                self._kept.put(RowIds(self._kept_group, tables, ids), data)
                self._count_unwritten()
                return error
            if self.unwritten:
                self._forget(tables, ids)
        return None

    def give(self, tables: TableNumbers, ids: Ids, rows: Rows, stored: Mask, steps: Steps) -> None:
        """As `BegunStore.put_as_begun`, of ``rows`` (N, D + K) changed last in ``steps`` (N,). Raises what the Store
        raises. Any thread may ask."""
        assert isinstance(self._store, BegunStore), "only such a store has begun a state"
        with Uninterrupted():
            known = None if self._hinted is None else Stored(stored, self._deletions)
            data = self._packed(rows, self._own_room(rows), tables, ids, steps)
            self._store.put_as_begun(RowIds(self._group, tables, ids, known), data)

    def retry(self) -> None:
        """Hand over what the Store refused. Raises what the Store raises if it still does; then all is kept."""
        if self.unwritten:
            for rows, data in list(self._kept.scan(self._kept_group)):
                with Uninterrupted():
                    self._store.put(RowIds(self._group, rows.tables, rows.ids), data)
                    self._forget(rows.tables, rows.ids)

    def forget(self) -> None:
        """Let go of what the Store has not taken, and of what is known about what it has: it has gone back to a state
        of before."""
        if self.unwritten:
            for rows, _ in list(self._kept.scan(self._kept_group)):
                self._kept.delete(rows)
        self.unwritten = self.initialised = self.lately = 0
        self.notice_deletions()

    def packing_bytes(self, read: int, written: int) -> int:
        """Most host memory that packing takes beside rows, where so many are read and so many written at once."""
        return (read + 2 * written) * self._form.rest_bytes if self._form.lossy else 0

    def draws(self, tables: TableNumbers, ids: Ids, steps: Steps) -> Draws:
        """What rows (N,) are rounded by that were changed last in ``steps`` (N,). Any thread may ask."""
        seeds, stochastic = np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.bool_)
        for number in np.unique(tables):
            mine, table = tables == number, self.tables[int(number)]
            seeds[mine], stochastic[mine] = table.seed, table.stochastic
        return Draws(seeds, tables, ids, np.where(stochastic, steps, np.uint32(0)))

    def _room(self, what: str, rows: Rows) -> NDArray[np.uint8]:
        """Where rows (N, D + K) lie as the Store has them: in place, or in a buffer until the next call."""
        if not self._form.lossy:
            return rows.view(np.uint8)
        return self._buffers.take(what, (len(rows), self._form.rest_bytes), np.uint8)

    def _own_room(self, rows: Rows) -> NDArray[np.uint8]:
        """The same without a buffer, which is one thread's."""
        return np.empty((len(rows), self._form.rest_bytes), np.uint8) if self._form.lossy else rows.view(np.uint8)

    def _packed(
        self, rows: Rows, out: NDArray[np.uint8], tables: TableNumbers, ids: Ids, steps: Steps
    ) -> NDArray[np.uint8]:
        if self._form.lossy:
            self._form.pack(rows, out, self.draws(tables, ids, steps))
        return out

    def _forget(self, tables: TableNumbers, ids: Ids) -> None:
        self._kept.delete(RowIds(self._kept_group, tables, ids))
        self._count_unwritten()

    def _count_unwritten(self) -> None:
        self.unwritten = self._kept.stats().rows

    def _initialise(self, new: NDArray[np.intp], tables: TableNumbers, ids: Ids, out: Rows) -> None:
        """Rows ``new`` of ``out``: the table's initial weights, zero state. Tables of one initializer go together."""
        out[new] = 0
        kinds: dict[tuple[Initializer, int], list[int]] = {}
        for number in np.unique(tables[new]):
            table = self.tables[int(number)]
            kinds.setdefault((table.init, table.seed), []).append(table.number)
        for (init, seed), numbers in kinds.items():
            mine = new if len(kinds) == 1 else new[np.isin(tables[new], np.array(numbers, np.uint32))]
            weight = np.empty((len(mine), self._form.dim), np.float32)
            init.fill(seed, tables[mine], ids[mine], weight)
            out[mine, : self._form.dim] = weight

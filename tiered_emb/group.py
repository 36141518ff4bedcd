"""TableGroup: the tables of one row schema, and the verbs that take a batch along its road.

::

    batch = group.dedupe(lookup, ids, segments, bags)   unique (table, id), inverse, counts
    plan  = group.plan(batch)                           slots pinned, victims chosen; moves no row
    rows  = group.fetch(plan)                           lower tier -> Store -> init(seed, id)
    group.commit(plan, rows)                            victims out, rows in
    out   = group.lookup(plan)                          gather and pool by slot
    finite = group.check_gradients(uses, rule)          refuse what is no number, before any row changes
    group.update(uses, rule, step, finite=finite)       sum by row in forward order, apply the row rule
    group.release(plan)                                 unpin

The group is the only one that knows all tiers and the Store, and the only one that moves rows between them. One top
tier is worked on; a lower tier, where there is one, takes those of the top's victims that it lets in and hands rows
back up. Invariants:

- A slot pinned by a live plan is never a victim, and never moves.
- A row has one authoritative place: the top tier, else the lower tier, else :mod:`tiered_emb.cold`.
  A row that moves up leaves the lower tier; ``dirty`` (differs from the Store's) moves with it.
- ``init`` is pure, so a row that was never updated is dropped, not written.
- Bad input and a batch that does not fit are refused before anything changes. A read that fails takes back the slots
  that were planned for its rows; a row that the Store refuses stays readable and is written once there is room.

Threads: the verbs that plan, move or read rows anywhere belong to whoever holds the engine's road. ``lookup``,
``update``, ``weight_gradients`` and ``release`` do not: they touch slots that the caller's plan has pinned, and run
beside the others, in the thread that trains. What is unpinned is a message that the next plan reads. ``dedupe`` needs
no road either.

:mod:`tiered_emb.engine` owns budgets and the Store's life.

Shapes: N ids, U unique ids, M missing rows, V victims, D dimension, K state width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from numpy.typing import NDArray

from storage.schema import RowSchema
from storage.store import Store
from tiered_emb.cache import Shortage, room
from tiered_emb.cold import ColdRows, Table
from tiered_emb.errors import TierCapacityError
from tiered_emb.gradients import (
    Use,
    apply_and_tell_later,
    apply_gradients,
    are_finite,
    infinite_rows,
    row_gradients,
    tells_later,
    weight_gradients,
)
from tiered_emb.kernels import batch as batch_kernels
from tiered_emb.kernels.batch import Parted
from tiered_emb.limits import Limits
from tiered_emb.moves import Moves
from tiered_emb.optim import RowRule
from tiered_emb.plan import (
    Bags,
    BatchArrays,
    IdBatch,
    Ids,
    Mark,
    Pin,
    Plan,
    Rows,
    Slots,
    TableNumbers,
    UnpinQueue,
)
from tiered_emb.reading import pool_rows, read_rows
from tiered_emb.row_form import form_of
from tiered_emb.scratch import Scratch
from tiered_emb.tier import Tier
from tiered_emb.upkeep import Cancels, Upkeep
from tiered_emb.workers import WorkerPool

_MOST_SPARE = 8  # arrays of batches that are kept for the next ones


def unseen(place: str) -> None:
    """Nobody wants to know where the time goes."""


class TableGroup(Upkeep):
    """The tables of one row schema over shared tiers and one Store; see the module's essay.

    Attributes:
        number: the group's number in the Store.
        schema: of every row at rest: weight, then optimizer state.
        form: how a row is worked on, and how it rests.
        tiers: top first; one or two.
        cold: the rows that no tier holds.
        moves: what rows move through.
        limits: of the tables' gradients.
        deduping, updating: held by whoever dedupes; who changes rows that are pinned, or writes such rows back.
        cancels: as `Engine.cancels`.
        top_bytes: budget of the top tier, by name, in which this group has so many slots; for messages.
        make_room: asked before each plan with (missing rows, unique rows, those of them that floors keep); shrinks
            tiers so that what the batch stages and what the Store may grow by stays within the budget. Returns whether
            any tier shrank.
    """

    def __init__(self, number: int, schema: RowSchema, store: Store, tiers: list[Tier], workers: WorkerPool) -> None:
        self.number = number
        self.schema = schema
        self.form = form_of(schema)
        self.tiers = tiers
        self.cold = ColdRows(store, number, self.form)
        self.moves = Moves(tiers, self.cold, self.form)
        self.top_bytes: Callable[[int], int] = lambda rows: rows * self.form.worked_bytes
        self.make_room: Callable[[int, int, int], bool] = lambda missing, unique, floored: False
        self.limits = Limits()
        self._workers = workers
        self.cancels: Cancels = {}
        self.forget_threads()
        self._deduper = batch_kernels.Deduper()
        self._update_deduper = batch_kernels.Deduper()  # of the thread that trains, as is the scratch
        self._scratch = Scratch()  # of a batch's positions
        self._parts = Scratch()  # of the batch that is planned
        self._plans = self._forwards = 0
        self._unpinned = UnpinQueue()
        self._as_of: Mark | None = None
        self._spare: list[BatchArrays] = []

    def forget_threads(self) -> None:
        """As `forks.Forkable.forget_threads`."""
        self.deduping, self.updating = threading.Lock(), threading.Lock()
        self.moves.saving = None

    @property
    def top(self) -> Tier:
        """The tier that batches are worked on in."""
        return self.tiers[0]

    @property
    def lower(self) -> Tier | None:
        """The tier under the top one, if there is one."""
        return self.tiers[1] if len(self.tiers) > 1 else None

    @property
    def dim(self) -> int:
        """D: floats of a weight row."""
        return self.form.dim

    def add_table(self, table: Table) -> None:
        """Serve this table too, or a table that a closed module had, with another initializer perhaps."""
        known = self.cold.tables.get(table.number)
        self.cold.tables[table.number] = table
        for tier in self.tiers:
            if known is None:
                tier.counters.add_table(table.number)
            elif known != table:
                self._drop_clean(tier, table.number)

    def dedupe(self, ids: Ids, segments: NDArray[np.int64], tables: TableNumbers, bags: Bags) -> IdBatch:
        """The unique ids of a forward. Segment f, ``ids[segments[f]:segments[f + 1]]``, belongs to ``tables[f]``.

        Any thread may ask, with or without the road.
        """
        with self.deduping:
            n, mine = len(ids), self._take_arrays(len(ids))
            unique = batch_kernels.UniqueIds(mine.ids, mine.tables, mine.counts, mine.inverse)
            count = self._deduper.dedupe(ids, segments, tables, unique)
        inverse = torch.from_numpy(mine.inverse[:n])
        return IdBatch(mine.tables[:count], mine.ids[:count], mine.counts[:count], inverse, bags, mine)

    def _take_arrays(self, n: int) -> BatchArrays:
        """Spare arrays for n ids; new ones with some room if there are none so large."""
        while self._spare:
            arrays = self._spare.pop()
            if len(arrays.ids) >= n:
                return arrays
        return BatchArrays.empty(n + n // 4)

    def plan(self, batch: IdBatch) -> Plan:
        """Decide which slot each unique id gets, which rows come from where and which leave; no row moves.

        Raises TierCapacityError if the batch does not fit beside the plans that are alive; nothing is planned then, and
        no row is lost, though tiers may have been lowered.
        """
        self.release_dropped()
        if self.top.directory.owners is not None:  # what no tier of any size would do for is refused before any shrinks
            self.check_room([batch])
        slots, parts = self._find(batch)
        top = self.top
        top.directory.pin(parts.hits)
        if len(parts.ids) and (short := room.shortage(top.directory, parts.tables)):
            top.directory.unpin(parts.hits)
            raise self._too_small(len(batch.ids), short)
        self.moves.row_buffer(len(parts.ids))  # no memory for it: better now than with the slots promised
        plan = self._admit(batch, slots, parts)
        plan.pin = Pin(plan.slots, self._unpinned)
        return plan

    def fetch(self, plan: Plan) -> Rows:
        """The missing rows (M, D + K), each from its authoritative place; valid until the next fetch."""
        rows, from_lower = self.moves.row_buffer(len(plan.missing)), len(plan.lower_from)
        if self.lower is not None:
            self.lower.read(plan.lower_from, rows[:from_lower])
        outside = plan.missing[from_lower:]
        if len(outside):
            stored = self.cold.read(plan.batch.tables[outside], plan.batch.ids[outside], rows[from_lower:])
            self.top.stored[plan.slots[outside]] = stored
        return rows

    def commit(self, plan: Plan, rows: Rows, at: Callable[[str], None] = unseen) -> None:
        """Move the plan's victims out and the fetched rows in. `at` as of `prepare`.

        Raises the Store's error if it did not take a victim; by then every row is in its place, and the victim among
        the cold rows.
        """
        try:
            self._move_victims(plan, at)
        finally:
            self.top.write(plan.slots[plan.missing], rows)

    def lookup(self, plan: Plan) -> torch.Tensor:
        """The pooled rows (B, D) of a committed plan, on the top tier's device.

        Raises GradientError if an earlier update was refused, which the device tells only now.
        """
        self.limits.raise_heard()
        with self.top.working():
            pooled = pool_rows(self.top, self.top.worked_on.weight, plan.slots, plan.batch, self._workers)
        plan.arg = pooled.winners
        return pooled.out

    def check_gradients(self, uses: Sequence[Use], rule: RowRule) -> bool:
        """Whether the gradients of all rows are finite. Raises GradientError if one is not, of a table that wants that;
        nothing is changed in any case. Where the device is to find out by itself, in `update`, it is not known."""
        if tells_later(self.top, rule):
            self.limits.raise_heard()
            return False
        if are_finite(uses):
            return True
        with self.updating, self.top.working():
            work = row_gradients(self.top, uses, self._update_deduper, self._scratch)
            wrong = infinite_rows(self.top, work)
        self.limits.refuse(self.top.directory.slot_tables[wrong], self.top.directory.slot_ids[wrong])
        return not len(wrong)

    def update(self, uses: Sequence[Use], rule: RowRule, step: int, *, finite: bool) -> None:
        """Apply ``rule`` once to every row of ``uses`` (one set of tables, forward order); ``step`` counts from 1 and
        ``finite`` is what `check_gradients` found."""
        with self.updating, self.top.working():
            work = row_gradients(self.top, uses, self._update_deduper, self._scratch)
            self._keep_unsaved(work.slots)
            if tells_later(self.top, rule):
                apply_and_tell_later(self.top, work, rule, step, self.limits)
            else:
                apply_gradients(self.top, work, rule, step, self._workers, self.limits, finite=finite)

    def release(self, plan: Plan) -> None:
        """Have the plan's slots unpinned before the next plan is made; once."""
        if plan.pin is not None:
            plan.pin.release(None)

    def finish(self, plan: Plan) -> None:
        """Release the plan of a batch that is over: other batches may use its arrays."""
        if plan.pin is not None:
            plan.pin.release(plan.batch.arrays)

    def mark(self) -> Mark:
        """A place behind all that was released so far, for `planning_as_of`."""
        mark = Mark()
        self._unpinned.append(mark)
        return mark

    @contextmanager
    def planning_as_of(self, mark: Mark) -> Iterator[None]:
        """Plan as if nothing had been released since a mark, so that who leaves does not depend on threads. Requires:
        the road."""
        self._as_of = mark
        try:
            yield
        finally:
            self._as_of = None

    def release_dropped(self) -> None:
        """Unpin the slots of plans that were released, or that nobody holds any more."""
        while self._unpinned and not (self._as_of is not None and self._as_of.passed):
            item = self._unpinned.popleft()
            if isinstance(item, Mark):
                item.passed = True
                continue
            slots, arrays = item
            self.top.directory.unpin(slots)
            if arrays is not None and len(self._spare) < _MOST_SPARE:
                self._spare.append(arrays)

    def number_forward(self, plan: Plan) -> None:
        """A forward uses the plan now: gradients of several forwards are summed in the order of this."""
        self._forwards += 1
        plan.number = self._forwards

    def prepare(self, batch: IdBatch, at: Callable[[str], None] = unseen) -> Plan:
        """Plan, fetch and commit, one after the other; a failure leaves no pin and loses no row.

        Args:
            at: is told which tier, or "store", the time from now on goes to.
        """
        at("store" if self.cold.unwritten else self.top.name)
        self.retry()
        at(self.top.name)
        plan = self.plan(batch)
        at("store" if len(plan.missing) > len(plan.lower_from) else self.tiers[-1].name)
        try:
            rows = self.fetch(plan)
        except BaseException:
            self._take_back(plan)
            raise
        try:
            self.commit(plan, rows, at)
        except BaseException:
            self.release(plan)
            raise
        return plan

    def announce(self, batch: IdBatch) -> None:
        """Have the Store begin to read what a later batch will miss, if that saves time."""
        if not self.cold.waits_for_disk:
            return
        tables, ids = batch.tables, batch.ids
        for tier in self.tiers:
            slots = np.empty(len(ids), np.int32)  # those of the batch may wait to be unpinned
            tier.directory.find(tables, ids, slots)
            absent = slots < 0
            tables, ids = tables[absent], ids[absent]
        self.cold.announce(tables, ids)

    def _drop_clean(self, tier: Tier, table: int) -> None:
        """Forget a table's rows that are no different below: in the Store, or never updated and computed anew."""
        self.release_dropped()
        slots = tier.directory.unpinned(tier.directory.occupied())
        tier.remove(slots[(tier.directory.slot_tables[slots] == table) & ~tier.dirty[slots]])

    def weight_gradients(self, plan: Plan, grad: torch.Tensor) -> torch.Tensor:
        """Gradient (N,) of the per-sample weights, from the rows as they were in the forward pass."""
        with self.updating, self.top.working():
            return weight_gradients(self.top, plan, grad, self._scratch, self._workers)

    def count_missing(self, batch: IdBatch) -> int:
        """Rows of the batch that the top tier does not hold; changes nothing."""
        slots = np.empty(len(batch.ids), np.int32)
        return len(slots) - self.top.directory.find(batch.tables, batch.ids, slots)

    def count_unpinned(self, batch: IdBatch) -> int:
        """Rows of the batch that would take a slot from others: those missing, and those in a slot without a pin."""
        self.release_dropped()
        slots, directory = np.empty(len(batch.ids), np.int32), self.top.directory
        found = directory.find(batch.tables, batch.ids, slots)
        return len(slots) - found + len(directory.unpinned(slots[slots >= 0]))

    def check_room(self, batches: Sequence[IdBatch]) -> None:
        """Raise TierCapacityError unless the top tier has room for the rows of all ``batches``, of different tables."""
        self.release_dropped()
        directory, new, kept = self.top.directory, [], []
        for batch in batches:
            slots = np.empty(len(batch.ids), np.int32)
            directory.find(batch.tables, batch.ids, slots)
            new.append(batch.tables[slots < 0])
            kept.append(directory.slot_tables[directory.unpinned(slots[slots >= 0])])
        if short := room.shortage(directory, np.concatenate(new), np.concatenate(kept)):
            raise self._too_small(sum(len(batch.ids) for batch in batches), short)

    def peek(self, batch: IdBatch) -> torch.Tensor:
        """The pooled rows (B, D) without a trace: nothing admitted, no policy, counter or pin changed."""
        slots = np.empty(len(batch.ids), np.int32)
        if self.top.directory.find(batch.tables, batch.ids, slots) == len(slots):
            with self.top.working():
                return pool_rows(self.top, self.top.worked_on.weight, slots, batch, self._workers).out
        rows = self.read_rows(batch.tables, batch.ids)
        weight = torch.from_numpy(np.ascontiguousarray(rows[:, : self.dim])).to(self.top.slab.device)
        return pool_rows(self.top, weight, np.arange(len(rows), dtype=np.int32), batch, self._workers).out

    def read_rows(self, tables: TableNumbers, ids: Ids) -> Rows:
        """Whole rows (N, D + K) by table and id, wherever they are; leaves no trace."""
        return read_rows(self.tiers, self.cold, tables, ids, self.row_width)

    def overwrite(self, plan: Plan, rows: Rows) -> None:
        """Replace the U rows (U, D + K) of a committed plan."""
        with self.updating:
            self._keep_unsaved(plan.slots)
            self.top.write(plan.slots, rows)
            self.top.dirty[plan.slots] = True

    def _keep_unsaved(self, slots: Slots) -> None:
        """Before rows of the top tier change: a state that is written beside training has them as they are."""
        if (saving := self.moves.saving) is not None:
            saving.keep(self.top, slots)

    def shrink(self, tier: Tier, capacity_rows: int) -> None:
        """Lower a tier's capacity; rows without room leave for the Store, those that floors keep excepted. Raises what
        the Store raises, after that."""
        self.release_dropped()
        gone = tier.shrink(capacity_rows)
        lacking = np.flatnonzero(room.lacking(tier.directory, gone.tables))
        kept = np.zeros(len(gone.ids), np.bool_)
        kept[lacking] = room.fitting(tier.directory, gone.tables[lacking])
        error = self.moves.to_store(tier, gone, np.flatnonzero(gone.dirty & ~kept))
        error = self.moves.bring_back(tier, gone.part(kept)) or error
        tier.discard()
        self.moves.tier_shrank()
        if error is not None:
            raise error

    def forget(self) -> None:
        """Let go of all rows that are not in the Store, without writing any; plans that are alive are over.

        For a Store that has gone back to a state of before. Requires: the road; no update is going on.
        """
        with self.updating:
            self._unpinned.over = True
            self._unpinned = UnpinQueue()
            for tier in self.tiers:
                tier.forget()
            self.cold.forget()

    def _find(self, batch: IdBatch) -> tuple[Slots, Parted]:
        """Slots (U,) in the top tier, -1 = absent, and the rows that it holds and lacks, once there is room for all."""
        slots = batch.arrays.slots[: len(batch.ids)]
        while True:
            found = self.top.directory.find(batch.tables, batch.ids, slots)
            missing = len(slots) - found
            if not self.make_room(missing, len(slots), room.floors_in(self.top.directory, batch.tables)):
                self.moves.most_missing = max(self.moves.most_missing, missing)
                return slots, batch_kernels.parted(slots, batch.tables, batch.ids, batch.counts, found, self._parts)

    def _admit(self, batch: IdBatch, slots: Slots, parts: Parted) -> Plan:
        top, missing = self.top, parts.missing
        self._plans += 1
        top.counters.add("hits", batch.tables)
        top.directory.touch(parts.hits, parts.hit_counts)
        if len(missing) == 0:
            return Plan(self._plans, batch, slots, missing, missing)
        top.counters.add("hits", parts.tables, -1)
        top.counters.add("misses", parts.tables)
        fresh = np.empty(len(missing), np.int32)
        victims = top.admit(parts.tables, parts.ids, parts.counts, fresh)
        slots[missing] = fresh
        top.directory.pin(fresh)
        plan = Plan(self._plans, batch, slots, missing, missing[:0], victims)
        if self.lower is not None:
            self._plan_lower(plan, self.lower)
        return plan

    def _plan_lower(self, plan: Plan, lower: Tier) -> None:
        """Missing rows that lie in the lower tier leave it; the top tier's victims take their place there."""
        batch, missing = plan.batch, plan.missing
        at = np.empty(len(missing), np.int32)
        lower.directory.find(batch.tables[missing], batch.ids[missing], at)
        here = at >= 0
        lower.counters.add("hits", batch.tables[missing[here]])
        lower.counters.add("misses", batch.tables[missing[~here]])
        plan.missing = np.concatenate([missing[here], missing[~here]])
        plan.lower_from = at[here]
        up = plan.slots[missing[here]]
        come = plan.lower_from
        self.top.take_marks(up, lower.dirty[come], lower.stored[come], lower.unsaved[come])
        lower.remove(plan.lower_from)
        self._admit_victims(plan, lower)

    def _admit_victims(self, plan: Plan, lower: Tier) -> None:
        """Give the top tier's victims slots in the lower tier; those that it does not let in go past it."""
        victims = plan.victims
        here = np.flatnonzero(lower.lets_in(victims.tables, victims.ids))
        if len(here):
            to, counts = np.empty(len(here), np.int32), np.ones(len(here), np.int32)
            plan.lower_victims = lower.admit(victims.tables[here], victims.ids[here], counts, to)
            victims.lower_slots[here] = to
            lower.take_marks(to, victims.dirty[here], victims.stored[here], victims.unsaved[here])

    def _too_small(self, unique: int, short: Shortage) -> TierCapacityError:
        top = self.top
        if short.table is not None:
            name = self.cold.tables[short.table].name
            return TierCapacityError(
                f"the batch and other plans need {short.rows} rows of table {name!r} at once in the {top.name} tier, "
                f"but its max_rows is {short.limit}: raise it to that or use smaller batches"
            )
        floors = "" if top.directory.owners is None else f", min_rows keep {room.floor_rows(top.directory)} for tables"
        return TierCapacityError(
            f"the batch has {unique} distinct rows of {self.form.worked_bytes} bytes and other plans hold "
            f"{top.directory.pinned_rows}{floors}, but the {top.name} tier has room for {top.capacity_rows}; "
            f"it needs {self.top_bytes(short.rows)} bytes: raise {top.name}_bytes to that or use smaller batches"
        )

    def _move_victims(self, plan: Plan, at: Callable[[str], None] = unseen) -> None:
        """Rows that leave the lower tier, then rows that leave the top one; raises the last error of the Store."""
        victims, gone = plan.victims, plan.lower_victims
        error = None
        at("store")
        if self.lower is not None:
            error = self.moves.to_store(self.lower, gone, np.flatnonzero(gone.dirty))
        error = (
            self.moves.to_store(self.top, victims, np.flatnonzero((victims.lower_slots < 0) & victims.dirty)) or error
        )
        if self.lower is not None:
            at(self.lower.name)
            self.moves.down(self.top, self.lower, victims)
        at(self.top.name)
        if error is not None:
            raise error

    def _take_back(self, plan: Plan) -> None:
        """Undo the plan of a batch whose cold rows could not be read: victims leave as planned, rows from the lower
        tier are kept, and the slots meant for the cold rows are free again."""
        rows, from_lower = self.moves.row_buffer(len(plan.missing)), len(plan.lower_from)
        with suppress(Exception):  # rows that were not taken are among the cold ones; the error to report is another
            self._move_victims(plan)
        self.top.write(plan.slots[plan.missing[:from_lower]], rows[:from_lower])
        self.release(plan)
        self.release_dropped()
        self.top.remove(plan.slots[plan.missing[from_lower:]])

"""Engine: one open Store, the table groups over it, and the budgets they share.

Modules that name the same path share one engine. It decides how many rows each tier may hold: ``ddr_bytes`` covers, for
all groups together, the slabs and directories in host memory, the Store's index and buffers, and the rows being moved;
the HBM tier's directory lies in host memory and counts there too. ``hbm_bytes`` covers the slabs on the device. Both
are hard: before a batch is planned, the engine adds up what it stages and what the Store may grow by, and lowers the
host tiers' capacity until the sum fits. Groups share a budget by the bytes of one row of each of their tables.

With ``TierConfig(record=...)`` it also holds the trace that look-ups are recorded in, from the first module on to the
last. A trace that cannot be written stops the look-up that it would lack, and never keeps rows from the Store.

Not covered: a batch's own ids, outputs and gradients, a Store in memory (its rows are the user's choice), rows a full
disk has refused, the buffer of a trace, and pages of the Store's file that the system caches.

Threads: verbs that plan, move or read rows anywhere, or that speak to the Store, take the ``road``, a lock of the
engine's; so a Store is used by one thread at a time, scans aside. Beside the thread that trains there may be one that
prepares later batches (:mod:`tiered_emb.pipeline`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4
from weakref import WeakSet

import numpy as np
import torch

from storage.codecs import CODECS
from storage.errors import StoreClosedError
from storage.interrupts import Uninterrupted
from storage.lmdb_store import LmdbStore
from storage.schema import RowSchema, table_number
from storage.store import TableRef
from storage.volatile import VolatileStore
from tiered_emb import forks
from tiered_emb.background import BackgroundState
from tiered_emb.budget import Coming, HostBudget
from tiered_emb.cache import POLICIES, Directory, refusal
from tiered_emb.cache.admission import rule_of
from tiered_emb.cold import Table
from tiered_emb.config import TableConfig, TierConfig
from tiered_emb.engine_states import Member, States
from tiered_emb.errors import ConfigError, TierCapacityError
from tiered_emb.group import TableGroup
from tiered_emb.limits import TableLimits
from tiered_emb.metrics import EngineStats, TierStats
from tiered_emb.moves import move_bytes
from tiered_emb.optim import RowRule
from tiered_emb.plan import IdBatch, Ids, Rows
from tiered_emb.progress import Progress, note_of, progress_of
from tiered_emb.row_form import form_of
from tiered_emb.shares import Shares, by_number
from tiered_emb.staging import staging_bytes
from tiered_emb.stores import buffer_bytes, bytes_of_groups, open_store, place_of
from tiered_emb.tier import PackedSlab, Slab, Tier
from tiered_emb.trace import TraceWriter
from tiered_emb.upkeep import Cancels
from tiered_emb.workers import WorkerPool

_ENGINES: dict[str | int, Engine] = {}


class Engine(States):
    """See the module's essay. Get one by :meth:`open`, give it back by :meth:`leave`.

    Attributes:
        config: budgets and policy.
        device: where the HBM tier's rows lie; the host without one.
        store: the rows at rest.
        groups: by row schema.
        progress: what the Store's note keeps of each table, by number.
        recorder: the trace that look-ups are recorded in, if they are.
        road: held by the thread whose batch, or other verb, is on the road.
        cancels: lets go of what is prepared ahead for a module, by the module's `id`.
    """

    def __init__(self, config: TierConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.road = threading.RLock()
        self.cancels: Cancels = {}
        self._gone: deque[Sequence[str]] = deque()  # tables of modules that were dropped
        self._place = place_of(config)  # as it was at first: links and the working directory may change
        self.store, self._owned = open_store(config)
        self.groups: dict[RowSchema, TableGroup] = {}
        self.tables: dict[str, TableRef] = {}
        self.recorder: TraceWriter | None = None
        try:
            self.progress: dict[int, Progress] = progress_of(self.store.note)
            if config.record is not None:
                self.recorder = TraceWriter(config.record, rate=config.record_rate)
        except BaseException:
            if self._owned:
                self.store.close()
            raise
        self._identity = uuid4()
        self._members: WeakSet[Member] = WeakSet()
        self._shares = Shares(config)
        self._users = 0
        self._state: BackgroundState | None = None  # that was begun
        self._workers = WorkerPool(torch.get_num_threads())
        counted = not isinstance(self.store, VolatileStore)
        store_bytes = self.store.memory_after if counted else lambda inserts: 0
        self._budget = HostBudget(
            config.ddr_budget_bytes,
            self._shares,
            store_bytes,
            lambda: self.store.stats().rows,
            buffer_bytes(self.store) if self._owned else 0,
        )
        forks.remember(self)

    def forget_threads(self) -> None:
        """As `forks.Forkable.forget_threads`."""
        self._state = None  # which the parent completes
        for group in self.groups.values():
            group.moves.saving = None
            group.forget_threads()

    @classmethod
    def open(cls, config: TierConfig, device: torch.device | None) -> Engine:
        """The engine of ``config.store``: the one that is open already, or a new one."""
        _check_names(config)
        device = _row_device(config, device)
        place = place_of(config)
        engine = _ENGINES.get(place) if place is not None else None
        if engine is None:
            engine = cls(config, device)
            if place is not None:
                _ENGINES[place] = engine
        elif (engine.config, engine.device) != (replace(config, store=engine.config.store), device):
            raise ConfigError(
                f"store {config.store} is open in this process with {engine.config} on {engine.device}; modules that "
                f"share a store share its budgets, so give them the same TierConfig and device"
            )
        engine._users += 1
        return engine

    def leave(self, names: Sequence[str]) -> None:
        """A module lets go of its tables; their rows stay. After the last module the engine flushes and closes.

        If the Store does not take the rows, its error is raised and the module is still there, rows and all; not so if
        somebody has closed the Store, which will never take them. A trace that cannot be written to its end is
        reported once all else is done: the module is gone then.
        """
        with self.settled():
            self._let_gone_go()
            try:
                if self._users == 1:
                    self._flush_rows()
            except StoreClosedError:
                self._let_go(names)
                raise
            self._let_go(names)

    def abandon(self, names: Sequence[str]) -> None:
        """A module is gone without a close: what was not flushed is lost, as if the process had died."""
        self._gone.append(names)
        if (state := self._state) is not None and self._users <= len(self._gone):  # nobody trains on beside it
            state.stop()
        if self.road.acquire(blocking=False):  # a finalizer may run in a thread that the road's holder waits for
            try:
                self._let_gone_go()
            finally:
                self.road.release()

    def _let_gone_go(self) -> None:
        """Let modules go that were dropped, also while somebody held the road. Requires: the road."""
        while self._gone:
            names = self._gone.popleft()
            if self._users == 1 and isinstance(self.store, LmdbStore) and self._owned:
                self.store.abandon()  # closing it would make its last writes a complete state
            self._let_go(names)

    def _let_go(self, names: Sequence[str]) -> None:
        self._users -= 1
        for name in names:
            self.tables.pop(name, None)
        if self._users == 0:
            if self._place is not None:
                _ENGINES.pop(self._place, None)
            self._workers.close()
            try:
                if self._owned:
                    self.store.close()
            finally:
                if self.recorder is not None:
                    self.recorder.close()

    def steps(self, names: Sequence[str]) -> int:
        """Optimizer steps taken by the module of these tables, over all its lives."""
        return max(self.progress[table_number(name)].steps for name in names)

    def seed(self, name: str) -> int:
        """Of a table's rows that were never stored."""
        return self.progress[table_number(name)].seed

    def count_steps(self, names: Sequence[str], steps: int) -> None:
        """Remember the module's steps; the next flush keeps them."""
        for number in map(table_number, names):
            self.progress[number] = replace(self.progress[number], steps=steps)

    def _seeds(self, tables: Sequence[TableConfig], seed: int | None) -> list[int]:
        """Each table's seed: the one it was stored with, or the given one, or one drawn as torch's own initialisation
        does. Raises ConfigError if the given one would change rows that were never stored."""
        drawn = int(torch.randint(1 << 62, (), device="cpu")) if seed is None else seed
        seeds = []
        for table in tables:
            stored = self.progress.get(table_number(table.name))
            if stored is not None and seed is not None and seed != stored.seed:
                raise ConfigError(
                    f"table {table.name!r} was made with seed {stored.seed}, not {seed}, which would change its "
                    f"rows that were never stored; give seed={stored.seed} or None"
                )
            seeds.append(drawn if stored is None else stored.seed)
        return seeds

    def add_tables(
        self, tables: Sequence[TableConfig], rule: RowRule, seed: int | None
    ) -> list[tuple[TableGroup, TableRef]]:
        """Open ``tables`` in the Store; each one's group and reference, in order.

        Raises ConfigError for a table that a module uses already, that has another seed or a quota above the budget,
        TierCapacityError if the budgets hold no row of one or not what floors keep, TraceWriteError, and what the Store
        raises; the engine is as it was then.
        """
        with self.road:
            self._let_gone_go()
            self.cancel_ahead()  # tiers may have to be lowered, in which nothing pinned may stand
            return self._add_tables(tables, rule, seed)

    def _add_tables(
        self, tables: Sequence[TableConfig], rule: RowRule, seed: int | None
    ) -> list[tuple[TableGroup, TableRef]]:
        for table in tables:
            if table.name in self.tables:
                raise ConfigError(
                    f"table {table.name!r} is already used by a module of this process over the same store: "
                    f"give one of the two another name"
                )
        seeds = self._seeds(tables, seed)
        schemas = [row_schema(table.embedding_dim, rule, table.precision) for table in tables]
        before, groups = self._shares.saved(), dict(self.groups)
        try:
            self._share_among(tables, schemas)
            if self.recorder is not None:
                self.recorder.add_tables(table.name for table in tables)
            refs = [self.store.open_table(table.name, schema) for table, schema in zip(tables, schemas, strict=True)]
            self._make_groups(refs)
        except BaseException:
            self._shares.restore(before)
            self.groups = groups
            self._budget.charge_only(groups.values())
            self._set_shares()
            raise
        opened = [(self.groups[ref.schema], ref) for ref in refs]
        for table, own, (group, ref) in zip(tables, seeds, opened, strict=True):
            group.add_table(Table(table.name, ref.number, table.init, own, table.rounding == "stochastic"))
            value, norm = (math.inf if one is None else one for one in (table.clip_value, table.clip_norm))
            group.limits.set(ref.number, TableLimits(table.name, value, norm, table.on_nan == "skip"))
            self.tables[table.name] = ref
            self.progress.setdefault(ref.number, Progress(0, own))
        return opened

    def _share_among(self, tables: Sequence[TableConfig], schemas: Sequence[RowSchema]) -> None:
        """Give tables that are new here their shares; raises TierCapacityError before the Store hears of them."""
        for table, schema in zip(tables, schemas, strict=True):
            self._shares.add(table.name, schema)
        new = [schema for schema in self._shares.schemas if schema not in self.groups]
        for schema in self._shares.schemas if self.config.hbm_budget_bytes else ():
            self._shares.hbm_rows(schema, self.groups[schema].top.capacity_rows if schema in self.groups else None)
        if self.config.ddr_budget_bytes:
            widest = max((schema.row_bytes for schema in self._shares.schemas), default=0)
            store_bytes = bytes_of_groups(self.store, len(self.groups), len(new), widest)
            self._budget.check_new(new, self._bytes_beside_new() + store_bytes)

    def _bytes_beside_new(self) -> int:
        """Host memory that groups which are not made yet will take beside their DDR tiers, for their HBM tiers."""
        if not self.config.hbm_budget_bytes:
            return 0
        rows = {schema: self._shares.hbm_rows(schema) for schema in self._shares.schemas if schema not in self.groups}
        return sum(
            self._shares.kinds["hbm"].bytes_for(count)
            + staging_bytes(self.device, count, form_of(schema).width)
            + form_of(schema).worked_bytes
            + move_bytes(count * form_of(schema).worked_bytes)
            for schema, count in rows.items()
        )

    def _make_groups(self, refs: Sequence[TableRef]) -> None:
        self._set_shares()
        self._divide()
        for ref in refs:
            if ref.schema not in self.groups:
                self._add_group(ref)
        self._set_shares()

    def _set_shares(self) -> None:
        """Tell the groups the floors and quotas of their tables."""
        for schema, group in self.groups.items():
            floors, quotas = self._shares.floors(schema), self._shares.quotas(schema)
            group.tiers[-1].directory.set_shares(by_number(floors), by_number(quotas))

    @contextmanager
    def room_for(self, batches: Sequence[tuple[TableGroup, IdBatch]]) -> Iterator[None]:
        """Make room for batches that are then planned one after the other.

        Raises TierCapacityError, with nothing changed, if the budgets are too small for them.
        """
        for group in {id(group): group for group, _ in batches}.values():
            if group.top.name == "hbm" or group.top.directory.owners is not None:
                group.check_room([batch for one, batch in batches if one is group])
        while self._budget.make_room([Coming.of(group, batch) for group, batch in batches]):
            pass
        self._budget.settled = True
        try:
            yield
        finally:
            self._budget.settled = False

    @contextmanager
    def recorded(self, batches: Sequence[IdBatch]) -> Iterator[None]:
        """Record what one forward asks for, once the block has answered it.

        Raises TraceWriteError before the block, with nothing changed, if the trace has to be written and cannot be.
        """
        if self.recorder is None:
            yield
            return
        self.recorder.make_room()
        yield
        places = [batch.inverse.numpy() for batch in batches]
        tables = [batch.tables[at] for batch, at in zip(batches, places, strict=True)]
        ids = [batch.ids[at] for batch, at in zip(batches, places, strict=True)]
        self.recorder.append(np.concatenate(tables), np.concatenate(ids))

    def flush(self) -> None:
        """Make every changed row and the step counts durable as one state; write what was recorded."""
        with self.settled():
            self._flush_rows()
            if self.recorder is not None:
                with Uninterrupted():
                    self.recorder.flush()

    def _flush_rows(self) -> None:
        for group in self.groups.values():
            group.limits.raise_heard(wait=True)
        for group in self.groups.values():
            group.write_back()
        with Uninterrupted():
            self.store.flush(note_of(self.progress))

    def scan(self, names: Sequence[str]) -> Iterator[tuple[str, Ids, Rows]]:
        """Table name, ids (N,) and rows (N, D + K) of the Store's rows of these tables, in blocks."""
        numbers = {self.tables[name].number: name for name in names}
        for group in {self.tables[name].group: self.tables[name] for name in names}.values():
            for rows, data in self.store.scan(group.group):
                for number, name in numbers.items():
                    mine = rows.tables == number
                    if mine.any():
                        yield name, rows.ids[mine], form_of(self.tables[name].schema).unpacked(data[mine])

    # ------------------------------------------------------------------------------------------- budgets

    def stats(self) -> EngineStats:
        """All tiers of all groups, by name, and the Store."""
        with self.road:
            names = [name for name in ("hbm", "ddr") if any(tier.name == name for tier in self._tiers())]
            for group in self.groups.values():
                group.limits.hear(wait=True)
            skipped = {
                ref.name: self.groups[ref.schema].limits.skipped[ref.number]
                for ref in self.tables.values()
                if self.groups[ref.schema].limits.skipped[ref.number]
            }
            return EngineStats([self._tier_stats(name) for name in names], self.store.stats(), skipped)

    def _tiers(self) -> Iterator[Tier]:
        return (tier for group in self.groups.values() for tier in group.tiers)

    def _tier_stats(self, name: str) -> TierStats:
        tiers = [tier for tier in self._tiers() if tier.name == name]
        if name == "ddr":
            budget, used, peak = self.config.ddr_budget_bytes, self._budget.charged_bytes(), self._budget.peak_bytes
        else:
            budget, used = self.config.hbm_budget_bytes, sum(tier.slab_bytes for tier in tiers)
            peak = used
        by_table = {
            ref.name: tier.counters.of(ref.number, tier.slab.row_bytes)
            for ref in self.tables.values()
            for tier in self.groups[ref.schema].tiers
            if tier.name == name
        }
        return TierStats(
            name=name,
            capacity_rows=sum(tier.capacity_rows for tier in tiers),
            rows=sum(tier.directory.rows for tier in tiers),
            capacity_bytes=budget,
            bytes=used,
            peak_bytes=max(peak, used),
            hits=sum(tier.counters.total("hits") for tier in tiers),
            misses=sum(tier.counters.total("misses") for tier in tiers),
            evictions=sum(tier.counters.total("evictions") for tier in tiers),
            write_backs=sum(tier.counters.total("write_backs") for tier in tiers),
            by_table=by_table,
        )

    def _add_group(self, ref: TableRef) -> None:
        schema, tiers = ref.schema, []
        if self.config.hbm_budget_bytes:
            rows = self._shares.hbm_rows(schema)
            tiers.append(self._new_tier("hbm", rows, schema, self.device))
        if self.config.ddr_budget_bytes:
            new = [one for one in self._shares.schemas if one not in self.groups]
            rows = self._budget.rows_for(schema, self._bytes_beside_new(), self._shares.part(schema, new))
            tiers.append(self._new_tier("ddr", rows, schema, torch.device("cpu")))
        self.groups[schema] = group = TableGroup(ref.group, schema, self.store, tiers, self._workers)
        group.cancels = self.cancels
        if self.config.hbm_budget_bytes:
            group.top_bytes = lambda rows: self._shares.hbm_bytes(schema, rows)
        else:
            group.top_bytes = lambda rows: self._budget.bytes_for(group, rows)
        self._budget.join(group)

    def _new_tier(self, name: str, rows: int, schema: RowSchema, device: torch.device) -> Tier:
        form, top = form_of(schema), name == "hbm" or not self.config.hbm_budget_bytes
        slab: Slab | PackedSlab
        try:
            whole = top or not form.lossy
            slab = Slab(rows, form.dim, form.state_width, device) if whole else PackedSlab(rows, form)
            directory, kind = Directory(rows, self.config.policy), self._shares.kinds[name]
            return Tier(name, directory, slab, kind, counts_steps=top and form.lossy)
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise TierCapacityError(
                f"{name}_bytes asks for {rows} rows of {self._shares.row_bytes(schema, name)} bytes and their "
                f"bookkeeping, which the system does not grant ({error}); use fewer bytes than the memory of "
                f"{'this machine' if name == 'ddr' else device}"
            ) from error

    def resize_empty(self, schema: RowSchema, capacities: Mapping[str, int]) -> bool:
        """Give the empty tiers of a group so many slots, by name, if the budgets have room for that; else nothing
        happens. Unlike a tier that holds rows, an empty one may become larger.

        Requires: the road, and tiers that have just forgotten everything.
        """
        group = self.groups[schema]
        before = list(group.tiers)
        for at, tier in enumerate(before):
            rows = capacities[tier.name]
            if rows > tier.capacity_rows and tier.name == "hbm":
                rows = min(rows, self._shares.hbm_rows(schema, None))
            group.tiers[at] = self._new_tier(tier.name, rows, schema, tier.slab.device)
            group.tiers[at].counters = tier.counters
        self._set_shares()
        fits = not self.config.ddr_budget_bytes or self._budget.charged_bytes() <= self.config.ddr_budget_bytes
        if not fits:
            group.tiers[:] = before
        return fits

    def _divide(self) -> None:
        """Lower the tiers of groups that now share their budgets with new ones."""
        for schema, group in self.groups.items() if self.config.hbm_budget_bytes else ():
            rows = self._shares.hbm_rows(schema, group.top.capacity_rows)
            if rows < group.top.capacity_rows:
                group.release_dropped()
                group.shrink(group.top, rows)
        if self.config.ddr_budget_bytes:
            self._budget.lower_for_new()


def open_engines() -> list[Engine]:
    """All of this process whose Store was named, by a path or as it is."""
    return list(_ENGINES.values())


def row_schema(dim: int, rule: RowRule, precision: str = "fp32") -> RowSchema:
    """What a row of ``dim`` weights holds under ``rule`` when it rests: the weights, then the rule's state."""
    return RowSchema((*CODECS[precision].columns(dim), *rule.state_columns(dim)))


def _check_names(config: TierConfig) -> None:
    """Raise ConfigError for a policy or a rule of admission that there is none of."""
    if config.policy not in POLICIES:
        raise ConfigError(f"policy is {config.policy!r}; {refusal(config.policy)}")
    try:
        rule_of(config.admission, 1)
    except ValueError as error:
        raise ConfigError(f"admission is {config.admission!r}; {error}") from None


def _row_device(config: TierConfig, device: torch.device | None) -> torch.device:
    if config.hbm_budget_bytes == 0:
        return torch.device("cpu")
    if device is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

"""Engine: one open Store, the table groups over it, and the budgets they share.

Modules that name the same path share one engine. It decides how many rows each tier may hold: ``ddr_bytes`` covers, for
all groups together, the slabs and directories in host memory, the Store's index and buffers, and the rows being moved;
the HBM tier's directory lies in host memory and counts there too. ``hbm_bytes`` covers the slabs on the device. Both
are hard: before a batch is planned, the engine adds up what it stages and what the Store may grow by, and lowers the
host tiers' capacity until the sum fits. Groups share a budget by the bytes of one row of each of their tables.

Not covered: a batch's own ids, outputs and gradients, a Store in memory (its rows are the user's choice), rows a full
disk has refused, and pages of the Store's file that the system caches.

One thread at a time, the one that plans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from storage.errors import StorageError
from storage.heap_store import HeapStore
from storage.lmdb_store import LmdbStore, StoreConfig
from storage.schema import Column, RowSchema
from storage.store import Store, TableRef
from storage.volatile import VolatileStore
from tiered_emb.budget import Coming, HostBudget, host_bytes
from tiered_emb.cache import POLICIES, Directory
from tiered_emb.cold import Table
from tiered_emb.config import TableConfig, TierConfig
from tiered_emb.errors import ConfigError, TierCapacityError
from tiered_emb.group import TableGroup
from tiered_emb.metrics import EngineStats, TierStats
from tiered_emb.optim import RowRule
from tiered_emb.plan import IdBatch, Ids, Rows
from tiered_emb.tier import Slab, Tier
from tiered_emb.workers import WorkerPool

_LEAST_BUFFER_BYTES = 1 << 15  # a Store's write buffer is a sixteenth of the host budget, within these
_MOST_BUFFER_BYTES = 1 << 24
_ENGINES: dict[str | int, Engine] = {}


class Engine:
    """See the module's essay. Get one by :meth:`open`, give it back by :meth:`leave`.

    Attributes:
        config: budgets and policy.
        device: where the HBM tier's rows lie; the host without one.
        store: the rows at rest.
        groups: by row schema.
        steps: optimizer steps taken, by table name; kept in the Store's note.
    """

    def __init__(self, config: TierConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.store, self._owned = _open_store(config)
        self.groups: dict[RowSchema, TableGroup] = {}
        self.tables: dict[str, TableRef] = {}
        self.steps: dict[str, int] = _steps_of(self.store.note)
        self._shares: dict[RowSchema, int] = {}  # bytes of one row of each table
        self._users = 0
        self._workers = WorkerPool(torch.get_num_threads())
        counted = not isinstance(self.store, VolatileStore)
        self._budget = HostBudget(
            config.ddr_budget_bytes, config.policy, self.store.memory_after if counted else lambda inserts: 0
        )

    @classmethod
    def open(cls, config: TierConfig, device: torch.device | None) -> Engine:
        """The engine of ``config.store``: the one that is open already, or a new one."""
        if config.policy not in POLICIES:
            raise ConfigError(f"policy is {config.policy!r}; expected one of {', '.join(sorted(POLICIES))}")
        device = _row_device(config, device)
        place = _place(config)
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

        If the Store does not take the rows, its error is raised and the module is still there, rows and all.
        """
        last = self._users == 1
        if last:
            self.flush()
        self._users -= 1
        for name in names:
            self.tables.pop(name, None)
        if last:
            place = _place(self.config)
            if place is not None:
                _ENGINES.pop(place, None)
            self._workers.close()
            if self._owned:
                self.store.close()

    def add_tables(self, tables: Sequence[TableConfig], rule: RowRule, seed: int) -> list[tuple[TableGroup, TableRef]]:
        """Open ``tables`` in the Store; each one's group and reference, in order.

        Raises ConfigError for a table that a module uses already, TierCapacityError if the budgets hold no row of one,
        and what the Store raises; the engine is as it was then.
        """
        for table in tables:
            if table.name in self.tables:
                raise ConfigError(
                    f"table {table.name!r} is already used by a module of this process over the same store: "
                    f"give one of the two another name"
                )
        refs = [self.store.open_table(table.name, row_schema(table.embedding_dim, rule)) for table in tables]
        before = dict(self._shares)
        for ref in refs:
            if not self._serves(ref):
                self._shares[ref.schema] = self._shares.get(ref.schema, 0) + ref.schema.row_bytes
        try:
            self._make_groups(refs)
        except BaseException:
            self._shares = before
            raise
        opened = [(self.groups[ref.schema], ref) for ref in refs]
        for table, (group, ref) in zip(tables, opened, strict=True):
            group.add_table(Table(table.name, ref.number, table.init, seed))
            self.tables[table.name] = ref
        return opened

    def _serves(self, ref: TableRef) -> bool:
        return ref.schema in self.groups and ref.number in self.groups[ref.schema].cold.tables

    def _make_groups(self, refs: Sequence[TableRef]) -> None:
        self._divide()
        for ref in refs:
            if ref.schema not in self.groups:
                self._add_group(ref)

    def expect(self, batches: Sequence[tuple[TableGroup, IdBatch]]) -> None:
        """Make room for batches that will be planned one after the other.

        Raises TierCapacityError, with nothing changed, if the budgets are too small for them.
        """
        while self._budget.make_room(
            [Coming(group, group.count_missing(batch), len(batch.ids)) for group, batch in batches]
        ):
            pass

    def flush(self) -> None:
        """Make every changed row and the step counts durable as one state."""
        for group in self.groups.values():
            group.write_back()
        self.store.flush(json.dumps({"steps": self.steps}, sort_keys=True).encode())

    def scan(self, names: Sequence[str]) -> Iterator[tuple[str, Ids, Rows]]:
        """Table name, ids (N,) and rows (N, D + K) of the Store's rows of these tables, in blocks."""
        numbers = {self.tables[name].number: name for name in names}
        for group in {self.tables[name].group: self.tables[name] for name in names}.values():
            for rows, data in self.store.scan(group.group):
                for number, name in numbers.items():
                    mine = rows.tables == number
                    if mine.any():
                        yield name, rows.ids[mine], data[mine].view("float32")

    # ------------------------------------------------------------------------------------------- budgets

    def stats(self) -> EngineStats:
        """All tiers of all groups, by name, and the Store."""
        names = [name for name in ("hbm", "ddr") if any(tier.name == name for tier in self._tiers())]
        return EngineStats([self._tier_stats(name) for name in names], self.store.stats())

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
            ref.name: tier.counters.of(ref.number)
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
        schema, policy = ref.schema, self.config.policy
        dim, state = schema.columns[0].width, schema.row_bytes // 4 - schema.columns[0].width
        tiers = []
        if self.config.hbm_budget_bytes:
            rows = self._hbm_rows(schema)
            tiers.append(Tier("hbm", Directory(rows, policy), Slab(rows, dim, state, self.device)))
        if self.config.ddr_budget_bytes:
            share = self._shares[schema] / sum(self._shares[one] for one in self._shares if one not in self.groups)
            rows = self._budget.rows_for(schema.row_bytes, sum(host_bytes(tier) for tier in tiers), share)
            tiers.append(Tier("ddr", Directory(rows, policy), Slab(rows, dim, state, torch.device("cpu"))))
        self.groups[schema] = group = TableGroup(ref.group, schema, self.store, tiers, self._workers)
        self._budget.join(group)

    def _hbm_rows(self, schema: RowSchema) -> int:
        part = self.config.hbm_budget_bytes * self._shares[schema] // sum(self._shares.values())
        if part < schema.row_bytes:
            raise TierCapacityError(
                f"hbm_bytes is {self.config.hbm_budget_bytes}, of which {part} go to rows of {schema.row_bytes} bytes: "
                f"not one fits; raise hbm_bytes, or give 0 for no HBM tier"
            )
        return part // schema.row_bytes

    def _divide(self) -> None:
        """Lower the tiers of groups that now share their budgets with new ones."""
        total = sum(self._shares.values())
        for schema, group in self.groups.items():
            if self.config.hbm_budget_bytes and self._hbm_rows(schema) < group.top.capacity_rows:
                group.release_dropped()
                group.shrink(group.top, self._hbm_rows(schema))
        if self.config.ddr_budget_bytes:
            shares = {group.number: self._shares[schema] / total for schema, group in self.groups.items()}
            self._budget.lower_for(shares)


def row_schema(dim: int, rule: RowRule) -> RowSchema:
    """What a row of ``dim`` floats holds under ``rule``: the weight, then the rule's state."""
    return RowSchema((Column("weight", "float32", dim), *rule.state_columns(dim)))


def _row_device(config: TierConfig, device: torch.device | None) -> torch.device:
    if config.hbm_budget_bytes == 0:
        return torch.device("cpu")
    if device is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _place(config: TierConfig) -> str | int | None:
    """What tells two engines' Stores apart; None = a Store of the module's own."""
    if config.store is None:
        return None
    return os.path.realpath(config.store) if isinstance(config.store, str | os.PathLike) else id(config.store)


def _open_store(config: TierConfig) -> tuple[Store, bool]:
    """The configured Store, and whether it is ours to close."""
    if config.store is None:
        return HeapStore(), True
    if not isinstance(config.store, str | os.PathLike):
        return config.store, False
    buffer = max(_LEAST_BUFFER_BYTES, min(_MOST_BUFFER_BYTES, config.ddr_budget_bytes // 16))
    sizes = StoreConfig(segment_bytes=min(1 << 20, buffer // 2), write_buffer_bytes=buffer)
    return LmdbStore(Path(config.store), durability="snapshot", config=sizes), True


def _steps_of(note: bytes) -> dict[str, int]:
    """Optimizer steps by table, out of a Store's note."""
    if not note:
        return {}
    try:
        return {str(name): int(steps) for name, steps in json.loads(note)["steps"].items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise StorageError(f"the store's note is not one of ours: {note[:80]!r}") from error

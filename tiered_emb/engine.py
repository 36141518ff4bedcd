"""Engine: one open Store, the table groups over it, and the budgets they share.

Modules that name the same path share one engine. It decides how many rows each tier may hold: ``ddr_bytes`` covers, for
all groups together, the slabs and directories in host memory, the Store's index and buffers, and the rows being moved;
the HBM tier's directory lies in host memory and counts there too. ``hbm_bytes`` covers the slabs on the device. Both
are hard: before a batch is planned, the engine adds up what it stages and what the Store may grow by, and lowers the
host tiers' capacity until the sum fits. Groups share a budget by the bytes of one row of each of their tables.

Not covered: a batch's own ids, outputs and gradients, a ``MemoryStore`` (its rows are the user's choice), rows a full
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
from storage.lmdb_store import LmdbStore, StoreConfig
from storage.memory_store import MemoryStore
from storage.schema import Column, RowSchema
from storage.store import Store, TableRef
from tiered_emb.cache import POLICIES, Directory
from tiered_emb.cold import Table
from tiered_emb.config import TableConfig, TierConfig
from tiered_emb.errors import ConfigError, TierCapacityError
from tiered_emb.group import TableGroup
from tiered_emb.metrics import EngineStats, TierStats
from tiered_emb.optim import RowRule
from tiered_emb.plan import Ids, Rows
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
        self._counts_store = not isinstance(self.store, MemoryStore)
        self._peak_bytes = 0

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

    def leave(self) -> None:
        """One user fewer; the last one flushes, and closes a Store that the engine opened."""
        self._users -= 1
        if self._users:
            return
        place = _place(self.config)
        if place is not None:
            _ENGINES.pop(place, None)
        try:
            self.flush()
        finally:
            self._workers.close()
            if self._owned:
                self.store.close()

    def add_tables(self, tables: Sequence[TableConfig], rule: RowRule, seed: int) -> list[tuple[TableGroup, TableRef]]:
        """Open ``tables`` in the Store; each one's group and reference, in order."""
        for table in tables:
            if table.name in self.tables:
                raise ConfigError(
                    f"table {table.name!r} is already used by a module of this process over the same store: "
                    f"give one of the two another name"
                )
        refs = [self.store.open_table(table.name, row_schema(table.embedding_dim, rule)) for table in tables]
        for ref in refs:
            self._shares[ref.schema] = self._shares.get(ref.schema, 0) + ref.schema.row_bytes
            self.tables[ref.name] = ref
        self._divide()
        for ref in refs:
            if ref.schema not in self.groups:
                self._add_group(ref)
        groups = [self.groups[ref.schema] for ref in refs]
        for table, group, ref in zip(tables, groups, refs, strict=True):
            group.add_table(Table(table.name, ref.number, table.init, seed))
        return list(zip(groups, refs, strict=True))

    def remove_tables(self, names: Sequence[str]) -> None:
        """Forget that a module uses these tables; their rows stay."""
        for name in names:
            self.tables.pop(name, None)

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

    def host_bytes(self) -> int:
        """What is charged to ``ddr_bytes`` now."""
        return self._charged_bytes(0, None)

    def stats(self) -> EngineStats:
        """All tiers of all groups, by name, and the Store."""
        names = [name for name in ("hbm", "ddr") if any(tier.name == name for tier in self._tiers())]
        return EngineStats([self._tier_stats(name) for name in names], self.store.stats())

    def _tiers(self) -> Iterator[Tier]:
        return (tier for group in self.groups.values() for tier in group.tiers)

    def _tier_stats(self, name: str) -> TierStats:
        tiers = [tier for tier in self._tiers() if tier.name == name]
        if name == "ddr":
            budget, used, peak = self.config.ddr_budget_bytes, self.host_bytes(), self._peak_bytes
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
            spare = self._spare_bytes(0, None) - sum(_host_bytes(tier) for tier in tiers)
            spare -= self.config.ddr_budget_bytes // 32
            rows = Directory.capacity_for(
                max(0, spare * self._shares[schema] // self._unplaced()), schema.row_bytes + 1, policy
            )
            if rows == 0:
                raise self._host_too_small(schema, spare)
            tiers.append(Tier("ddr", Directory(rows, policy), Slab(rows, dim, state, torch.device("cpu"))))
        group = TableGroup(ref.group, schema, self.store, tiers, self._workers)
        group.make_room = lambda missing, unique: self._make_room(group, missing, unique)
        self.groups[schema] = group

    def _unplaced(self) -> int:
        """Shares of the groups that have no tiers yet."""
        return sum(share for schema, share in self._shares.items() if schema not in self.groups)

    def _hbm_rows(self, schema: RowSchema) -> int:
        part = self.config.hbm_budget_bytes * self._shares[schema] // sum(self._shares.values())
        if part < schema.row_bytes:
            raise TierCapacityError(
                f"hbm_bytes is {self.config.hbm_budget_bytes}, of which {part} go to rows of {schema.row_bytes} bytes: "
                f"not one fits; raise hbm_bytes, or give 0 for no HBM tier"
            )
        return part // schema.row_bytes

    def _host_too_small(self, schema: RowSchema, spare: int) -> TierCapacityError:
        one = Directory.bytes_for(1, self.config.policy) + schema.row_bytes + 1
        return TierCapacityError(
            f"ddr_bytes is {self.config.ddr_budget_bytes}, of which {max(0, spare)} are left for rows of "
            f"{schema.row_bytes} bytes: not one fits; use at least {self.config.ddr_budget_bytes - spare + one} bytes, "
            f"or 0 for no DDR tier"
        )

    def _divide(self) -> None:
        """Lower the tiers of groups that now share their budgets with a new one."""
        if not self.groups:
            return
        for schema, group in self.groups.items():
            for tier in group.tiers:
                if tier.name == "hbm":
                    self._lower(group, tier, self._hbm_rows(schema))
        if self.config.ddr_budget_bytes:
            least = self._least_bytes(None, 1)
            self._share_host(self._host_room(0, None) - sum(least.values()), least)

    def _charged_bytes(self, missing: int, group: TableGroup | None) -> int:
        """Host memory once ``group`` moves ``missing`` rows and the Store takes as many new ones: an upper bound."""
        rows = sum(_host_bytes(tier) for tier in self._tiers())
        moving = sum(one.staging_bytes(missing if one is group else 0) for one in self.groups.values())
        return rows + moving + (self.store.memory_after(missing) if self._counts_store else 0)

    def _spare_bytes(self, missing: int, group: TableGroup | None) -> int:
        """Budget for host memory that is left then; negative if the budget would not hold."""
        charged = self._charged_bytes(missing, group)
        if charged <= self.config.ddr_budget_bytes:
            self._peak_bytes = max(self._peak_bytes, charged)
        return self.config.ddr_budget_bytes - charged

    def _make_room(self, group: TableGroup, missing: int, unique: int) -> bool:
        """Fit a batch of ``group`` into the host budget; whether a tier had to shrink.

        Raises TierCapacityError, with nothing changed, if no division of the budget would do.
        """
        if not self.config.ddr_budget_bytes or self._spare_bytes(missing, group) >= 0:
            return False
        room, least = self._host_room(missing, group), self._least_bytes(group, unique)
        spare = room - sum(least.values())
        if spare < 0:
            raise TierCapacityError(
                f"a batch of {unique} distinct rows of {group.schema.row_bytes} bytes, {missing} of them to be brought "
                f"in, needs {self.config.ddr_budget_bytes - spare} bytes of host memory with the bookkeeping and the "
                f"store's index, but ddr_bytes is {self.config.ddr_budget_bytes}: raise it to at least that or use "
                f"smaller batches"
            )
        self._share_host(spare - spare // 8, least)  # an eighth to spare: the next batches find room
        return True

    def _least_bytes(self, group: TableGroup | None, unique: int) -> dict[RowSchema, int]:
        """What the DDR tiers need at least: the rows of a batch of ``group`` where that is worked on, else one row."""
        least = {}
        for schema, one in self.groups.items():
            rows = unique + one.top.directory.pinned_rows if one is group and one.top.name == "ddr" else 1
            least[schema] = Directory.bytes_for(rows, self.config.policy) + rows * (schema.row_bytes + 1)
        return least

    def _host_room(self, missing: int, group: TableGroup | None) -> int:
        """What the DDR tiers may take together."""
        held = sum(_host_bytes(tier) for tier in self._tiers() if tier.name == "ddr")
        return self._spare_bytes(missing, group) + held

    def _share_host(self, room: int, least: dict[RowSchema, int]) -> None:
        """Lower the DDR tiers to ``least`` bytes each and a share of ``room`` more."""
        for schema, group in self.groups.items():
            part = least[schema] + max(0, room) * self._shares[schema] // sum(self._shares.values())
            self._lower(group, group.tiers[-1], Directory.capacity_for(part, schema.row_bytes + 1, self.config.policy))

    def _lower(self, group: TableGroup, tier: Tier, capacity_rows: int) -> None:
        """Lower one tier's capacity, to one row at least."""
        capacity_rows = max(1, capacity_rows)
        if capacity_rows >= tier.capacity_rows:
            return
        group.release_dropped()
        if tier.directory.pinned_rows:
            raise TierCapacityError(
                f"the {tier.name} tier must give up rows for the store's index, but {tier.directory.pinned_rows} rows "
                f"are held by forwards whose backward pass has not run: raise {tier.name}_bytes, or finish those first"
            )
        group.shrink(tier, capacity_rows)


def row_schema(dim: int, rule: RowRule) -> RowSchema:
    """What a row of ``dim`` floats holds under ``rule``: the weight, then the rule's state."""
    return RowSchema((Column("weight", "float32", dim), *rule.state_columns(dim)))


def _host_bytes(tier: Tier) -> int:
    """Host memory of a tier: bookkeeping always, rows where they lie on the host by name."""
    return tier.directory_bytes + (tier.slab_bytes if tier.name == "ddr" else 0)


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
        return MemoryStore(), True
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

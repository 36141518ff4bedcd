"""The store and the budgets of a run of `identity`: from shares of what the run needs to bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.identity_draw import Bags, Run, Tiers
from storage.heap_store import HeapStore
from storage.lmdb_store import LmdbStore, StoreConfig
from storage.memory_store import MemoryStore
from storage.store import Store
from tiered_emb import TableConfig, TierConfig
from tiered_emb.engine import row_schema

_BOOKKEEPING_BYTES = 110  # of a slot, by the most talkative of the policies
_TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, max_space_ratio=1.3)


class Place:
    """Where a run's rows rest: `name` is one of `identity_draw.STORES`."""

    def __init__(self, name: str, directory: Path) -> None:
        self._name = name
        self._path = directory / "rows"
        self._store: Store | None = HeapStore() if name == "heap" else MemoryStore() if name == "memory" else None

    def open(self) -> Store | str | None:
        """What `TierConfig.store` gets."""
        if self._name == "lmdb":
            return os.fspath(self._path)
        if self._name == "lmdb-tiny":
            self._store = LmdbStore(self._path, durability="snapshot", config=_TINY)
        return self._store

    def close(self) -> None:
        """Let go of the store, if it is ours and on a disk."""
        if isinstance(self._store, LmdbStore):
            self._store.close()
            self._store = None


def tier_config(run: Run, tiers: Tiers, store: Store | str | None, grown: float) -> TierConfig:
    """Budgets in bytes, `grown` times what should do."""
    tables = [table for spec in run.specs for table in spec.tables]
    least, most = _rows_needed(run, tables)
    width, count = sum(_row_bytes(run, table) for table in tables), len(tables)
    floor, slot = sum(tiers.floors.values()), width + count * _BOOKKEEPING_BYTES
    hbm = ddr = 0.0
    if tiers.hbm is not None:
        rows = least + tiers.hbm * (most - least) + (floor if tiers.ddr is None else 0)
        hbm = rows * width * grown
    if tiers.ddr is not None:
        start = least if tiers.hbm is None else 1
        rows = start + tiers.ddr * (most - start) + floor
        ddr = rows * slot * 9 / 8 + 2 * least * width * count + hbm / width * count * _BOOKKEEPING_BYTES
        ddr = (ddr + _fixed_bytes(run, tables, most)) * grown * 33 / 32
    widest = max(_row_bytes(run, table) for table in tables) + _BOOKKEEPING_BYTES
    room = 0 if tiers.hbm is not None and ddr else int(least * count)
    quotas = {name: max(1, min(rows + room, int((ddr or hbm) // widest))) for name, rows in tiers.quotas.items()}
    return TierConfig(
        int(hbm), int(ddr), store, tiers.policy, admission=tiers.admission, min_rows=tiers.floors, max_rows=quotas
    )


def _fixed_bytes(run: Run, tables: list[TableConfig], most: float) -> float:
    """Of what each group has, and of the store's buffers and its index of `most` rows a table."""
    groups = len({table.embedding_dim for table in tables})
    on_disk = run.store in ("lmdb", "lmdb-tiny")
    return 4_000 * groups + on_disk * (80_000 + 45_000 * groups + 16 * most * len(tables))


def _row_bytes(run: Run, table: TableConfig) -> int:
    return row_schema(table.embedding_dim, run.rule).row_bytes


def _rows_needed(run: Run, tables: list[TableConfig]) -> tuple[float, float]:
    """Rows a table: so many slots for each table of a group hold what any update waits for, and what the run asks."""
    dims = {table.name: table.embedding_dim for table in tables}
    shares = {dim: sum(one == dim for one in dims.values()) for dim in dims.values()}
    least, every = 1.0, dict[str, set[int]]()
    for forwards in _windows(run):
        asked = dict[str, set[int]]()
        for batch in forwards:
            for name, ids in _ids(run, batch):
                asked.setdefault(name, set()).update(ids)
                every.setdefault(name, set()).update(ids)
        for dim, share in shares.items():
            least = max(least, sum(len(ids) for name, ids in asked.items() if dims[name] == dim) / share)
    most = max(
        sum(len(ids) for name, ids in every.items() if dims[name] == dim) / share for dim, share in shares.items()
    )
    return np.ceil(least), max(np.ceil(most), np.ceil(least))


def _windows(run: Run) -> Iterator[list[Mapping[str, Bags]]]:
    """Batches whose rows are held at once: those between two updates."""
    held: list[Mapping[str, Bags]] = []
    for at, step in enumerate(run.steps):
        held += [step.batch, step.renamed]
        held += [run.steps[at - 1].batch] if step.body == "late" else []
        held += [one.batch for one in run.steps[at + 1 : at + 2]] if step.body == "early" else []
        if step.update:
            yield held
            held = []


def _ids(run: Run, batch: Mapping[str, Bags]) -> Iterator[tuple[str, list[int]]]:
    for spec in run.specs:
        for feature, (ids, _, _) in batch[spec.name].features.items():
            yield spec.features[feature].name, ids.tolist()

"""Rows of a checkpoint: kept by a snapshot of their store, or copied into one of the checkpoints' own; and the tiers.

A store that keeps states by name (`LmdbStore`) keeps the rows itself: a snapshot costs what was not written yet. Rows
of any other store are copied into one of the checkpoints' own, all of them each time.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from storage.interrupts import Uninterrupted
from storage.lmdb_store import LmdbStore
from storage.snapshot import Snapshot
from storage.store import RowIds, Store, TableRef
from tiered_emb.background import BackgroundState
from tiered_emb.checkpoint_files import Folder, ModuleEntry, StoreEntry, TableEntry, TierEntry
from tiered_emb.engine import Engine
from tiered_emb.group import TableGroup
from tiered_emb.progress import note_of
from tiered_emb.tables import TieredTables
from tiered_emb.tier import Tier

Modules = Mapping[str, TieredTables]


# ---- what there is


def engines_of(modules: Modules) -> list[Engine]:
    """Each engine once, in the order of the modules."""
    return list({id(module.engine): module.engine for module in modules.values()}.values())


@contextmanager
def all_roads(engines: Sequence[Engine]) -> Iterator[None]:
    """Nobody else plans or moves rows meanwhile."""
    with ExitStack() as held:
        for engine in sorted(engines, key=id):  # one order for all who take several
            held.enter_context(engine.settled())
        yield


def module_entry(module: TieredTables, store: int) -> ModuleEntry:
    """What a manifest says of a module over store number ``store``."""
    engine, rule = module.engine, module.rule
    tables = [
        TableEntry(
            one.name, one.embedding_dim, engine.seed(one.name), engine.tables[one.name].schema.to_json()["columns"]
        )
        for one in module.tables
    ]
    return ModuleEntry(store, module.steps, rule.name, rule.lr, tables)


def tiers_of(engine: Engine) -> Iterator[tuple[TableGroup, Tier, TierEntry]]:
    """Each tier, its group, and what a manifest says of it."""
    for schema, group in engine.groups.items():
        for tier in group.tiers:
            columns = schema.to_json()["columns"]
            settings = tier.directory.policy_name, engine.config.admission
            yield group, tier, TierEntry(columns, tier.name, tier.capacity_rows, *settings)


def budget_of(engine: Engine) -> dict[str, Any]:
    """What a manifest says of the budgets over a store."""
    config = engine.config
    return {
        "hbm_bytes": config.hbm_budget_bytes,
        "ddr_bytes": config.ddr_budget_bytes,
        "min_rows": dict(config.min_rows),
        "max_rows": dict(config.max_rows),
    }


# ---- saving


def save_tiers(engines: Sequence[Engine], file: IO[bytes]) -> None:
    """Write which rows all tiers hold, and what their policies know: an .npz whose names begin with the numbers of the
    store and of the tier. Holds one tier's arrays at a time."""
    with zipfile.ZipFile(file, "w") as packed:
        for number, engine in enumerate(engines):
            for place, (_, tier, _) in enumerate(tiers_of(engine)):
                for name, array in tier.save().items():
                    with packed.open(f"{number}.{place}.{name}.npy", "w", force_zip64=True) as out:
                        np.lib.format.write_array(out, array, allow_pickle=False)


def save_rows(engine: Engine, folder: Folder, tag: str, own: Path) -> StoreEntry:
    """Have a snapshot keep the rows of an engine; what folders' checkpoints do not name any more is dropped with it.

    Args:
        own: of a store for rows whose store keeps no states; made if need be.
    """
    name, store = folder.snapshot_name(tag), engine.keeper
    if store is not None:
        tiers, snapshot = entries_of(engine), engine.snapshot(name, drop=orphans(store, folder))
        return _entry(engine, folder, store, snapshot, tiers, copied=False)
    with _rows_store(own) as store:
        _copy_out(engine, store)
        snapshot = store.snapshot(name, note_of(engine.progress), drop=orphans(store, folder))
        return _entry(engine, folder, store, snapshot, entries_of(engine), copied=True)


@dataclass(frozen=True)
class BegunRows:
    """Rows of an engine that are written while training goes on; `tiers` are those of its beginning."""

    engine: Engine
    store: LmdbStore
    state: BackgroundState
    tiers: list[TierEntry]

    def complete(self, folder: Folder, tag: str) -> StoreEntry:
        """As `save_rows`, without the road; `state` has not ended by that."""
        name = folder.snapshot_name(tag)
        self.state.make(name, orphans(self.store, folder))
        snapshot = next(one for one in self.store.snapshots() if one.name == name)
        return _entry(self.engine, folder, self.store, snapshot, self.tiers, copied=False)


def begin_rows(engines: Sequence[Engine], begun: list[BegunRows]) -> bool:
    """Begin to write the rows of all engines as they are now; False if a store of theirs cannot do that.

    Args:
        begun: takes what has to be completed or abandoned, whatever is raised.
    """
    if any(engine.keeper is None for engine in engines):
        return False
    with Uninterrupted():
        for engine in engines:
            state, store = engine.begin_state(), engine.keeper
            assert state is not None and store is not None
            begun.append(BegunRows(engine, store, state, entries_of(engine)))
    return True


def entries_of(engine: Engine) -> list[TierEntry]:
    """What a manifest says of an engine's tiers."""
    return [entry for _, _, entry in tiers_of(engine)]


def _entry(
    engine: Engine, folder: Folder, store: LmdbStore, snapshot: Snapshot, tiers: list[TierEntry], *, copied: bool
) -> StoreEntry:
    path = os.path.relpath(store.path, folder.path)
    found = str(store.uuid), snapshot.name, snapshot.origin
    return StoreEntry(path, str(store.path), *found, copied, budget_of(engine), tiers)


def orphans(store: LmdbStore, folder: Folder) -> list[str]:
    """Snapshots that were made for checkpoints of a directory that are none any more, or never came to be."""
    named = {one.snapshot for manifest in folder.manifests() for one in manifest.stores}
    return [one.name for one in store.snapshots() if folder.is_ours(one.name) and one.name not in named]


def drop_orphans(folder: Folder, store: LmdbStore) -> None:
    """Let all orphans go."""
    for name in orphans(store, folder):
        store.drop_snapshot(name)


@contextmanager
def _rows_store(path: Path) -> Iterator[LmdbStore]:
    """A store that is as it was if the block fails."""
    store = LmdbStore(path, durability="snapshot")
    try:
        yield store
    except BaseException:
        store.abandon()
        raise
    store.close()


def _copy_out(engine: Engine, store: LmdbStore) -> None:
    """Have a store hold exactly the rows of an engine's, as far as its tables are concerned."""
    for name, ref in engine.tables.items():
        target = store.open_table(name, ref.schema)
        for rows, data in engine.store.scan(ref.group, table=ref.number):
            store.put(RowIds(target.group, rows.tables, rows.ids), data)
        for gone in list(_absent(store, target, engine.store, ref)):
            store.delete(gone)


def _absent(store: LmdbStore, table: TableRef, other: Store, other_table: TableRef) -> Iterator[RowIds]:
    """Rows of a table that another store has not."""
    for rows, data in store.scan(table.group, table=table.number):
        found = np.zeros(len(rows), np.bool_)
        other.get(RowIds(other_table.group, rows.tables, rows.ids), np.empty_like(data), found)
        if not found.all():
            yield RowIds(table.group, rows.tables[~found], rows.ids[~found])

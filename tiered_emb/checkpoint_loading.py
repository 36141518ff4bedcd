"""Rows of a checkpoint on their way back: where they are, whether the model has their tables, and how they get there.

Going back is `Engine.rollback`, where the engine's store has the snapshot, told by its origin; so also in a copy of the
store. Everywhere else rows are copied, block by block, into whatever store the engine has. What is copied from is open
for reading beside it, with an index of its own: some 24 bytes a row, which no budget covers.

Checks come first: `RowLoad.of` finds all that is needed and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import StorageError, StoreConfigError
from storage.lmdb_store import LmdbStore
from storage.schema import Column, RowSchema
from storage.snapshot import Snapshot
from storage.store import Store, TableRef
from tiered_emb.checkpoint_files import LEAVING, Folder, ModuleEntry, StoreEntry, TierEntry
from tiered_emb.checkpoint_rows import Modules, budget_of, module_entry, tiers_of
from tiered_emb.engine import Engine, open_engines
from tiered_emb.errors import CheckpointError
from tiered_emb.group import TableGroup
from tiered_emb.plan import Rows
from tiered_emb.row_form import form_of
from tiered_emb.tables import TieredTables
from tiered_emb.tier import Tier

_AT_ONCE = 1 << 16  # ids of rows to be deleted that are collected at once


@dataclass(frozen=True)
class Source:
    """The store of a checkpoint: open in this process (``store``), or to be opened for reading (``path``)."""

    entry: StoreEntry
    store: LmdbStore | None
    path: Path | None

    @contextmanager
    def open(self) -> Iterator[LmdbStore]:
        """The store. Raises CheckpointError if it is another one by now, or has not got the snapshot."""
        with ExitStack() as opened:
            store = self.store
            if store is None:
                assert self.path is not None
                store = opened.enter_context(LmdbStore(self.path, read_only=True))
            if str(store.uuid) != self.entry.uuid:
                raise CheckpointError(
                    f"{store.path} is store {store.uuid}, but the rows of the checkpoint are in {self.entry.uuid}: "
                    f"put that store back to {self.entry.place}"
                )
            if snapshot_of(store, self.entry.origin) is None:
                raise _gone(store, self.entry)
            yield store


def snapshot_of(store: LmdbStore, origin: str) -> Snapshot | None:
    """The snapshot of an origin, if the store has it."""
    return next((one for one in store.snapshots() if one.origin == origin), None)


def _gone(store: LmdbStore, entry: StoreEntry) -> CheckpointError:
    there = ", ".join(repr(one.name) for one in store.snapshots()[-5:]) or "none"
    return CheckpointError(
        f"{store.path} has no snapshot {entry.snapshot!r} any more that holds the checkpoint's rows; the newest there "
        f"are: {there}. It was dropped, or gone back behind: load another checkpoint"
    )


def is_gone(entry: StoreEntry) -> bool:
    """Whether a store that is open in this process says that it has the snapshot no more."""
    store = _open_here(entry.uuid)
    return store is not None and snapshot_of(store, entry.origin) is None


def _open_here(uuid: str) -> LmdbStore | None:
    return next((store for store in _stores_here() if str(store.uuid) == uuid), None)


def _stores_here() -> list[LmdbStore]:
    """Open in this process, where none may be opened twice."""
    return [engine.keeper for engine in open_engines() if engine.keeper is not None]


def source_of(entry: StoreEntry, folder: Folder) -> Source:
    """Where to read the rows of a checkpoint. Raises CheckpointError if they are nowhere to be found."""
    if (store := _open_here(entry.uuid)) is not None:
        return Source(entry, store, None)
    places = [Path(os.path.normpath(folder.path / entry.path)), Path(entry.place)]
    for place in places:
        if place.exists():  # open here it has another uuid, which will be said
            here = [store for store in _stores_here() if store.path == Path(os.path.realpath(place))]
            return Source(entry, here[0] if here else None, place)
    raise CheckpointError(
        f"the rows of the checkpoint were in the store {entry.place}, which is neither there nor at {places[0]}: "
        f"bring it back there"
    )


@dataclass(frozen=True)
class RowLoad:
    """How the rows of one engine come to be those of a checkpoint.

    Attributes:
        engine: whose rows.
        modules: of the model, over it, and what the checkpoint says of each.
        stores: of the checkpoint.
        snapshot: to go back to; None = copy.
        sources: by number of the store, for copying.
    """

    engine: Engine
    modules: Mapping[str, tuple[TieredTables, ModuleEntry]]
    stores: Sequence[StoreEntry]
    snapshot: str | None
    sources: Mapping[int, Source]

    @classmethod
    def of(cls, engine: Engine, modules: Modules, saved: Mapping[str, ModuleEntry], stores: list[StoreEntry],
           folder: Folder) -> RowLoad:  # fmt: skip
        """Look at what there is. Raises CheckpointError; changes nothing."""
        mine = {name: (one, saved[name]) for name, one in modules.items() if one.engine is engine}
        for name, (module, entry) in mine.items():
            _check_tables(name, module, entry)
        numbers = sorted({entry.store for _, entry in mine.values()})
        store, first = engine.keeper, stores[numbers[0]]
        if store is not None and len(numbers) == 1 and (found := snapshot_of(store, first.origin)):
            _check_later(store, found, folder)
            return cls(engine, mine, stores, found.name, {})
        for number in numbers:
            if store is not None and str(store.uuid) == stores[number].uuid:
                raise _gone(store, stores[number])
        sources = {number: source_of(stores[number], folder) for number in numbers}
        for source in sources.values():
            with _said(source), source.open():
                pass
        return cls(engine, mine, stores, None, sources)

    def run(self, folder: Folder) -> None:
        """Change the rows. Requires: the roads of all engines."""
        if self.snapshot is not None:
            self.engine.rollback(self.snapshot)
            return
        self.engine.cancel_ahead()
        guard = folder.snapshot_name("loading" + LEAVING)  # which is no tag
        if self.engine.keeper is None:
            self.engine.flush()
        else:
            self.engine.snapshot(guard, drop=[guard])
        try:
            self._copy()
            for name, steps in self.steps.items():
                self.modules[name][0].set_steps(steps)
            self.engine.flush()
        except BaseException:
            if self.engine.keeper is not None:
                self.engine.rollback(guard)
            raise
        if self.engine.keeper is not None:
            self.engine.keeper.drop_snapshot(guard)

    def _copy(self) -> None:
        self.engine.forget()
        for number, source in self.sources.items():
            with _said(source), source.open() as store:
                found = snapshot_of(store, source.entry.origin)
                assert found is not None
                with store.at(found.name) as view:
                    for module, entry in self.modules.values():
                        if entry.store == number:
                            _copy_in(module, entry, view)

    @property
    def reset(self) -> list[str]:
        """Tables whose rows lose their optimizer state: another rule would not know what it is."""
        if self.snapshot is not None:
            return []
        return [
            table.name
            for module, entry in self.modules.values()
            for table in entry.tables
            if _state_columns(RowSchema.from_json({"columns": table.columns}))
            != _state_columns(module.engine.tables[table.name].schema)
        ]

    @property
    def rounded(self) -> list[str]:
        """Tables whose rows rest in another precision than they were saved in."""
        if self.snapshot is not None:
            return []
        return [
            table.name
            for module, entry in self.modules.values()
            for table in entry.tables
            if form_of(RowSchema.from_json({"columns": table.columns})).codec
            is not module.engine.groups[module.engine.tables[table.name].schema].form.codec
        ]

    @property
    def steps(self) -> dict[str, int]:
        """Updates so far, by module: from 0 on where the optimizer state is lost."""
        lost = set(self.reset)
        return {
            name: 0 if lost & {table.name for table in entry.tables} else entry.steps
            for name, (_, entry) in self.modules.items()
        }

    def _resize(self, saved: Sequence[TierEntry]) -> None:
        """Give tiers, which are empty, the sizes that they had: what a store's index took then it may not take now."""
        for schema in self.engine.groups:
            columns = schema.to_json()["columns"]
            sizes = {one.tier: one.capacity_rows for one in saved if one.columns == columns}
            now = {tier.name: tier.capacity_rows for tier in self.engine.groups[schema].tiers}
            if sizes != now and sizes.keys() == now.keys():
                self.engine.resize_empty(schema, sizes)

    def warm(self, file: Path) -> list[str]:
        """Give the tiers the rows they had; why not, where they stay empty. Raises what the store raises."""
        numbers = {entry.store for _, entry in self.modules.values()}
        if len(numbers) > 1:
            return ["modules over one store were saved over several"]
        (number,) = numbers
        saved = self.stores[number]
        if saved.budget == budget_of(self.engine):
            self._resize(saved.tiers)
        pairs = [
            (group, tier, one)
            for one in saved.tiers
            for group, tier, entry in tiers_of(self.engine)
            if (entry.tier, entry.columns) == (one.tier, one.columns)
        ]
        if len(pairs) != len(saved.tiers) or len(pairs) != len(list(tiers_of(self.engine))):
            return ["the tiers are others than those that were saved"]
        if why := [text for _, tier, one in pairs for text in _differences(tier, self.engine, one)]:
            return why
        try:
            with np.load(file, allow_pickle=False) as arrays:
                loads = [_load(group, tier, arrays, f"{number}.{i}.") for i, (group, tier, *_) in enumerate(pairs)]
        except BaseException:  # slots have names, and not the rows that go with them
            self.engine.forget_tiers()
            raise
        if not all(loads):
            self.engine.forget_tiers()
            return ["the saved tiers hold rows of tables that are not open, or have other bookkeeping"]
        return []


def _check_tables(name: str, module: TieredTables, saved: ModuleEntry) -> None:
    now = {one.name: one for one in module_entry(module, 0).tables}
    then = {one.name: one for one in saved.tables}
    if odd := sorted(now.keys() ^ then.keys()):
        where = (
            "the module has it, the checkpoint has not" if odd[0] in now else "the checkpoint has it, the module not"
        )
        raise CheckpointError(f"module {name!r}: table {odd[0]!r}: {where}; make the module with the tables of then")
    for table, one in then.items():
        for what, was, is_now in (("dimension", one.dim, now[table].dim), ("seed", one.seed, now[table].seed)):
            if was != is_now:
                raise CheckpointError(
                    f"table {table!r} has {what} {is_now}, in the checkpoint {was}: make its module with {what} {was}"
                )


def _check_later(store: LmdbStore, snapshot: Snapshot, folder: Folder) -> None:
    """Raise CheckpointError if going back would take snapshots that are somebody else's."""
    names = [one.name for one in store.snapshots()]
    later = [name for name in names[names.index(snapshot.name) + 1 :] if not folder.is_ours(name)]
    if later:
        raise CheckpointError(
            f"{store.path} has newer snapshots than the checkpoint ({', '.join(map(repr, later[:5]))}), which going "
            f"back would take: drop them first (drop_snapshot(), `tiered-emb store drop`), or load into another store"
        )


@contextmanager
def _said(source: Source) -> Iterator[None]:
    """What a store says that cannot be read, with what it was wanted for."""
    try:
        yield
    except StorageError as error:
        if isinstance(error, StoreConfigError):
            raise CheckpointError(f"the rows of the checkpoint cannot be read: {error}") from error
        error.add_note(f"while the rows of a checkpoint were read from {source.path or source.entry.place}")
        raise


def _copy_in(module: TieredTables, entry: ModuleEntry, view: Any) -> None:
    """Have a module's tables hold exactly the rows that a snapshot has of them."""
    for table in entry.tables:
        ref = module.engine.tables[table.name]
        group = module.engine.groups[ref.schema]
        _empty(module.engine.store, ref)
        schema = RowSchema.from_json({"columns": table.columns})
        source = view.open_table(table.name, schema)
        fit = _fitting(schema, ref.schema)
        for rows, data in view.scan(source.group, table=source.number):
            group.put_cold(rows.tables, rows.ids, fit(data))


def _fitting(saved: RowSchema, now: RowSchema) -> Callable[[NDArray[np.uint8]], Rows]:
    """Rows as they were saved -> as they are worked on now: weights and, of the same optimizer, its state; else zeros.

    From another precision weights come as they were rounded to it.
    """
    then, here = form_of(saved), form_of(now)
    same = _state_columns(saved) == _state_columns(now)

    def fit(packed: NDArray[np.uint8]) -> Rows:
        rows = then.unpacked(packed)
        if same:
            return rows
        fresh = np.zeros((len(rows), here.width), np.float32)
        fresh[:, : here.dim] = rows[:, : here.dim]
        return fresh

    return fit


def _state_columns(schema: RowSchema) -> tuple[Column, ...]:
    form = form_of(schema)
    return schema.columns[len(form.codec.columns(form.dim)) :]


def _empty(store: Store, table: TableRef) -> None:
    """Delete all rows of a table; bounded, whatever their number."""
    while True:
        blocks, count = [], 0
        for rows, _ in store.scan(table.group, table=table.number):
            blocks.append(rows)
            count += len(rows)
            if count >= _AT_ONCE:
                break
        if not blocks:
            return
        for rows in blocks:
            store.delete(rows)


def _differences(tier: Tier, engine: Engine, then: TierEntry) -> list[str]:
    """Why a saved directory does not fit a tier."""
    pairs = {
        "rows of capacity": (tier.capacity_rows, then.capacity_rows),
        "policy": (engine.config.policy, then.policy),
        "admission": (engine.config.admission, then.admission),
    }
    return [f"{tier.name} tier: {what} {mine}, saved {was}" for what, (mine, was) in pairs.items() if mine != was]


def _load(group: TableGroup, tier: Tier, arrays: Any, prefix: str) -> bool:
    """Name the saved rows and read them; False = they do not fit, and the tier is empty."""
    saved = {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}
    known = np.array(list(group.cold.tables), np.uint32)
    if not np.isin(saved.get("tables", known), known).all():
        return False
    try:
        slots = tier.load(saved)
    except ValueError:
        return False
    group.fill(tier, slots)
    return True

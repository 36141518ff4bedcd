"""Checkpoints of training: rows, dense part, random generators, the loader's position and the tiers, as of one step.

::

    save_checkpoint("run.checkpoints", model, optimizer, loader)      between two steps
    load_checkpoint("run.checkpoints", model, optimizer, loader)      the newest; then train on

A checkpoint is a directory (`tiered_emb.checkpoint_files`) and, for each store under the model, a snapshot of it
(`tiered_emb.checkpoint_rows`). Rows that did not change since the last checkpoint are not written again. It is made in
an order that leaves the one before usable whatever happens:

1. changed rows are handed to the stores; dense part and tiers are written to ``<tag>.tmp``;
2. each store makes a snapshot; files are fsynced; then the manifest is written;
3. ``<tag>.tmp`` is renamed to ``<tag>``. From here on the checkpoint is there.
4. Older ones beyond ``keep_last`` are renamed away, then their snapshots dropped, then their files removed.

With ``background`` the call returns after a part of step 1: changed rows are marked, not handed over. The rest is done
while training goes on, rows and all as they were (`tiered_emb.background`, `tiered_emb.checkpoint_pending`).

What a crash leaves, a ``.tmp`` and snapshots that no manifest names, goes with the next save.

A load checks all there is to check before it changes anything: files, snapshots, tables, dimensions, seeds, the dense
part's shapes. Nothing that is read can run code.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from storage.errors import StorageError
from storage.interrupts import Uninterrupted
from tiered_emb.checkpoint_dense import (
    Stateful,
    check_beside,
    check_readable,
    dense_state,
    load_beside,
    random_states,
    read_dense,
    state_of,
    write_dense,
)
from tiered_emb.checkpoint_files import (
    DENSE,
    LEAVING,
    TIERS,
    Folder,
    Manifest,
    ModuleEntry,
    StoreEntry,
    now_s,
    synced,
    written,
)
from tiered_emb.checkpoint_loading import RowLoad, is_gone
from tiered_emb.checkpoint_pending import PendingCheckpoint, await_pending
from tiered_emb.checkpoint_rows import (
    BegunRows,
    Modules,
    all_roads,
    begin_rows,
    drop_orphans,
    engines_of,
    module_entry,
    save_rows,
    save_tiers,
)
from tiered_emb.engine import Engine
from tiered_emb.errors import CheckpointError, ConfigError
from tiered_emb.pipeline import Positioned
from tiered_emb.tables import TieredTables


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint.

    Attributes:
        path: the directory of checkpoints.
        tag: its name there.
        number: counts the checkpoints of a directory upwards.
        step: the most updates of any tiered module.
        time_s: when it was made, in seconds of Unix time.
        extra: what was given to `save_checkpoint`; None in a list.
        cold: after a load, why tiers start empty; nothing where they hold what they held.
        reset: after a load, tables whose optimizer state starts from zero.
        rounded: after a load, tables whose rows were saved in another precision.
        dropped: after a load, tags of newer checkpoints that went with the rows that it went back behind; after a save,
            those beyond ``keep_last``.
    """

    path: Path
    tag: str
    number: int
    step: int
    time_s: float
    extra: Any = None
    cold: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def list_checkpoints(path: str | os.PathLike[str]) -> list[Checkpoint]:
    """All whole checkpoints of a directory, oldest first; none if it is not there.

    Left out are those whose snapshot a store that is open in this process does not have any more; of other stores
    `load_checkpoint` finds out. Raises CheckpointError for one that is damaged.
    """
    folder = Folder.at(path)
    if folder is not None:
        await_pending(folder.path)
    return [] if folder is None else [_described(folder, one) for one in folder.manifests() if not _lost(one)]


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Stateful | None = None,
    loader: Positioned | None = None,
    tag: str | None = None,
    *,
    extra: Any = None,
    keep_last: int | None = None,
    rows_only: bool = False,
    background: Literal[False] = False,
) -> Checkpoint: ...


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Stateful | None = None,
    loader: Positioned | None = None,
    tag: str | None = None,
    *,
    extra: Any = None,
    keep_last: int | None = None,
    rows_only: bool = False,
    background: Literal[True],
) -> PendingCheckpoint[Checkpoint]: ...


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Stateful | None = None,
    loader: Positioned | None = None,
    tag: str | None = None,
    *,
    extra: Any = None,
    keep_last: int | None = None,
    rows_only: bool = False,
    background: bool = False,
) -> Checkpoint | PendingCheckpoint[Checkpoint]:
    """Make the state between two steps durable, as one: training goes on from it to the same bits.

    Rows stay in their stores, each of which makes a snapshot; those of a store in memory (``store=None``, or one that
    keeps no states by name) are written to a store at ``path/rows``, all of them each time.

    Args:
        path: a directory of checkpoints; made if need be.
        model: a tiered module, or a model that has some. Of everything else in it the ``state_dict()`` is saved.
        optimizer: of the dense part; anything with ``state_dict()``. (Rows have their optimizer state with them; the
            learning rate of their rule is saved too.)
        loader: whose ``state_dict()`` says where it is: a loader, or the `Prefetch` over it, whose position is that
            of the batch given last.
        tag: the checkpoint's name; None = "step-N".
        extra: whatever belongs to it, of tensors, numbers, strings, lists, tuples and dicts.
        keep_last: of all checkpoints of the directory so many stay, this one included; None = all.
        rows_only: keep the tiered modules, and leave the dense part and the random generators to somebody else.
        background: return at once, and write while training goes on: what is saved is the state of the call. (Rows of
            a store that is in memory are written before the return.) Until it is whole no other checkpoint is made or
            loaded, and modules are not flushed or closed: who does that waits.

    Returns:
        The checkpoint; with ``background`` what waits for it.

    Raises:
        ConfigError: the model has no tiered module; the tag is taken or cannot be one; what is to be saved could not
            be loaded; ``keep_last`` is below 1.
        CheckpointError: in the middle of a step; the directory is none of checkpoints.
        StoreFullError, StoreIOError, OSError: no room, or a disk that fails; the last checkpoint is as it was. Where
            that comes when the new one is whole and older ones go, it is a warning.
    """
    modules = _tiered(model)
    if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
        raise ConfigError(f"keep_last is {keep_last!r}; expected 1 or more checkpoints, or None to keep all")
    for module in modules.values():
        module.check_between_steps("save a checkpoint")
    beside = {"optimizer": state_of("optimizer", optimizer), "loader": state_of("loader", loader), "extra": extra}
    folder, engines = Folder(path, create=True), engines_of(modules)
    await_pending(folder.path)
    tag = folder.new_tag(tag, max(module.steps for module in modules.values()))
    rows: list[BegunRows] = []  # that nobody would complete if this failed
    try:
        with all_roads(engines):
            beside |= {"dense": None, "random": None}
            if not rows_only:
                beside |= {"dense": dense_state(model, modules), "random": random_states()}
            begun = _begin(folder, tag, modules, beside, rows if background else None)
        complete = partial(_complete, begun, engines, keep_last, extra)
        if not background:
            return complete()
        with Uninterrupted():
            pending = PendingCheckpoint(folder.path, complete)
            rows.clear()
        return pending
    except BaseException:
        for one in rows:
            one.state.abandon()
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Stateful | None = None,
    loader: Stateful | None = None,
    tag: str | None = None,
    *,
    check: Callable[[Any], None] | None = None,
) -> Checkpoint:
    """Go back, or forward, to a checkpoint: rows, optimizer state, steps, dense part, random generators, loader.

    The model's tiered modules have the tables of then; budgets, policies, tiers, and the store may be others.

    - Over the store of then, or a copy of it that has its snapshots, the store goes back, for all modules over it:
      what came later is gone, newer checkpoints included (``dropped``).
    - Over another store the rows are copied into it, in bounded blocks, with some 24 bytes a row for two indexes while
      that goes on; a copy that fails leaves an `LmdbStore` as it was. With another row rule the optimizer state of the
      rows is zero, steps count from 0, and a warning says so.

    Tiers of the same sizes and policies hold what they held, so that the same rows leave them next; others start empty
    (``cold``). What is prepared ahead is let go; a `Prefetch` is made after the load.

    Args:
        path: the directory of checkpoints.
        model, optimizer, loader: as saved; None = what was saved of an optimizer or a loader is left alone. The loader
            is the loader itself.
        tag: of the checkpoint; None = the newest.
        check: called with ``extra`` before anything changes; what it raises stops the load.

    Returns:
        The checkpoint, with ``extra``.

    Raises:
        CheckpointError: there is none; it is damaged or not whole; it is of another model; or a step is under way.
            Nothing has changed.
        StorageError: a store failed. What was loaded until then is: load again.
    """
    modules = _tiered(model)
    for module in modules.values():
        module.check_between_steps("load a checkpoint")
    folder = Folder(path)
    await_pending(folder.path)
    manifest = _chosen(folder, tag)
    folder.check(manifest)
    engines = engines_of(modules)
    with all_roads(engines):
        _check_modules(modules, manifest)
        loads = [RowLoad.of(engine, modules, manifest.modules, manifest.stores, folder) for engine in engines]
        beside = read_dense(folder.path / manifest.tag / DENSE)
        check_beside(model, modules, optimizer, loader, beside, manifest.tag)
        if check is not None:
            check(beside["extra"])
        dropped = _load_rows(folder, manifest, loads)
        cold = [reason for one in loads for reason in one.warm(folder.path / manifest.tag / TIERS)]
    load_beside(model, optimizer, loader, beside)
    _set_rates(modules, manifest)
    reset = tuple(table for one in loads for table in one.reset)
    if reset:
        warnings.warn(
            f"tables {', '.join(reset[:5])} have another row rule than in checkpoint {manifest.tag!r}: their optimizer "
            f"state starts from zero",
            stacklevel=2,
        )
    found = _described(folder, manifest)
    rounded = tuple(table for one in loads for table in one.rounded)
    if rounded:
        warnings.warn(
            f"tables {', '.join(rounded[:5])} were saved in another precision than checkpoint {manifest.tag!r} is "
            f"loaded into: their rows are as they were rounded to it, and rounded anew",
            stacklevel=2,
        )
    found = replace(found, extra=beside["extra"], cold=tuple(cold), dropped=tuple(dropped))
    return replace(found, reset=reset, rounded=rounded)


def _described(folder: Folder, manifest: Manifest) -> Checkpoint:
    return Checkpoint(folder.path, manifest.tag, manifest.number, manifest.step, manifest.time_s)


def _tiered(model: nn.Module) -> dict[str, TieredTables]:
    modules = {name: one for name, one in model.named_modules() if isinstance(one, TieredTables)}
    if not modules:
        raise ConfigError(f"{type(model).__name__} has no tiered module: save it with torch.save")
    return modules


# ---- saving


@dataclass(frozen=True)
class _Begun:
    """All that a checkpoint will consist of; `rows` are those that are still to be written, or `stores` has them."""

    folder: Folder
    tag: str
    time_s: float
    step: int
    modules: dict[str, ModuleEntry]
    rows: list[BegunRows]
    stores: list[StoreEntry]

    def complete(self) -> Manifest:
        """Steps 2 and 3 of the module's docstring."""
        place = self.folder.path / (self.tag + LEAVING)
        stores = self.stores or self._complete_rows()
        files = {DENSE: synced(place / DENSE), TIERS: synced(place / TIERS)}
        number = self.folder.next_number()
        manifest = Manifest(self.tag, number, self.time_s, self.step, self.modules, stores, files)
        self.folder.finish(manifest)
        return manifest

    def _complete_rows(self) -> list[StoreEntry]:
        try:
            return [one.complete(self.folder, self.tag) for one in self.rows]
        except BaseException:
            for one in self.rows:
                one.state.abandon()
            raise


def _begin(folder: Folder, tag: str, modules: Modules, beside: dict[str, Any], rows: list[BegunRows] | None) -> _Begun:
    """Step 1, and rows with it unless they are written in the background. Requires: the roads.

    Args:
        rows: takes those that are written in the background, whatever is raised; None = none are.
    """
    engines = engines_of(modules)
    place = folder.begin(tag)
    later = rows is not None and begin_rows(engines, rows)
    if not later:
        for engine in engines:
            engine.write_back()  # which may lower tiers, so before they are saved
    written(place / TIERS, lambda file: save_tiers(engines, file))
    written(place / DENSE, lambda file: write_dense(beside, file))
    check_readable(place / DENSE)
    own = [] if later else _own_stores(engines, folder)
    stores = [save_rows(engine, folder, tag, store) for engine, store in own]
    step = max(module.steps for module in modules.values())
    entries = {name: module_entry(module, engines.index(module.engine)) for name, module in modules.items()}
    return _Begun(folder, tag, now_s(), step, entries, list(rows or ()), stores)


def _complete(begun: _Begun, engines: list[Engine], keep_last: int | None, extra: Any) -> Checkpoint:
    """Steps 2 to 4."""
    try:
        manifest = begun.complete()
        dropped = _drop_older(begun.folder, engines, keep_last)
    finally:  # and not before: who goes back, or closes a store, would leave a manifest without its snapshot
        for one in begun.rows:
            one.state.end()
    return replace(_described(begun.folder, manifest), extra=extra, dropped=tuple(dropped))


def _own_stores(engines: list[Engine], folder: Folder) -> list[tuple[Engine, Path]]:
    """Each engine, and where its rows go if its store keeps no states: ``rows``, ``rows-2``, ..."""
    found, copied = [], 0
    for engine in engines:
        copied += engine.keeper is None
        found.append((engine, folder.path / ("rows" if copied < 2 else f"rows-{copied}")))
    return found


def _drop_older(folder: Folder, engines: list[Engine], keep_last: int | None) -> list[str]:
    """Step 4: the tags that went. The new checkpoint is whole, and what goes wrong here is no more than a warning."""
    extra: list[str] = []
    try:
        extra = [] if keep_last is None else [one.tag for one in folder.manifests()[:-keep_last]]
        if extra:
            folder.withdraw(extra)
            for engine in engines:
                if engine.keeper is not None:
                    drop_orphans(folder, engine.keeper)
            folder.clean()
    except (CheckpointError, StorageError, OSError) as error:
        with suppress(UserWarning):  # where warnings are errors this one would deny that there is the checkpoint
            warnings.warn(
                f"the checkpoint is whole, but older ones in {folder.path} are not all gone: {error}", stacklevel=2
            )
    return [tag for tag in extra if not (folder.path / tag).exists()]


# ---- loading


def _chosen(folder: Folder, tag: str | None) -> Manifest:
    """The checkpoint of a tag, or the newest whose snapshots are there as far as that is known."""
    if tag is not None:
        return folder.manifest(tag)
    there = folder.manifests()
    lost = [one.tag for one in there if _lost(one)]
    kept = [one for one in there if one.tag not in lost]
    if not kept:
        what = f"; snapshots of {', '.join(lost)} were dropped from their store" if lost else ""
        raise CheckpointError(f"{folder.path} has no checkpoint to load{what}")
    if lost and kept[-1].number < there[-1].number:
        warnings.warn(f"passed over, because their snapshots were dropped: {', '.join(lost)}", stacklevel=3)
    return kept[-1]


def _lost(manifest: Manifest) -> bool:
    return any(is_gone(store) for store in manifest.stores)


def _check_modules(modules: Modules, manifest: Manifest) -> None:
    if odd := sorted(modules.keys() ^ manifest.modules.keys()):
        where = "the model" if odd[0] in modules else "the checkpoint"
        raise CheckpointError(
            f"only {where} has a tiered module {odd[0]!r}; the checkpoint has "
            f"{', '.join(map(repr, manifest.modules))}: load it into a model of the same structure"
        )


def _load_rows(folder: Folder, manifest: Manifest, loads: list[RowLoad]) -> list[str]:
    """Change the rows; tags of checkpoints that are gone with that."""
    back = {one.engine.identity for one in loads if one.snapshot is not None}
    newer = [one for one in folder.manifests() if one.number > manifest.number]
    later = [one for one in newer if back & {store.uuid for store in one.stores}]
    folder.withdraw(one.tag for one in later)
    try:
        for one in loads:
            one.run(folder)
    except BaseException:
        folder.restore(one.tag for one in later if not _lost(one))
        raise
    folder.clean()
    return [one.tag for one in later]


def _set_rates(modules: Modules, manifest: Manifest) -> None:
    """Learning rates of the row rules, where the rule is the same."""
    for name, entry in manifest.modules.items():
        module = modules[name]
        if module.rule.name == entry.rule and module.rule.lr != entry.lr:
            module.optimizer.param_groups[0]["lr"] = entry.lr

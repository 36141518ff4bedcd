"""TieredTables: what the modules share - tables in an engine, their optimizer, their life from opening to close.

Shapes: N ids, D dimension, K state width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import nn

from storage.errors import StoreClosedError
from storage.interrupts import Uninterrupted
from storage.snapshot import Snapshot
from storage.store import TableRef
from tiered_emb.cache import room
from tiered_emb.config import TableConfig, TierConfig, as_int
from tiered_emb.engine import Engine
from tiered_emb.errors import (
    CheckpointError,
    ConfigError,
    InvalidBatchError,
    ModuleClosedError,
    TierCapacityError,
    TraceError,
)
from tiered_emb.group import TableGroup, unseen
from tiered_emb.inputs import checked_ids, kind_of, listed
from tiered_emb.lookup import LookupInput, Question, Updates, UpdateTime, forget_failed_passes, passing
from tiered_emb.metrics import EngineStats
from tiered_emb.optim import RowRule, RowwiseAdagrad
from tiered_emb.optim.facade import RowOptimizer
from tiered_emb.plan import Bags, IdBatch, Ids, Rows

_Given = TypeVar("_Given")
_CHUNK_BYTES = 1 << 22  # of rows read or written at once by rows() and set_rows()


@dataclass(frozen=True)
class ModuleOptions:
    """What every module takes beside its tables.

    Attributes:
        tiers: budgets and store; ``TierConfig()`` if None.
        optimizer: the row rule of all tables; ``RowwiseAdagrad(lr=0.01)`` if None.
        seed: of rows never stored; None = the one a stored table has, else drawn from torch's generator.
        update: "backward" applies the rule at the end of the backward pass, "step" in ``optimizer.step()``.
        device: of the HBM tier and the outputs; "cpu" may stand in for a GPU.
    """

    tiers: TierConfig | None = None
    optimizer: RowRule | None = None
    seed: int | None = None
    update: UpdateTime = "backward"
    device: torch.device | str | None = None


class Ahead(Protocol):
    """Who prepares forwards before they come: :mod:`tiered_emb.pipeline`."""

    def take(self, module: TieredTables, inputs: Sequence[LookupInput]) -> Sequence[Question] | None:
        """What was prepared for a forward with these inputs, once it is; None = nothing. Each is given once."""

    def cancel(self, module: int) -> None:
        """Let go of everything that is prepared for a module, by its `id`, and was not taken. Any thread may ask that
        has the road of the module's engine."""

    def stop(self) -> None:
        """The module closes: prepare nothing more for it."""


class TieredTables(nn.Module):
    """What the modules share: tables in an engine, their optimizer, their life. Not used by itself.

    Attributes:
        tables: the tables, in order.
    """

    def __init__(self, tables: Sequence[TableConfig], options: ModuleOptions) -> None:
        super().__init__()
        _check_options(options)
        self.tables = tuple(tables)
        self.device = None if options.device is None else torch.device(options.device)
        self._rule = RowwiseAdagrad(lr=0.01) if options.optimizer is None else options.optimizer
        self._optimizer: RowOptimizer | None = None
        self._closed = False
        self._ahead: Ahead | None = None
        self._breaks = Uninterrupted.breaks
        with Uninterrupted():
            self._engine = Engine.open(TierConfig() if options.tiers is None else options.tiers, self.device)
            try:
                opened = self._engine.add_tables(self.tables, self._rule, _checked_seed(options.seed))
            except BaseException:
                self._engine.leave([])
                raise
        self._opened = dict(zip((table.name for table in self.tables), opened, strict=True))
        names = [table.name for table in self.tables]
        self._updates = Updates(options.update, self._current_rule, self._engine.steps(names), self._count_steps)
        self._engine.join(self)
        self._dropped = weakref.finalize(self, self._engine.abandon, names)
        self._dropped.atexit = False

    @property
    def optimizer(self) -> RowOptimizer:
        """The rule as a ``torch.optim.Optimizer``; ``param_groups[0]["lr"]`` is the learning rate.

        Made when first asked for: a torch optimizer imports half of torch, which a table should not cost.
        """
        if self._optimizer is None:
            later = self._updates.time == "step"
            apply = partial(self._updates.apply, -1) if later else None
            self._optimizer = optimizer = RowOptimizer(self._rule, apply, self._updates.discard)
            self._updates.recorded = lambda: optimizer.note(self._updates.finite)
            if self._updates.pending and later:
                self._updates.recorded()
        return self._optimizer

    def flush(self) -> None:
        """Make every changed row, optimizer state included, durable in the store as one state."""
        self._check_open()
        self._engine.flush()

    def snapshot(self, name: str) -> Snapshot:
        """As :meth:`flush`, and keep that state of the store under a name, to go back to.

        Raises ConfigError if the store keeps no states by name, and as `LmdbStore.snapshot`.
        """
        self._check_open()
        return self._engine.snapshot(name)

    def rollback(self, name: str) -> None:
        """Go back to a snapshot of the store: rows, optimizer state and steps, of every module over that store.

        What changed since is gone, flushed or not, and so are newer snapshots. Between two steps, in the thread that
        trains: a forward made before cannot be gone backward from (PlanReleasedError), and gradients that wait for
        ``optimizer.step()`` are forgotten.

        Raises CheckpointError in the middle of a backward pass, and as `Engine.rollback`; nothing has changed then.
        """
        self._check_open()
        check_no_pass(f"go back to {name!r}")
        self._engine.rollback(name)

    def set_steps(self, steps: int) -> None:
        """Count updates from here on."""
        self._updates.steps = steps
        self._count_steps(steps)

    def went_back(self) -> None:
        """As `tiered_emb.engine.Member.went_back`."""
        self._updates.discard()
        self._updates.steps = self._engine.steps([table.name for table in self.tables])

    def check_between_steps(self, what: str) -> None:
        """Raise CheckpointError, and ModuleClosedError, unless a step is complete, so that one can do ``what``."""
        self._check_open()
        check_no_pass(what)
        self._updates.drop_failed()
        if self._updates.pending:
            raise CheckpointError(
                f"gradients of the module of {listed([table.name for table in self.tables])} wait for its "
                f"optimizer.step(): {what} after that, or after its zero_grad()"
            )

    @property
    def engine(self) -> Engine:
        """What the module shares with others over its store."""
        return self._engine

    @property
    def steps(self) -> int:
        """Updates of the rows so far, over all lives of the tables."""
        return self._updates.steps

    @property
    def rule(self) -> RowRule:
        """The row rule, at the present learning rate."""
        return self._current_rule()

    def get_extra_state(self) -> dict[str, Any]:
        """What ``state_dict()`` has of the rows: not they, but where they are and how far. Small."""
        place = self._engine.keeper
        return {
            "store": None if place is None else str(place.path),
            "uuid": self._engine.identity,
            "steps": self.steps,
            "rule": self.rule.name,
            "tables": {table.name: [table.embedding_dim, self._engine.seed(table.name)] for table in self.tables},
        }

    def set_extra_state(self, state: Any) -> None:
        """Check that ``state_dict()`` was made over the rows that are here.

        Raises CheckpointError if they are of other tables, of another store, or further or less far.
        """
        mine = self.get_extra_state()
        for what, remedy in (
            ("tables", "make the module with the same names, dimensions and seed"),
            (
                "uuid",
                f"open the module over the store of then ({state.get('store') or 'it was in memory, and is gone'})",
            ),
            ("steps", "go back to where the rows were, with load_checkpoint() or rollback()"),
        ):
            if state.get(what) != mine[what]:
                raise CheckpointError(
                    f"the state is of rows with {what} {state.get(what)}, but here they have {mine[what]}: rows are "
                    f"not in a state_dict(); {remedy}, or leave this entry out"
                )

    def close(self) -> None:
        """Flush and let go of the tiers and the store; a second close does nothing.

        If the store cannot take the rows its error is raised and the module is still open, so that it can be tried
        again; not so StoreClosedError, after which the module is closed and the rows the store had not taken are lost.
        TraceWriteError says that the end of the recorded trace could not be written; the rows are stored, and the
        module is closed.
        After a second Ctrl-C in mid-step nothing is written: the store opens at its last flush.
        """
        if self._closed:
            return
        self.stop_ahead()
        if self._broken():
            self._abandon()
            return
        self._updates.discard()
        with Uninterrupted():
            try:
                self._engine.leave([table.name for table in self.tables])
            except (StoreClosedError, TraceError):  # for good: there is nothing to try again
                self._end()
                raise
            self._end()

    def stop_ahead(self) -> None:
        """Have nobody prepare forwards before they come."""
        if self._ahead is not None:
            self._ahead.stop()

    def _end(self) -> None:
        self._closed = True
        self._engine.cancels.pop(id(self), None)
        self._dropped.detach()
        self._updates.close()

    def stats(self) -> EngineStats:
        """Capacity, rows, bytes, hits, misses, evictions and write-backs of each tier, and the store's counts."""
        self._check_open()
        return self._engine.stats()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied and pickled."""
        raise TypeError(
            f"the module of {listed([table.name for table in self.tables])} cannot be copied or pickled: its rows lie "
            f"in tiers and a store, not in it; flush() it, and make one with the same arguments where it is needed"
        )

    def scan(self) -> Iterator[tuple[str, Ids, Rows]]:
        """Table name, ids (N,) and rows (N, D + K) with optimizer state, block by block, of all rows ever updated.

        Flushes first.
        """
        self.flush()
        return self._engine.scan([table.name for table in self.tables])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._abandon()
        else:
            self.close()

    def _abandon(self) -> None:
        """Let go without a flush: an interrupt may have come in the middle of a step, which is no complete state."""
        if not self._closed:
            self.stop_ahead()
            self._updates.discard()
            try:
                self._engine.abandon([table.name for table in self.tables])
            finally:
                self._end()

    def _answers(self, inputs: Sequence[LookupInput]) -> list[tuple[torch.Tensor, ...]]:
        """The outputs of one forward's look-ups: of what was prepared ahead, else prepared now."""
        trains = self.training and torch.is_grad_enabled()
        if trains:  # in the thread that trains: for any other, a pass may be under way
            self._updates.drop_failed()
        if trains and self._ahead is not None and (prepared := self._ahead.take(self, inputs)):
            with Uninterrupted():
                return self._answered(prepared, trains)
        with self._engine.road, Uninterrupted():
            questions = [one.ask() for one in inputs]
            return self._with_room(lambda: self._answered(questions, trains))

    def _with_room(self, verb: Callable[[], _Given]) -> _Given:
        """What a verb gives that needs room in the tiers; for want of it, what is prepared for later forwards and then
        what failed passes hold is let go. Requires: the road."""
        for let_go in (self._engine.cancel_ahead, forget_failed_passes):
            try:
                return verb()
            except TierCapacityError:
                let_go()
        return verb()

    def _answered(self, questions: Sequence[Question], trains: bool) -> list[tuple[torch.Tensor, ...]]:
        """Requires: the road, unless the questions were prepared."""
        try:
            with self._engine.recorded([question.batch for question in questions]) if trains else nullcontext():
                if trains:
                    self._plan([question for question in questions if question.plan is None])
                return [question.lookup.answer(question, self.training) for question in questions]
        except BaseException:
            for question in questions:
                question.withdraw()
            raise

    def _plan(self, questions: Sequence[Question], at: Callable[[str], None] = unseen) -> None:
        """Bring in the rows of look-ups; room is made for all of them before the first one pins its rows."""
        batches = [(question.lookup.group, question.batch) for question in questions]
        with self._engine.room_for(batches) if len(questions) > 1 else nullcontext():
            for question in questions:
                question.plan = question.lookup.group.prepare(question.batch, at)

    def prepare(self, questions: Sequence[Question], at: Callable[[str], None]) -> None:
        """Bring in the rows that a later forward will ask for, and pin them.

        Args:
            questions: the forward's, each asked of its ``lookup_inputs``.
            at: as ``TableGroup.prepare``.

        Raises:
            What the forward would; nothing stays pinned then.
        """
        with self._engine.road:
            try:
                self._plan(questions, at)
            except BaseException:
                for question in questions:
                    question.withdraw()
                raise

    def announce(self, questions: Sequence[Question]) -> None:
        """Have the store begin to read what a later forward will miss, where that saves time."""
        with self._engine.road:
            for question in questions:
                question.lookup.group.announce(question.batch)

    def prepare_ahead(self, ahead: Ahead | None) -> None:
        """Ask ``ahead`` for what each forward needs before preparing it; None = nobody."""
        self._ahead = ahead
        if ahead is None:
            self._engine.cancels.pop(id(self), None)
        else:
            self._engine.cancels[id(self)] = ahead.cancel

    @property
    def road(self) -> AbstractContextManager[bool]:
        """The engine's, for who plans or moves its rows."""
        return self._engine.road

    @property
    def order_matters(self) -> bool:
        """Whether which rows leave a tier, and when, bears on any number: where they rest in fewer bits."""
        return any(group.form.lossy for group, _ in self._opened.values())

    def lookup_inputs(self, *arguments: Any) -> list[LookupInput]:
        """What a forward with these arguments asks of each look-up."""
        raise NotImplementedError("for the modules")

    def _rows(self, table: TableConfig, ids: torch.Tensor) -> torch.Tensor:
        self._check_open()
        group, ref = self._opened[table.name]
        wanted = checked_ids(table, ids)
        numbers = np.full(len(wanted), ref.number, np.uint32)
        out = torch.empty((len(wanted), table.embedding_dim), dtype=torch.float32, device="cpu")
        chunk = _chunk_rows(group)
        for first in range(0, len(wanted), chunk):
            part = slice(first, first + chunk)
            with self._engine.road:
                rows = group.read_rows(numbers[part], wanted[part])
            out[part] = torch.from_numpy(rows[:, : table.embedding_dim])
        return out

    def _set_rows(self, table: TableConfig, ids: torch.Tensor, values: torch.Tensor) -> None:
        self._check_open()
        group, ref = self._opened[table.name]
        wanted = checked_ids(table, ids)
        if not isinstance(values, torch.Tensor) or values.is_complex():
            raise InvalidBatchError(f"table {table.name!r}: values are {kind_of(values)}; expected a real tensor")
        if values.shape != (len(wanted), table.embedding_dim):
            raise InvalidBatchError(
                f"table {table.name!r}: values have shape {tuple(values.shape)}; expected "
                f"({len(wanted)}, {table.embedding_dim}), a row for each id"
            )
        weights = values.detach().to("cpu", torch.float32).numpy()
        chunk = max(1, min(_chunk_rows(group), room.most_at_once(group.top.directory, ref.number) // 4))
        for first in range(0, len(wanted), chunk):
            part = slice(first, first + chunk)
            with self._engine.road:
                self._with_room(partial(_overwrite, group, ref, wanted[part], weights[part]))

    def _current_rule(self) -> RowRule:
        return self._rule if self._optimizer is None else self._optimizer.rule

    def _count_steps(self, steps: int) -> None:
        self._engine.count_steps([table.name for table in self.tables], steps)

    def _to_device(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.device is None else out.to(self.device)

    def _broken(self) -> bool:
        """Whether a second Ctrl-C cut short what may have been a verb on this module's rows."""
        return self._breaks != Uninterrupted.breaks

    def _check_open(self) -> None:
        if self._broken() and not self._closed:
            raise ModuleClosedError(
                f"the module of {listed([table.name for table in self.tables])} lived through a second Ctrl-C in the "
                f"middle of moving rows; close() it, which writes nothing more, and open it again at its last flush"
            )
        if self._closed:
            raise ModuleClosedError(
                f"the module of {listed([table.name for table in self.tables])} is closed; make a new one"
            )


def check_no_pass(what: str) -> None:
    """Raise CheckpointError in the middle of a backward pass, whose rows it would take to do ``what``."""
    if passing():
        raise CheckpointError(f"a backward pass is under way: {what} between two steps")


def _check_options(options: ModuleOptions) -> None:
    """Raise ConfigError for an option that is not of its kind."""
    if options.update not in ("backward", "step"):
        raise ConfigError(f"update is {options.update!r}; expected 'backward' or 'step'")
    if not isinstance(options.tiers, TierConfig | None):
        raise ConfigError(f"tiers is {options.tiers!r}; expected a TierConfig, such as TierConfig(ddr_bytes='256MiB')")
    rule = options.optimizer
    if rule is not None and (isinstance(rule, type) or not hasattr(rule, "state_columns")):
        raise ConfigError(f"optimizer is {rule!r}; expected a row rule, such as RowwiseAdagrad(lr=0.01)")


def _chunk_rows(group: TableGroup) -> int:
    return max(1, _CHUNK_BYTES // group.form.worked_bytes)


def _checked_seed(seed: int | None) -> int | None:
    """A seed of 64 bits, or None."""
    if seed is None:
        return None
    number = as_int(seed)
    if number is None or not 0 <= number < 1 << 64:
        raise ConfigError(f"seed is {seed!r}; expected an integer from 0 to 2^64 - 1")
    return number


def _overwrite(group: TableGroup, ref: TableRef, ids: Ids, weights: Rows) -> None:
    """Give rows new weights and zero optimizer state; the last of equal ids wins."""
    ends = np.arange(len(ids) + 1, dtype=np.int64)
    bags = Bags(torch.from_numpy(ends), None, "sum")
    batch: IdBatch = group.dedupe(ids, ends[[0, -1]], np.array([ref.number], np.uint32), bags)
    rows = np.zeros((len(batch.ids), group.row_width), np.float32)
    rows[batch.inverse.numpy(), : group.dim] = weights
    with Uninterrupted():
        plan = group.prepare(batch)
        try:
            group.overwrite(plan, rows)
        finally:
            group.release(plan)

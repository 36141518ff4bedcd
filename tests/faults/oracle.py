"""The expected state: what a store may hold after its writer's death, kept where that death cannot reach it.

The writer does numbered operations, each a pure function of a seed and its number, and notes in a journal beside the
store that it begins one and that the store has acknowledged it (`Journal`: one `write` a line, so that the journal
survives the process, which is all that dies; a power cut ends the store's file system, not the journal's).

Afterwards `Expected` works through the journal and judges what was found:

- Every row carries the number of the event that put it, and all its other bytes follow from that, its table and its id:
  a row that was torn, mixed up or is another's is recognised without looking anything up (`Undetected`).
- durability "snapshot": what is found is to the bit the state of the last acknowledged flush, or of a later one
  that was begun.
- durability "commit": what was acknowledged by a flush is there, and of each group what came later is there up to
  some event and not beyond it, for the log is in order (`Lost`).
- Snapshots that were acknowledged are there and read back to the bit, dropped ones are not; of an operation that was
  begun, all has happened or nothing.

What was found is what the next run goes on from, so damage that one run did not show has all the later ones to do so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage import RowIds, RowSchema, Store, TableRef
from storage.testing import EXTREME_IDS, schema_of

Key: TypeAlias = tuple[int, int]  # position in TABLES, id
Versions: TypeAlias = dict[Key, int]
State: TypeAlias = tuple[Versions, bytes]  # rows and note

TABLES: tuple[tuple[str, RowSchema], ...] = (("a", schema_of(8)), ("b", schema_of(8)), ("c", schema_of(3, 2)))
GROUPS = (0, 0, 1)  # of each table: equal schemas are in one group
IDS = np.concatenate([EXTREME_IDS, np.arange(10, 700)])
CLOSE = "close"  # in the journal, instead of a number
EVENTS = 1 << 12  # events that an operation may have
COMPLETES = frozenset({"flush", "compact", "reopen", "snapshot"})  # operations that end in a complete state
KEEP_LAST = 3  # snapshots
SNAPSHOTS = ("put", "snapshot", "put", "rollback", "delete", "snapshot", "put", "snapshot", "drop", "put", "compact")
HOLDS_THE_LOCK = ("put", "delete", "look", "put", "flush", "put", "snapshot", "rollback", "put", "drop", "compact")
_KINDS = {
    "put": 0.58,
    "delete": 0.15,
    "look": 0.06,
    "flush": 0.07,
    "compact": 0.04,
    "reopen": 0.04,
    "snapshot": 0.03,
    "drop": 0.01,
    "rollback": 0.02,
}
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


class Lost(AssertionError):
    """Something acknowledged is not there, or something deleted is."""


class Undetected(AssertionError):
    """A store handed out bytes that nobody put."""


class Crashed(AssertionError):
    """A process died of a signal nobody sent, hung, or raised what is no error of a store."""


@dataclass(frozen=True)
class Operation:
    """What a writer does next.

    Attributes:
        number: counts all operations on one store, over all its writers.
        kind: one of `_KINDS`.
        table: position in TABLES.
        ids: of the rows concerned; a put may name one twice.
    """

    number: int
    kind: str
    table: int
    ids: NDArray[np.int64]

    @property
    def versions(self) -> NDArray[np.int64]:
        """The number of each event: of each row that is put or deleted."""
        return self.number * EVENTS + np.arange(len(self.ids))


def operation(seed: int, number: int, kinds: Sequence[str] | None = None) -> Operation:
    """The operation of that number in the workload of that seed."""
    rng = np.random.default_rng([seed, number])
    kind = str(rng.choice(list(_KINDS), p=list(_KINDS.values()))) if kinds is None else kinds[number % len(kinds)]
    count = int(rng.choice([1, 7, 60, 250]))
    first = int(rng.integers(len(IDS)))
    ids = np.roll(IDS, -first)[:count] if rng.random() < 0.5 else rng.choice(IDS, count)
    return Operation(number, kind, int(rng.integers(len(TABLES))), ids)


def snapshots_after(op: Operation, names: Sequence[str]) -> list[str]:
    """Names of the snapshots after an operation, oldest first; a rollback goes to the last of them, if there is one."""
    at = op.number % len(names) if names else 0
    if op.kind == "snapshot":
        return [*names, f"s{op.number}"][-KEEP_LAST:]
    if op.kind == "drop":
        return [*names[:at], *names[at + 1 :]]
    return list(names[: at + 1]) if op.kind == "rollback" else list(names)


def rows_of(versions: NDArray[np.int64], table: int, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The bytes of rows: the version, then what follows from it, the table and the id."""
    with np.errstate(over="ignore"):
        mixed = versions.astype(np.uint64) * np.uint64(_MIX[0]) ^ ids.astype(np.uint64) * np.uint64(_MIX[1])
        words = (mixed[:, None] + np.arange(table + 1, table + 9, dtype=np.uint64)) * np.uint64(_MIX[2])
    words[:, 0] = versions
    row_bytes = TABLES[table][1].row_bytes
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(ids), 64)[:, :row_bytes]


def versions_of(table: int, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The events that rows found are of.

    Raises:
        Undetected: a row is nothing that was ever put under its id.
    """
    versions = np.ascontiguousarray(rows[:, :8]).view(np.int64).reshape(-1)
    wrong = np.flatnonzero((rows_of(versions, table, ids) != rows).any(1))
    if len(wrong):
        raise Undetected(
            f"{len(wrong)} rows of table {TABLES[table][0]}, that of id {ids[wrong[0]]} first, are no row of theirs"
        )
    return versions


def open_tables(store: Store) -> list[TableRef]:
    """All tables; they are made if need be."""
    return [store.open_table(name, schema) for name, schema in TABLES]


def read_all(store: Store) -> Versions:
    """What a store holds, by scan; and get must say the same of every id that exists.

    Raises:
        Undetected: rows that nobody put, a row twice, or get and scan differ.
    """
    tables = open_tables(store)
    numbers = {table.number: position for position, table in enumerate(tables)}
    found: Versions = {}
    for group in sorted(set(GROUPS)):
        for rows, data in store.scan(tables[GROUPS.index(group)].group):
            for number in np.unique(rows.tables).tolist():
                here, table = rows.tables == number, numbers[number]
                versions = versions_of(table, rows.ids[here], data[here]).tolist()
                named = [(table, id) for id in rows.ids[here].tolist()]
                if len(set(named)) < len(named) or not found.keys().isdisjoint(named):
                    raise Undetected("a scan gave a row twice")
                found.update(zip(named, versions, strict=True))
    if read_ids(store, tables, IDS) != found:
        raise Undetected("get and scan differ")
    return found


def read_ids(store: Store, tables: Sequence[TableRef], ids: NDArray[np.int64]) -> Versions:
    """What a store holds of some ids in each table, by get."""
    seen: Versions = {}
    for position, table in enumerate(tables):
        out, found = np.zeros((len(ids), table.schema.row_bytes), np.uint8), np.zeros(len(ids), np.bool_)
        store.get(RowIds.of(table, ids), out, found)
        versions = versions_of(position, ids[found], out[found])
        seen.update(zip([(position, id) for id in ids[found].tolist()], versions.tolist(), strict=True))
    return seen


class Journal:
    """What a writer has begun and what was acknowledged: a line `b NUMBER`, then `d NUMBER` or `f NUMBER ERROR`.

    `close` in place of a number is the writer's last close.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, *words: object) -> None:
        """Write a line at once."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    @staticmethod
    def read(path: Path) -> list[list[str]]:
        """The words of every line."""
        return [line.split(maxsplit=2) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Expected:
    """See the module's docstring.

    Attributes:
        seed, kinds: of the workload.
        base, note: the last acknowledged complete state.
        next_number: of the operation that the next writer begins with.
        events: (key, version) of each row put or deleted (None) since, by group, in order.
        states: (events of each group, note) of each complete state begun since.
        unsure: whether an operation has failed since and part of it may have been done.
        kept: rows and note of each snapshot, oldest first.
        maybe: what `kept` may have become by an operation that was begun, and the rows and note that a rollback gives.
    """

    seed: int
    kinds: Sequence[str] | None = None
    base: Versions = field(default_factory=dict)
    note: bytes = b""
    next_number: int = 0
    events: list[list[tuple[Key, int | None]]] = field(default_factory=lambda: [[], []])
    states: list[tuple[list[int], bytes]] = field(default_factory=list)
    unsure: bool = False
    kept: dict[str, State] = field(default_factory=dict)
    maybe: list[tuple[dict[str, State], State | None]] = field(default_factory=list)

    def follow(self, lines: Iterable[list[str]]) -> None:
        """Take in what a writer said before it died.

        Raises:
            Undetected, Crashed: the writer said that it saw something wrong.
        """
        for what, *words in lines:
            if what == "w":
                raise Undetected(" ".join(words))
            if what == "x":
                raise Crashed(" ".join(words))
            if words[0] != CLOSE:
                self.next_number = int(words[0]) + 1
            done = None if words[0] == CLOSE else operation(self.seed, int(words[0]), self.kinds)
            if what == "b":
                self._begin(done)
            elif what == "f":
                self.unsure = True
            else:
                self._end(done)

    def _end(self, done: Operation | None) -> None:
        """It was acknowledged."""
        if self.maybe:
            self.kept, back = self.maybe[-1]
            if back is not None:
                self.base, self.note = dict(back[0]), back[1]
                self._forget()
        self.maybe = []
        if done is None or done.kind in COMPLETES:
            self.base, self.note = self.newest(), self.states[-1][1]
            self._forget()

    def _begin(self, op: Operation | None) -> None:
        if op is None or op.kind in COMPLETES:
            kept = self.states[-1][1] if self.states else self.note
            note = note_of(op.number) if op is not None and op.kind in ("flush", "snapshot") else kept
            self.states.append(([len(events) for events in self.events], note))
        if op is not None and op.kind in ("snapshot", "drop", "rollback"):
            names = snapshots_after(op, list(self.kept))
            known = self.kept | {f"s{op.number}": (self.newest(), note_of(op.number))}
            goes_back = op.kind == "rollback" and names
            self.maybe.append(({name: known[name] for name in names}, known[names[-1]] if goes_back else None))
        if op is not None and op.kind in ("put", "delete"):
            versions = op.versions.tolist() if op.kind == "put" else [None] * len(op.ids)
            keys = [(op.table, id) for id in op.ids.tolist()]
            self.events[GROUPS[op.table]].extend(zip(keys, versions, strict=True))

    def _forget(self) -> None:
        self.events, self.states, self.unsure = [[] for _ in self.events], [], False

    def newest(self) -> Versions:
        """What readers see if nothing has failed."""
        return self._after([len(events) for events in self.events])

    def _after(self, counts: Sequence[int]) -> Versions:
        rows = dict(self.base)
        for events, count in zip(self.events, counts, strict=True):
            for key, version in events[:count]:
                if version is None:
                    rows.pop(key, None)
                else:
                    rows[key] = version
        return rows

    def judge(self, found: Versions, note: bytes, durability: str, snapshots: dict[str, State] | None = None) -> None:
        """Decide whether what was found is allowed, and go on from there.

        Args:
            snapshots: their rows and notes, oldest first; None = nobody looked.

        Raises:
            Lost: it is not.
        """
        back = self._judge_snapshots(snapshots, found, note)
        if back:
            self.base, self.note = found, note
            self._forget()
            return
        if durability == "snapshot":
            self._judge_state(found, note)
        else:
            self._judge_rows(found, note)
        self.base, self.note = found, note
        self._forget()

    def _judge_snapshots(self, seen: dict[str, State] | None, found: Versions, note: bytes) -> bool:
        """Snapshots are those before or after what was begun; whether it was a rollback that has happened."""
        ways: list[tuple[dict[str, State], State | None]] = [(self.kept, None), *self.maybe]
        fitting = [(kept, back) for kept, back in ways if seen is None or list(kept) == list(seen)]
        if not fitting:
            raise Lost(f"snapshots {list(seen or ())}, expected {' or '.join(str(list(kept)) for kept, _ in ways)}")
        for name, (rows, text) in fitting[-1][0].items() if seen is not None else ():
            if seen[name] != (rows, text):
                raise Lost(f"snapshot {name}: {difference(seen[name][0], rows)}; note {seen[name][1]!r}, not {text!r}")
        if seen is not None:
            self.kept = fitting[-1][0]
        self.maybe = []
        backs = [back for _, back in fitting if back is not None]
        if all(back is not None for _, back in fitting) and (found, note) not in backs:
            raise Lost(f"later snapshots are gone by a rollback, and the rows are not what it gives: note {note!r}")
        return (found, note) in backs

    def _judge_state(self, found: Versions, note: bytes) -> None:
        nothing = [0] * len(self.events)
        for counts, text in [(nothing, self.note), *self.states]:
            if note == text and found == self._after(counts):
                return
        raise Lost(
            f"a state of {len(found)} rows with note {note!r} is none that was begun since the last one: "
            f"{difference(found, self.base)}; note {self.note!r}, {len(self.states)} states begun since"
        )

    def _judge_rows(self, found: Versions, note: bytes) -> None:
        least = [counts for counts, text in [([0] * len(self.events), self.note), *self.states] if text == note]
        if not least:
            raise Lost(f"note {note!r}: neither that of the last acknowledged state, {self.note!r}, nor of a later one")
        changed = {key for events in self.events for key, _ in events}
        here, there = ({k: v for k, v in rows.items() if k not in changed} for rows in (found, self.base))
        if here != there:
            raise Lost(f"rows that nobody touched: {difference(here, there)}")
        for group, events in enumerate(self.events):
            self._judge_group(found, group, events, least[0][group])

    def _judge_group(self, found: Versions, group: int, events: list[tuple[Key, int | None]], least: int) -> None:
        """There must be an event up to which all is there and behind which nothing is."""
        history: dict[Key, list[tuple[int, int | None]]] = {}
        for at, (key, version) in enumerate(events, 1):
            history.setdefault(key, [(0, self.base.get(key))]).append((at, version))
        possible = np.ones(len(events) + 1, np.bool_)
        possible[:least] = False
        for key, steps in history.items():
            seen = found.get(key)
            ends = [at for at, _ in steps[1:]] + [len(events) + 1]
            allowed = np.zeros_like(possible)
            for (at, version), end in zip(steps, ends, strict=True):
                if version == seen:
                    allowed[at:end] = True
            if not allowed[least:].any():
                raise Lost(
                    f"{named(key)} is {told(seen)}, was {told(steps[0][1])}; since: {[told(v) for _, v in steps[1:]]}"
                )
            if not self.unsure:
                possible &= allowed
        if not possible.any():
            raise Lost(
                f"group {group}: {len(events)} changes since a flush, and a later one is there without an earlier one"
            )


def note_of(number: int) -> bytes:
    """The note of the flush that is operation `number`."""
    return str(number).encode()


def told(version: int | None) -> str:
    """An event in words."""
    return "missing" if version is None else f"of operation {version // EVENTS}"


def named(key: Key) -> str:
    """A row in words."""
    return f"row {key[1]} of table {TABLES[key[0]][0]}"


def difference(found: Versions, expected: Versions) -> str:
    """How two states differ, in words."""
    wrong = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    some = "; ".join(f"{named(k)} is {told(found.get(k))}, not {told(expected.get(k))}" for k in wrong[:3])
    return f"{len(wrong)} rows differ: {some}"

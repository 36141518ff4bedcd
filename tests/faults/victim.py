"""The processes that are killed: a writer that works through a workload, and whatever else a test needs beside it.

All come from one fork server that has the store and its kernels loaded, so that a life costs some milliseconds, and the
process of the tests itself forks nothing and opens no store that may be damaged: reading it back is a process too
(`inspect`), whose death is a finding and not the end of the tests.

Nothing here depends on which thread makes a system call or on how many there are.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from storage import LmdbStore, RowIds, StorageError, StoreConfig, StoreFullError, StoreMissingError
from tests.faults.oracle import (
    CLOSE,
    IDS,
    KEEP_LAST,
    Crashed,
    Expected,
    Journal,
    Lost,
    Undetected,
    Versions,
    difference,
    note_of,
    open_tables,
    operation,
    read_all,
    read_ids,
    rows_of,
    snapshots_after,
)

CHANGES = "pwrite64,writev,pwritev,write,fdatasync,fsync,rename,ftruncate,fallocate,mkdir,unlink"
FILES = ("data.mdb", "lock.mdb", "manifest.json", "manifest.json.tmp", "owner", "index", "index.tmp", "")
PATIENCE_S = 120  # a process that has not ended by then hangs


def config(**more: Any) -> StoreConfig:
    """Segments of 8 KiB, so that a few hundred rows make several."""
    sizes = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=16, map_size_bytes=1 << 28)
    return dataclasses.replace(sizes, **more)


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.faults.warm"])


@dataclass(frozen=True)
class Ended:
    """How a process ended: what it returned, or the error that it raised; the signal that it died of, or 0."""

    result: Any
    error: BaseException | None
    signal: int

    def value(self) -> Any:
        """What it returned.

        Raises:
            Crashed: it died. What it raised is raised here too.
        """
        if self.signal:
            raise Crashed(f"a process died of {signal.Signals(self.signal).name}")
        if self.error is not None:
            raise self.error
        return self.result


class Child:
    """A process of the fork server that runs `function(talk, *arguments)`; `talk` is its end of a pipe to here."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.talk, theirs = _SERVER.Pipe()
        self._process = _SERVER.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = int(self._process.pid or 0)

    def end_of_either(self, other: Child) -> None:
        """Wait until this process or another has ended by itself.

        Raises:
            Crashed: neither does.
        """
        if not connection.wait([self._process.sentinel, other._process.sentinel], PATIENCE_S):
            raise Crashed(f"processes {self.pid} and {other.pid} hang")

    def ends(self, patience_s: float) -> bool:
        """Whether it ends by itself in so much time."""
        self._process.join(patience_s)
        return not self.alive

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def finish_off(self) -> Ended:
        """Kill it unless it has ended, and wait."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.end()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal.

        Raises:
            Crashed: it has ended by itself; or what it raised.
        """
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            raise Crashed(f"ended before its time and returned {self.end().value()!r}") from None

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        """What the process says next.

        Raises:
            Crashed: it says nothing in time.
            EOFError: it has ended.
        """
        if not self.talk.poll(patience_s):
            raise Crashed(f"process {self.pid} hangs")
        try:
            return self.talk.recv()
        except ConnectionError as error:
            raise EOFError from error

    def end(self, patience_s: float = PATIENCE_S) -> Ended:
        """Wait until it has ended; a process that hangs is killed and is a Crashed."""
        said: tuple[Any, BaseException | None] = (None, None)
        try:
            while True:
                heard = self.hear(patience_s)
                if isinstance(heard, tuple) and heard[:1] == ("ended",):
                    said = heard[1:]
        except EOFError:
            self._process.join(patience_s)
        finally:
            if self._process.is_alive():
                self.kill()
            self._process.join()
            self.talk.close()
        code = self._process.exitcode or 0
        self._process.close()
        return Ended(*said, max(0, -code))


def _run(talk: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    os.environ["PYTHONFAULTHANDLER"] = ""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        said: tuple[Any, BaseException | None] = (function(talk, *arguments), None)
    except StorageError as error:
        said = (None, error)
    except (Lost, Undetected, Crashed) as error:
        said = (None, error)
    except BaseException:
        said = (None, Crashed(traceback.format_exc()))
    with suppress(BrokenPipeError):  # nobody may be left to hear it
        talk.send(("ended", *said))
    talk.close()


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(talk, *arguments)` in a process; what it returns, or what it raises."""
    return Child(function, *arguments).end().value()


# ---- the writer


def write(
    talk: Connection, path: Path, durability: str, sizes: StoreConfig, expected: Expected, journal: Path, last: int
) -> None:
    """Work through the workload from `expected.next_number` to before `last`, until killed.

    Says "open", and waits for a word before it opens anything; where there is no room it says "full" and does the same
    operation again after the next word.
    """
    talk.recv()
    said = Journal(journal)
    writer = _Writer(path, durability, sizes, expected, said)
    number: Any = expected.next_number
    try:
        writer.open()
        talk.send("open")
        while number < last:
            said.note("b", number)
            if writer.do(number):
                number += 1
            else:
                talk.send("full")
                talk.recv()
        talk.send("done")
        talk.recv()
        number = CLOSE
        said.note("b", CLOSE)
        writer.store.close()
        said.note("d", CLOSE)
    except StorageError as error:
        said.note("f", number, type(error).__name__)
        raise
    except (Lost, Undetected) as error:
        said.note("w", error)
        raise
    except BaseException:
        said.note("x", repr(traceback.format_exc()))
        raise


class _Writer:
    def __init__(self, path: Path, durability: str, sizes: StoreConfig, expected: Expected, said: Journal) -> None:
        self._arguments: dict[str, Any] = {"durability": durability, "config": sizes}
        self._path, self._expected, self._said = path, expected, said
        self.rows = dict(expected.base)
        self.kept = dict(expected.kept)

    def open(self) -> None:
        self.store = LmdbStore(self._path, **self._arguments)
        self.tables = open_tables(self.store)

    def do(self, number: int) -> bool:
        """One operation; False if there was no room for it. Reads afterwards what it may have changed."""
        op = operation(self._expected.seed, number, self._expected.kinds)
        try:
            getattr(self, f"_{op.kind}")(op)
        except StoreFullError as error:
            self._said.note("f", number, type(error).__name__)
            return False
        self._said.note("d", number)
        return True

    def _put(self, op: Any) -> None:
        data = np.array(rows_of(op.versions, op.table, op.ids))
        self.store.put(RowIds.of(self.tables[op.table], op.ids), data)
        data[:] = 0xEE  # the caller's arrays are the caller's again
        self.rows.update(zip([(op.table, id) for id in op.ids.tolist()], op.versions.tolist(), strict=True))

    def _delete(self, op: Any) -> None:
        self.store.delete(RowIds.of(self.tables[op.table], op.ids))
        for id in op.ids.tolist():
            self.rows.pop((op.table, id), None)

    def _look(self, op: Any) -> None:
        seen = read_ids(self.store, self.tables, np.unique(op.ids))
        ids = set(op.ids.tolist())
        expected = {key: version for key, version in self.rows.items() if key[1] in ids}
        if seen != expected:
            raise Lost(f"put and acknowledged, and not readable: {difference(seen, expected)}")

    def _flush(self, op: Any) -> None:
        self.store.flush(note_of(op.number))

    def _snapshot(self, op: Any) -> None:
        names = snapshots_after(op, list(self.kept))
        for name in list(self.kept)[:1]:
            with self.store.at(name) as view:
                if read_all(view) != self.kept[name][0]:
                    raise Lost(f"snapshot {name}: {difference(read_all(view), self.kept[name][0])}")
        self.store.snapshot(f"s{op.number}", note_of(op.number), keep_last=KEEP_LAST)
        self.kept[f"s{op.number}"] = (dict(self.rows), note_of(op.number))
        self.kept = {name: self.kept[name] for name in names}

    def _drop(self, op: Any) -> None:
        names = snapshots_after(op, list(self.kept))
        for name in [name for name in self.kept if name not in names]:
            self.store.drop_snapshot(name)
            del self.kept[name]

    def _rollback(self, op: Any) -> None:
        names = snapshots_after(op, list(self.kept))
        if names:
            self.store.rollback(names[-1], drop_later=True)
            self.kept = {name: self.kept[name] for name in names}
            self.rows = dict(self.kept[names[-1]][0])
            if read_all(self.store) != self.rows:
                raise Lost(f"after going back: {difference(read_all(self.store), self.rows)}")

    def _compact(self, op: Any) -> None:
        self.store.compact()

    def _reopen(self, op: Any) -> None:
        self.store.close()
        self.open()
        if read_all(self.store) != self.rows:
            raise Lost(f"after close and open: {difference(read_all(self.store), self.rows)}")


def inspect(talk: Connection, path: Path, durability: str, read_only: bool = False) -> tuple[Versions, bytes, int]:
    """Open a store, read all of it and close it: rows, note, size on disk."""
    with LmdbStore(path, durability=durability, config=config(), read_only=read_only) as store:  # type: ignore[arg-type]
        try:
            open_tables(store)
        except StoreMissingError:  # the writer died before it had made them
            return {}, store.note, store.stats().disk_bytes
        return read_all(store), store.note, store.stats().disk_bytes


def inspect_snapshots(
    talk: Connection, path: Path, durability: str, read_only: bool = False
) -> dict[str, tuple[Versions, bytes]]:
    """Rows and notes of all snapshots of a store."""
    with LmdbStore(path, durability=durability, config=config(), read_only=read_only) as store:  # type: ignore[arg-type]
        found = {}
        for one in store.snapshots():
            with store.at(one.name) as view:
                found[one.name] = (read_all(view), view.note)
        return found


# ---- strace


class Strace:
    """strace on a process, to end or spoil its N-th system call that changes a file of the store."""

    def __init__(self, pid: int, path: Path, calls: str, inject: str) -> None:
        files = [f"-P{path / name}" for name in FILES]
        command = ["strace", "-f", "-o", "/dev/null", "-p", str(pid), *files, "-e", f"trace={calls}"]
        self._process = subprocess.Popen(
            [*command, "-e", f"inject={calls}:{inject}"], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if "attached" not in line:
            raise AssertionError(f"strace: {line}")

    def end(self) -> None:
        """Wait until it has seen the process end."""
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.wait(PATIENCE_S)


def warm_up() -> None:
    """Load every kernel before the first fork."""
    directory = Path(tempfile.mkdtemp(prefix="faults"))
    with LmdbStore(directory / "s", config=config()) as store:
        tables = open_tables(store)
        for number in range(40):
            table = number % len(tables)
            versions = number * 1000 + np.arange(len(IDS))
            store.put(RowIds.of(tables[table], IDS), rows_of(versions, table, IDS))
            store.delete(RowIds.of(tables[table], IDS[number::40]))
        store.snapshot("a")
        store.put(RowIds.of(tables[0], IDS), rows_of(np.arange(len(IDS)), 0, IDS))
        store.compact()
        store.snapshot("b")
        with store.at("a") as view:
            read_all(view)
        store.rollback("a", drop_later=True)
        store.drop_snapshot("a")
        read_all(store)
    for read_only in (False, True):
        with LmdbStore(directory / "s", config=config(), read_only=read_only) as store:
            read_all(store)
    shutil.rmtree(directory)

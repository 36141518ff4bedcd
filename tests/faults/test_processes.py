"""Several processes and one store: two writers, stopped ones, killed readers, forks."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from storage import LmdbStore, RowIds, StoreLockedError
from tests.faults.damage import refusal
from tests.faults.lives import Lives, wait_for
from tests.faults.oracle import HOLDS_THE_LOCK, IDS, TABLES, Undetected, difference, open_tables, read_all
from tests.faults.tally import TALLY
from tests.faults.victim import Child, call, config, inspect

DURABILITIES = pytest.mark.parametrize("durability", ["commit", "snapshot"])


def working(directory: Path, durability: str, operations: int = 40) -> tuple[Lives, Child]:
    """A store and a writer that has done so much and has it open."""
    lives = Lives(directory, durability, seed=600)
    writer = lives.born(operations)
    writer.talk.send("go")
    wait_for(writer, "open")
    wait_for(writer, "done")
    return lives, writer


@pytest.mark.parametrize("way", ["path", "symlink", "hard links", "data file"])
def test_a_second_writer_is_refused_at_once_and_told_who_has_it(tmp_path: Path, way: str) -> None:
    lives, writer = working(tmp_path, "commit")
    other = tmp_path / "other"
    if way == "path":
        other = lives.path
    elif way == "symlink":
        other.symlink_to(lives.path)
    else:
        other.mkdir()
        for name in (
            ("data.mdb", "manifest.json", "owner", "lock.mdb") if way == "hard links" else ("data.mdb", "manifest.json")
        ):
            os.link(lives.path / name, other / name)
    error = call(refusal, other, False)
    assert isinstance(error, StoreLockedError)
    assert f"process {writer.pid}" in str(error)
    if way in ("path", "symlink"):
        call(inspect, other, "commit", True)
    writer.talk.send("close")
    assert writer.end().error is None
    lives.judge()


@DURABILITIES
@pytest.mark.rounds(1, 3)
def test_a_stopped_writer_holds_up_nobody(tmp_path: Path, durability: str, round: int) -> None:
    """A second writer has its error, a reader its rows, and the writer goes on as if nothing had been.

    This writer never reopens: between its close and its open the store is nobody's, and a second writer gets it.
    """
    lives, rng = Lives(tmp_path, durability, 610 + round, kinds=HOLDS_THE_LOCK), np.random.default_rng([6, round])
    writer = lives.born()
    writer.talk.send("go")
    wait_for(writer, "open")
    for _ in range(6):
        writer.talk.poll(float(rng.exponential(0.03)))  # the moment of the stop is what is random here
        writer.kill(19)
        said, expected = lives.said(), copy.deepcopy(lives.expected)
        assert isinstance(call(refusal, lives.path, False), StoreLockedError)
        found, note, _ = call(inspect, lives.path, durability, True)
        expected.follow(said)
        expected.judge(found, note, durability)
        TALLY["stops"] += 1
        writer.kill(18)
    writer.kill()
    writer.end()
    TALLY["kills"] += 1
    lives.judge()


def _read_for_ever(talk: Connection, path: Path, durability: str) -> None:
    ids = np.tile(IDS, 200)  # so that it is inside `get` nearly always
    with LmdbStore(path, durability=durability, config=config(), read_only=True) as store:  # type: ignore[arg-type]
        tables = open_tables(store)
        rows, found = RowIds.of(tables[0], ids), np.zeros(len(ids), np.bool_)
        out = np.zeros((len(ids), TABLES[0][1].row_bytes), np.uint8)
        store.get(rows, out, found)
        talk.send("reading")
        while True:
            store.get(rows, out, found)


@DURABILITIES
@pytest.mark.parametrize("writes", [True, False])
def test_killed_readers_keep_nothing(tmp_path: Path, durability: str, writes: bool, all_faults: bool) -> None:
    """200 in all, in the middle of reading; then the next reader opens, and the file does not grow."""
    lives, writer = working(tmp_path, durability)
    if writes:
        writer.talk.send("close")
        writer.end()
        lives.judge()
        writer = lives.born()
        writer.talk.send("go")
        wait_for(writer, "open")
    share = 130 if durability == "commit" and not writes else 10  # LMDB has room for 126 readers
    for _ in range(200 if all_faults else share):
        reader = Child(_read_for_ever, lives.path, durability)
        assert reader.hear() == "reading", "a reader could not open the store"
        time.sleep(0.01)  # until it is inside `get` again; where exactly does not matter
        reader.kill()
        reader.end()
        TALLY["readers_killed"] += 1
    assert call(refusal, lives.path, True) is None
    writer.kill()
    writer.end()
    TALLY["kills"] += 1
    lives.judge()
    # A reader keeps what is deleted while it reads, on a busy machine hundreds of commits; dead ones keep nothing.
    assert lives.disk_bytes < (96 << 20 if writes else 3 << 20)


def test_workers_of_a_data_loader_read_and_do_not_write(tmp_path: Path) -> None:
    """Forked and spawned, none and two, with the store open for writing and for reading."""
    program = Path(__file__).with_name("loader.py")
    command = [sys.executable, "-W", "error", str(program), str(tmp_path / "s")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["0", "fork", "spawn", "fork", "unharmed"]


def test_a_directory_removed_under_a_store_is_noticed_by_the_next_durable_write(tmp_path: Path) -> None:
    assert call(_lose_the_directory, tmp_path / "s") == "StoreIOError"


def _lose_the_directory(talk: Connection, path: Path) -> str:
    store = LmdbStore(path, config=config())
    tables = open_tables(store)
    store.flush()
    shutil.rmtree(path)
    try:
        store.put(RowIds.of(tables[0], IDS), np.zeros((len(IDS), TABLES[0][1].row_bytes), np.uint8))
        store.flush()
    except OSError as error:
        return type(error).__name__
    return "no error"


@DURABILITIES
def test_a_reader_left_open_for_a_thousand_commits_does_not_let_the_file_grow(
    tmp_path: Path, durability: str, all_faults: bool
) -> None:
    commits = 1000 if all_faults else 100
    size, named, pid = call(_commit_beside_a_reader, tmp_path / "s", durability, commits, "get")
    assert size < 3 << 20
    assert named == (0, 0) or named[0] != pid


@DURABILITIES
def test_a_reader_in_a_scan_keeps_what_it_scans_and_is_named(tmp_path: Path, durability: str, all_faults: bool) -> None:
    commits = 1000 if all_faults else 100
    _, named, pid = call(_commit_beside_a_reader, tmp_path / "s", durability, commits, "scan")
    assert named[0] == pid
    assert named[1] >= commits


def _commit_beside_a_reader(
    talk: Connection, path: Path, durability: str, commits: int, doing: str
) -> tuple[int, tuple[int, int], int]:
    """Size of the file, the oldest reader and how many commits it lags, and the reader's process."""
    with LmdbStore(path, durability=durability, config=config()) as store:  # type: ignore[arg-type]
        table = open_tables(store)[0]
        rows, data = RowIds.of(table, IDS), np.zeros((len(IDS), TABLES[0][1].row_bytes), np.uint8)
        store.put(rows, data)
        store.flush()
        command = [sys.executable, str(Path(__file__).with_name("idle_reader.py")), str(path), doing]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
            for step in range(commits):
                data[:] = step % 251
                store.put(rows, data)
                store.flush()
            stats = store.stats()
            reader.communicate("enough\n")
        return stats.disk_bytes, (stats.oldest_reader, stats.oldest_reader_commits), reader.pid


def _read_when_told(talk: Connection, path: Path, durability: str) -> None:
    with LmdbStore(path, durability=durability, config=config(), read_only=True) as store:  # type: ignore[arg-type]
        while talk.recv() == "read":
            talk.send((read_all(store), store.note))


@DURABILITIES
@pytest.mark.parametrize("readers", ["commit", "snapshot"])
@pytest.mark.rounds(1, 4)
def test_a_reader_that_stays_open_follows_over_the_deaths_of_writers(
    tmp_path: Path, durability: str, readers: str, round: int
) -> None:
    """Also one that has seen rows which a store opened at its last flush then discards."""
    lives, rng = Lives(tmp_path, durability, seed=640 + round), np.random.default_rng([7, round])
    assert lives.live(30).error is None
    lives.judge()
    reader = Child(_read_when_told, lives.path, readers)
    for _ in range(8):
        writer = lives.born()
        writer.talk.send("go")
        wait_for(writer, "open")
        writer.talk.poll(float(rng.exponential(0.05)))  # the moment of death is what is random here
        writer.kill()
        writer.end()
        TALLY["kills"] += 1
        reader.talk.send("read")
        rows, note = reader.hear()
        if readers == durability:
            expected = copy.deepcopy(lives.expected)
            expected.follow(lives.said())
            expected.judge(rows, note, durability)
        found = lives.judge()
        reader.talk.send("read")
        rows, note = reader.hear()
        if (rows, note) != (found, lives.expected.note):
            raise Undetected(f"a reader that follows: {difference(rows, found)}; {note!r}, {lives.expected.note!r}")
    reader.talk.send("end")
    assert reader.end().error is None

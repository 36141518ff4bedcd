"""One store and several processes: readers that follow, forks that may only read, writers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage import LmdbStore, RowIds, StoreConfig
from storage.testing import check_equal, schema_of

TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)

_READER = """
import sys
import numpy as np
from storage import LmdbStore, RowIds
store = LmdbStore(sys.argv[1], durability=sys.argv[2], read_only=True)
for line in sys.stdin:
    rows = sorted((int(id), int(row[0])) for block, data in store.scan(0) for id, row in zip(block.ids, data))
    ids = np.array([id for id, _ in rows] or [0])
    number = next(iter(store._manifest.tables.values()))[0]
    out, found = np.zeros((len(ids), 32), np.uint8), np.zeros(len(ids), bool)
    store.get(RowIds(0, np.full(len(ids), number, np.uint32), ids), out, found)
    assert not rows or (found.all() and out[:, 0].tolist() == [first for _, first in rows])
    print(len(rows), sum(first for _, first in rows), store.note.decode(), flush=True)
store.close()
"""

_FORK = """
import os, sys
import numpy as np
from storage import LmdbStore, RowIds, StoreForkedError, StorageError
from storage.testing import schema_of
path = sys.argv[1]
store = LmdbStore(path)
table = store.open_table("t", schema_of(8))
rows = RowIds.of(table, np.arange(100))
store.put(rows, np.ones((100, 32), np.uint8))
store.flush()
store.put(RowIds.of(table, np.arange(50)), np.full((50, 32), 2, np.uint8))  # still in memory
child = os.fork()
if child == 0:
    out, found = np.zeros((100, 32), np.uint8), np.zeros(100, bool)
    store.get(rows, out, found)
    assert found.all() and (out[:50] == 2).all() and (out[50:] == 1).all()
    for verb in (
        lambda: store.put(rows, out),
        lambda: store.delete(rows),
        lambda: store.flush(),
        lambda: store.open_table("new", schema_of(8)),
    ):
        try:
            verb()
        except StoreForkedError as error:
            assert str(os.getppid()) in str(error) and "before forking" in str(error)
        else:
            os._exit(3)
    store.close()
    with LmdbStore(path, read_only=True) as mine:
        mine.get(rows, out, found)
        assert found.all() and (out == 1).all()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
store.put(rows, np.full((100, 32), 3, np.uint8))
store.close()
with LmdbStore(path) as store:
    out, found = np.zeros((100, 32), np.uint8), np.zeros(100, bool)
    store.get(rows, out, found)
    assert found.all() and (out == 3).all()
reader = LmdbStore(path, read_only=True)
child = os.fork()
if child == 0:
    out[:] = 0
    reader.get(rows, out, found)
    assert found.all() and (out == 3).all() and reader._pid == os.getpid()
    reader.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
reader.get(rows, out, found)
reader.close()
"""

_WRITER = """
import sys
import numpy as np
from storage import LmdbStore, RowIds, StoreConfig
from storage.testing import schema_of
store = LmdbStore(sys.argv[1], durability=sys.argv[2], config=StoreConfig(1 << 13, 1 << 14, index_shards=16))
table = store.open_table("t", schema_of(8))
step = int(store.note or b"0")
print("open", flush=True)
while True:
    step += 1
    rng = np.random.default_rng(step)
    store.put(RowIds.of(table, rng.integers(0, 3000, 700)), np.full((700, 32), step % 256, np.uint8))
    store.delete(RowIds.of(table, rng.integers(0, 3000, 50)))
    store.flush(str(step).encode())
    print(step, flush=True)
"""


def run(program: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_a_reader_in_another_process_follows_the_writer(tmp_path: Path, durability: str) -> None:
    store = LmdbStore(tmp_path / "s", durability=durability, config=TINY)  # type: ignore[arg-type]
    table = store.open_table("t", schema_of(8))
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, tmp_path / "s", durability],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert reader.stdin is not None and reader.stdout is not None

    def seen() -> str:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write("look\n")
        reader.stdin.flush()
        return reader.stdout.readline().strip()

    with reader:
        assert seen() == "0 0"
        for step in range(1, 6):  # each overwrites the rows of the one before, so segments die and go
            store.put(RowIds.of(table, np.arange(1000)), np.full((1000, 32), step, np.uint8))
            store.delete(RowIds.of(table, np.arange(step)))
            before = seen()
            store.flush(f"step {step}".encode())
            assert seen() == f"{1000 - step} {step * (1000 - step)} step {step}"
            if durability == "snapshot" and step > 1:
                assert before == f"{1001 - step} {(step - 1) * (1001 - step)} step {step - 1}"
        store._release()  # a writer that dies with rows committed after its last state ...
        store = LmdbStore(tmp_path / "s", durability="snapshot", config=TINY)
        store.put(RowIds.of(table, np.arange(2000)), np.full((2000, 32), 9, np.uint8))
        seen()
        store._release()
        store = LmdbStore(tmp_path / "s", durability="snapshot", config=TINY)  # ... and one that discards them
        assert seen() == "995 4975 step 5"
        reader.stdin.close()
        assert reader.wait() == 0
    store.close()


def test_a_forked_child_may_read_and_is_refused_to_write(tmp_path: Path) -> None:
    run(_FORK, tmp_path / "s")


def test_a_writer_in_another_process_is_named(tmp_path: Path) -> None:
    program = """
import os, sys
from storage import LmdbStore, StoreLockedError
try:
    LmdbStore(sys.argv[1])
except StoreLockedError as error:
    assert f"process {os.getppid()} on" in str(error), error
else:
    sys.exit("two writers")
LmdbStore(sys.argv[1], read_only=True).close()
"""
    with LmdbStore(tmp_path / "s"):
        run(program, tmp_path / "s")


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_what_was_flushed_survives_kill_9(tmp_path: Path, durability: str) -> None:
    """Each flush is announced after it returned; the store must open at that state or a later one, whole."""
    rng = np.random.default_rng(0)
    announced = 0
    for _ in range(4 if durability == "snapshot" else 1):
        command = [sys.executable, "-c", _WRITER, str(tmp_path / "s"), durability]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            for _ in range(int(rng.integers(1, 25))):
                announced = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
        with LmdbStore(tmp_path / "s", durability=durability, config=TINY) as store:  # type: ignore[arg-type]
            flushed = int(store.note)
            assert flushed >= announced
            table = store.open_table("t", schema_of(8))
            expected = _state_after(table.number, flushed)
            if durability == "snapshot":
                check_equal(store, 0, expected)
            else:  # rows of the next step may have been committed too; nothing else may differ
                _check_between(store, expected, _state_after(table.number, flushed + 1))


def _state_after(table: int, steps: int) -> dict[tuple[int, int], bytes]:
    rows: dict[tuple[int, int], bytes] = {}
    for step in range(1, steps + 1):
        rng = np.random.default_rng(step)
        rows |= dict.fromkeys([(table, int(id)) for id in rng.integers(0, 3000, 700)], bytes([step % 256] * 32))
        for id in rng.integers(0, 3000, 50):
            rows.pop((table, int(id)), None)
    return rows


def _check_between(store: LmdbStore, before: dict[tuple[int, int], bytes], after: dict[tuple[int, int], bytes]) -> None:
    step = {data[0] for row, data in after.items() if before.get(row) != data}
    for block, data in store.scan(0):
        for table, id, row in zip(block.tables.tolist(), block.ids.tolist(), data, strict=True):
            assert row.tobytes() == before.get((table, id)) or row[0] in step
    missing = before.keys() - {
        (t, i) for b, _ in store.scan(0) for t, i in zip(b.tables.tolist(), b.ids.tolist(), strict=True)
    }
    assert missing <= before.keys() - after.keys()

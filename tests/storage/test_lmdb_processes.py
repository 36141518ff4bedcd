"""One store and several processes: readers that follow, forks that may only read, writers that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from storage import LmdbStore, RowIds, StoreConfig, StoreLockedError
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
    number = next(iter(store._session.manifest.tables.values()))[0]
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
out, found = np.zeros((100, 32), np.uint8), np.zeros(100, bool)
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
go, ready = os.pipe()
child = os.fork()
if child == 0:
    os.read(go, 1)
    try:
        list(store.scan(0))
    except StoreForkedError as error:
        assert "when this process was forked" in str(error)
    else:
        os._exit(4)
    out, found = np.zeros((100, 32), np.uint8), np.zeros(100, bool)
    store.get(rows, out, found)  # what there was at the fork, or of what the parent has committed since
    assert found.all() and all(set(row) in ({1}, {2}, {8}) for row in out.tolist())
    try:
        store.put(rows, out)
    except StoreForkedError:
        os._exit(0)
    os._exit(5)
for step in range(9):  # LMDB gives the pages that the child knows to other segments
    store.put(rows, np.full((100, 32), step, np.uint8))
    store.flush()
os.write(ready, b"x")
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
    assert found.all() and (out == 3).all() and reader._session._pid == os.getpid()
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
        store.abandon()  # a writer that dies with rows committed after its last state ...
        store = LmdbStore(tmp_path / "s", durability="snapshot", config=TINY)
        store.put(RowIds.of(table, np.arange(2000)), np.full((2000, 32), 9, np.uint8))
        seen()
        store.abandon()
        store = LmdbStore(tmp_path / "s", durability="snapshot", config=TINY)  # ... and one that discards them
        assert seen() == "995 4975 step 5"
        reader.stdin.close()
        assert reader.wait() == 0
    store.close()


def test_a_forked_child_may_read_and_is_refused_to_write(tmp_path: Path) -> None:
    run(_FORK, tmp_path / "s")


def test_a_reader_sees_tables_that_no_commit_has_followed(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "s")
    program = """
import sys
from storage import LmdbStore, StoreMissingError
from storage.testing import schema_of
store = LmdbStore(sys.argv[1], read_only=True)
print("open", flush=True)
sys.stdin.readline()
assert store.open_table("t", schema_of(2)).name == "t"
try:
    store.open_table("u", schema_of(2))
except StoreMissingError:
    print("done")
"""
    command = [sys.executable, "-c", program, str(tmp_path / "s")]
    with store, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "open\n"
        store.open_table("t", schema_of(2))
        assert reader.communicate("go\n")[0] == "done\n"


def test_a_reader_whose_ids_are_damaged_beside_it_finds_no_old_version(tmp_path: Path) -> None:
    """New versions of all rows, although the reader does not recognise the old ones that it has in its index."""
    program = """
import os, sys
from pathlib import Path
import numpy as np
from storage import LmdbStore, RowIds
from storage.row_log.places import IDS
from storage.testing import read, schema_of
sys.path.insert(0, sys.argv[2])
from test_lmdb_faults import file_offset
store = LmdbStore(sys.argv[1], read_only=True)
table = store.open_table("t", schema_of(8))
rows = RowIds.of(table, np.arange(100))
assert read(store, rows, 32) == [b"\\1" * 32] * 100
lines = store._session.groups[0].segments.lines
at = file_offset(int(lines[store._session.groups[0].segments.slots()[0], IDS]))
with open(sys.argv[1] + "/data.mdb", "r+b") as file:
    for id in range(100):
        os.pwrite(file.fileno(), b"\\xff", at + 4 * id + 3)
print("damaged", flush=True)
sys.stdin.readline()
assert read(store, rows, 32) == [b"\\2" * 32] * 100
print("done")
"""
    with LmdbStore(tmp_path / "s") as store:
        table = store.open_table("t", schema_of(8))
        store.put(RowIds.of(table, np.arange(101)), np.full((101, 32), 1, np.uint8))
        store.flush()
        command = [sys.executable, "-c", program, str(tmp_path / "s"), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == "damaged\n"
            store.put(RowIds.of(table, np.arange(100)), np.full((100, 32), 2, np.uint8))
            store.flush()  # the segment of row 100 stays
            assert reader.communicate("look\n")[0] == "done\n"


def test_a_reader_killed_in_the_middle_of_a_verb_keeps_no_page(tmp_path: Path) -> None:
    program = """
import sys
from storage import LmdbStore
with LmdbStore(sys.argv[1], read_only=True)._session.reading():
    print("reading", flush=True)
    sys.stdin.readline()
"""
    with LmdbStore(tmp_path / "s", durability="snapshot", config=TINY) as store:
        table = store.open_table("t", schema_of(8))

        def update(steps: int) -> int:
            for step in range(steps):
                store.put(RowIds.of(table, np.arange(500)), np.full((500, 32), step, np.uint8))
                store.flush()
            return store.stats().disk_bytes

        before = update(20)
        command = [sys.executable, "-c", program, str(tmp_path / "s")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
            reader.kill()
        assert update(50) <= 2 * before


_UNWRITABLE = """
import os, sys
from storage import LmdbStore, StoreIOError, StoreLockedError
from storage.testing import contents, schema_of
with LmdbStore(sys.argv[2]) as store:  # what this imports another user may not be allowed to read
    list(store.scan(store.open_table("t", schema_of(8)).group))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    LmdbStore(sys.argv[1])
except StoreIOError as error:
    assert "Permission denied" in str(error)
else:
    sys.exit("opened for writing")
with LmdbStore(sys.argv[1], read_only=True) as store:
    print(len(contents(store, 0)), flush=True)
    sys.stdin.readline()
    print(len(contents(store, 0)), flush=True)
sys.stdin.readline()
try:
    LmdbStore(sys.argv[1], read_only=True)
except StoreLockedError as error:
    assert "lock.mdb must be writable" in str(error) and f"process {os.getppid()}:" in str(error), error
else:
    sys.exit("reads beside a writer that does not know of it")
"""


def _set_writable(directory: Path, writable: bool) -> None:
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644 if writable else 0o444)
    directory.chmod(0o755 if writable else 0o555)


@pytest.mark.parametrize("lock_file", [True, False])
def test_a_store_that_may_only_be_read_is_read_while_nobody_writes(tmp_path: Path, lock_file: bool) -> None:
    directory = Path(tempfile.mkdtemp())  # unlike tmp_path open to other users
    directory.chmod(0o755)
    path = directory / "s"
    with LmdbStore(path) as store:
        table = store.open_table("t", schema_of(8))
        store.put(RowIds.of(table, np.arange(300)), np.zeros((300, 32), np.uint8))
    if not lock_file:
        (path / "lock.mdb").unlink()
    _set_writable(path, False)
    command = [sys.executable, "-W", "error", "-c", _UNWRITABLE, str(path), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == "300\n"
        _set_writable(path, True)
        with pytest.raises(StoreLockedError, match=rf"data\.mdb is locked by process {reader.pid},"):
            LmdbStore(path)
        reader.stdin.write("go on\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "300\n"
        while True:  # until the reader has closed the store
            try:
                store = LmdbStore(path)
                break
            except StoreLockedError:
                continue
        _set_writable(path, False)
        with store:
            reader.communicate("go on\n")
        assert reader.returncode == 0
    shutil.rmtree(directory)


def test_a_hard_link_to_the_data_file_does_not_get_round_the_lock(tmp_path: Path) -> None:
    program = """
import os, sys
from storage import LmdbStore, StoreLockedError
try:
    LmdbStore(sys.argv[1])
except StoreLockedError as error:
    assert f"data.mdb is locked by process {os.getppid()}, which has it open in another directory" in str(error), error
else:
    sys.exit("two writers")
"""
    with LmdbStore(tmp_path / "s"):
        (tmp_path / "t").mkdir()
        for name in ("data.mdb", "manifest.json"):
            os.link(tmp_path / "s" / name, tmp_path / "t" / name)
        run(program, tmp_path / "t")


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

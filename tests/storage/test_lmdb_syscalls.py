"""The N-th system call of a writer that fails or is its last, by strace: what was acknowledged is there afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import LmdbStore, StoreConfig
from storage.testing import Rows, contents, schema_of

CONFIG = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=2)
CHANGES = "pwrite64,writev,write,fdatasync,fsync,rename,ftruncate,fallocate,mkdir"
STEPS, IDS = 3, 600

_WRITER = f"""
import sys
import numpy as np
from storage import LmdbStore, RowIds, StorageError
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_lmdb_syscalls import CONFIG, IDS, STEPS, schema_of
said = open(sys.argv[3], "w", buffering=1)
try:
    store = LmdbStore(sys.argv[1], durability=sys.argv[2], config=CONFIG)
    table = store.open_table("t", schema_of(8))
    for step in range(1, STEPS + 1):
        rows = RowIds.of(table, np.arange(step * 50, step * 50 + IDS))
        store.put(rows, np.full((IDS, 32), step, np.uint8))
        store.delete(RowIds.of(table, np.arange(step * 50, step * 50 + 20)))
        store.flush(str(step).encode())
        print(step, file=said)
    store.close()
except StorageError as error:
    print(type(error).__name__, file=said)
"""


def state_after(table: int, steps: int) -> Rows:
    rows: Rows = {}
    for step in range(1, steps + 1):
        rows |= {(table, id): bytes([step] * 32) for id in range(step * 50, step * 50 + IDS)}
        for id in range(step * 50, step * 50 + 20):
            del rows[table, id]
    return rows


def write_under_strace(strace: str, path: Path, durability: str, inject: str) -> list[str]:
    """Run a writer of which strace spoils a system call on the store's files; what it acknowledged, or its error."""
    files = [f"-P{path / name}" for name in ("data.mdb", "lock.mdb", "manifest.json.tmp", "owner", "")]
    said = path.with_name("said")
    options = ["-f", "-qq", "-o", "/dev/null", *files]
    command = [strace, *options, "-e", f"trace={CHANGES}", "-e", f"inject={inject}"]
    writer = [sys.executable, "-c", _WRITER, str(path), durability, str(said)]
    done = subprocess.run([*command, *writer], capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr, done.stderr
    return said.read_text().split()


def check(path: Path, durability: str, acknowledged: int) -> int:
    """The store opens at a state that was acknowledged or a later one, whole; the step that it is of."""
    with LmdbStore(path, durability=durability, config=CONFIG) as store:  # type: ignore[arg-type]
        table = store.open_table("t", schema_of(8))
        step = int(store.note or b"0")
        assert step >= acknowledged
        found, before, after = contents(store, 0), state_after(table.number, step), state_after(table.number, step + 1)
    if durability == "snapshot":
        assert found == before
    for row in before.keys() | after.keys() | found.keys():
        assert found.get(row) in (before.get(row), after.get(row), bytes([step + 1] * 32))
    return step


@pytest.mark.parametrize("durability", ["snapshot", "commit"])
def test_a_kill_at_any_system_call_loses_nothing(
    tmp_path: Path, require_tool: Callable[[str], str], durability: str
) -> None:
    steps = set()
    for call in (6, 14, 20, 28, 38):
        path = tmp_path / str(call) / "s"
        path.parent.mkdir()
        said = write_under_strace(require_tool("strace"), path, durability, f"{CHANGES}:signal=KILL:when={call}")
        steps.add(check(path, durability, len(said)))
    assert len(steps) > 1, "the calls are not spread over the writer's life"


@pytest.mark.parametrize(
    ("call", "failure", "says"),
    [
        ("fdatasync", "EIO", "StoreIOError"),
        ("writev", "EIO", "StoreIOError"),
        ("pwrite64", "EIO", "StoreIOError"),
        ("fdatasync", "ENOSPC", "StoreFullError"),
    ],
)
def test_a_call_that_fails_once_is_an_error_and_loses_nothing(
    tmp_path: Path, require_tool: Callable[[str], str], call: str, failure: str, says: str
) -> None:
    inject = f"{call}:error={failure}:when=4"
    said = write_under_strace(require_tool("strace"), tmp_path / "s", "snapshot", inject)
    assert said[-1] == says
    check(tmp_path / "s", "snapshot", len(said) - 1)

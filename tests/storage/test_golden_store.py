"""Whole stores as earlier programs left them open for ever: rows, note, states, commit records, index.

`python -m tests.storage.test_golden_store` made `golden/store_v2`: once, and never again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from storage import LmdbStore, RowIds, StoreConfig, describe_store, verify_store
from storage.testing import EXTREME_IDS, Rows, check_equal, schema_of

GOLDEN = Path(__file__).parent / "golden" / "store_v2"
CONFIG = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=2)
NOTE = b"the note of version 2"


def fill(path: Path) -> None:
    """Two groups; narrow ids and wide ones; rows replaced, deleted, moved, put again; closed."""
    with LmdbStore(path, config=CONFIG) as store:
        a, b = store.open_table("a", schema_of(2)), store.open_table("b", schema_of(3, 1))
        store.put(RowIds.of(a, np.arange(400)), np.full((400, 8), 1, np.uint8))
        store.put(RowIds.of(b, EXTREME_IDS), np.full((9, 16), 2, np.uint8))
        store.flush(b"an earlier note")
        store.put(RowIds.of(a, np.arange(0, 400, 2)), np.full((200, 8), 3, np.uint8))
        store.delete(RowIds.of(a, np.arange(0, 400, 5)))
        store.flush(NOTE)
        store.compact()
        store.put(RowIds.of(a, np.arange(0, 50, 5)), np.full((10, 8), 4, np.uint8))


def expected(number: int) -> Rows:
    rows = {(number, id): b"\1" * 8 for id in range(400)}
    rows |= {(number, id): b"\3" * 8 for id in range(0, 400, 2)}
    for id in range(0, 400, 5):
        del rows[number, id]
    return rows | {(number, id): b"\4" * 8 for id in range(0, 50, 5)}


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the golden store."""
    shutil.copytree(GOLDEN, tmp_path / "s")
    return tmp_path / "s"


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("index", [False, True])
def test_it_opens_with_all_its_rows(golden: Path, durability: str, read_only: bool, index: bool) -> None:
    if not index:
        (golden / "index").unlink()
    with LmdbStore(golden, durability=durability, config=CONFIG, read_only=read_only) as store:  # type: ignore[arg-type]
        a, b = store.open_table("a", schema_of(2)), store.open_table("b", schema_of(3, 1))
        check_equal(store, a.group, expected(a.number))
        check_equal(store, b.group, {(b.number, int(id)): b"\2" * 16 for id in EXTREME_IDS})
        assert store.note == NOTE


def test_it_is_whole_and_has_a_history(golden: Path) -> None:
    assert verify_store(golden).good
    history = describe_store(golden).history
    assert len(history) >= 4
    assert history[-1].live_bytes == 8 * 330 + 16 * 9
    assert history[-1].put_bytes == 8 * (400 + 200 + 10) + 16 * 9


if __name__ == "__main__":
    fill(GOLDEN)
    for name in ("owner", "lock.mdb"):
        (GOLDEN / name).unlink()

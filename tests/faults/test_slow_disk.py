"""A disk that is slow or stuck: putting is not waiting for it, and what is read is right meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from storage import LmdbStore, RowIds
from tests.faults.lives import Lives
from tests.faults.oracle import IDS, open_tables, read_ids, rows_of
from tests.faults.powerfs import Mount, Power
from tests.faults.victim import Child, config


@pytest.fixture
def stuck(tmp_path: Path, require_tool: Callable[[str], str]) -> Iterator[tuple[Mount, Path]]:
    """A disk that is stuck while a file exists."""
    require_tool("fusermount3")
    gate = tmp_path / "gate"
    mount = Mount(tmp_path / "disk", tmp_path / "mounted", Power(gate=str(gate)))
    yield mount, gate
    gate.unlink(missing_ok=True)
    mount.cut()


def _put_on_a_stuck_disk(talk: Connection, path: Path, durability: str, count: int) -> None:
    with LmdbStore(path, durability=durability, config=config(write_buffer_bytes=1 << 17)) as store:  # type: ignore[arg-type]
        tables = open_tables(store)
        talk.send("open")
        talk.recv()
        versions = np.arange(count)
        store.put(RowIds.of(tables[0], IDS[:count]), rows_of(versions, 0, IDS[:count]))
        talk.send("put")
        talk.recv()
        seen = read_ids(store, tables, IDS)
        assert seen == {(0, int(id)): at for at, id in enumerate(IDS[:count])}
        talk.send("read")
        store.flush()
        talk.send("flushed")
        talk.recv()


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
@pytest.mark.parametrize("count", [100, len(IDS)])
def test_a_put_returns_and_is_read_while_the_disk_is_stuck(
    stuck: tuple[Mount, Path], durability: str, count: int
) -> None:
    """Less than a segment, and so many that a commit of them is stuck; a flush does wait."""
    mount, gate = stuck
    writer = Child(_put_on_a_stuck_disk, mount.directory / "s", durability, count)
    assert writer.hear() == "open"
    gate.touch()
    before = mount.changes
    for word in ("put", "read"):
        writer.talk.send("go on")
        assert writer.hear() == word
    assert not writer.talk.poll(0.1), "a flush returned although nothing can be written"
    assert mount.changes == before
    gate.unlink()
    assert writer.hear() == "flushed"
    writer.talk.send("close")
    assert writer.end().error is None


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_a_slow_disk_makes_nothing_wrong(tmp_path: Path, durability: str, require_tool: Callable[[str], str]) -> None:
    require_tool("fusermount3")
    mount = Mount(tmp_path / "disk", tmp_path / "mounted", Power(delay_s=0.003))
    try:
        lives = Lives(mount.directory, durability, seed=700, outside=tmp_path)
        assert lives.live(40).error is None
        lives.judge()
    finally:
        mount.cut()

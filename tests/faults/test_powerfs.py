"""The file system that loses power does lose what was not synced, keeps what was, and is one that LMDB can live on."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.powerfs import Mount, Power


@pytest.fixture
def mounted(tmp_path: Path, require_tool: Callable[[str], str]) -> Iterator[Callable[..., Mount]]:
    """Mounts the same disk again and again."""
    require_tool("fusermount3")
    mounts: list[Mount] = []

    def mount(**power: int) -> Mount:
        if mounts:
            mounts.pop().cut()
        mounts.append(Mount(tmp_path / "disk", tmp_path / "mounted", Power(**power)))
        return mounts[-1]

    yield mount
    mounts.pop().cut()


def write(path: Path, data: bytes, offset: int = 0, flags: int = 0, sync: bool = False) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    os.pwrite(file, data, offset)
    if sync:
        os.fdatasync(file)
    os.close(file)


def until_the_power_is_out(path: Path) -> None:
    for _ in range(100):
        try:
            write(path, b"c", offset=1 << 16)
        except OSError:
            return
    pytest.fail("the power did not go out")


def sync_directory(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(file)
    os.close(file)


def test_what_was_not_synced_is_lost_and_what_was_is_there(mounted: Callable[..., Mount]) -> None:
    here = mounted().directory
    write(here / "synced", b"a" * 5000, sync=True)
    write(here / "unsynced", b"b" * 5000)
    sync_directory(here)
    write(here / "synced", b"c" * 100)
    write(here / "nameless", b"d", sync=True)
    assert (here / "synced").read_bytes() == b"c" * 100 + b"a" * 4900
    mounted()
    assert (here / "synced").read_bytes() == b"a" * 5000
    assert sorted(os.listdir(here)) == ["synced", "unsynced"]
    assert (here / "unsynced").read_bytes() == b""


def test_a_descriptor_with_dsync_syncs_each_write(mounted: Callable[..., Mount]) -> None:
    """LMDB writes its meta page through one."""
    here = mounted().directory
    write(here / "file", b"a" * 5000, sync=True)
    sync_directory(here)
    write(here / "file", b"b" * 10, flags=os.O_DSYNC)
    mounted()
    assert (here / "file").read_bytes() == b"b" * 10 + b"a" * 4990


def test_a_rename_is_lost_until_the_directory_is_synced(mounted: Callable[..., Mount]) -> None:
    here = mounted().directory
    write(here / "file", b"old", sync=True)
    sync_directory(here)
    write(here / "new", b"new", sync=True)
    os.rename(here / "new", here / "file")
    assert (here / "file").read_bytes() == b"new"
    mounted()
    assert (here / "file").read_bytes() == b"old"
    assert os.listdir(here) == ["file"]
    write(here / "new", b"new", sync=True)
    os.rename(here / "new", here / "file")
    sync_directory(here)
    mounted()
    assert (here / "file").read_bytes() == b"new"


@pytest.mark.parametrize("piece_bytes", [512, 4096])
def test_some_pieces_of_unsynced_writes_are_kept(mounted: Callable[..., Mount], piece_bytes: int) -> None:
    here = mounted(cut_at=7, piece_bytes=piece_bytes, seed=1).directory
    write(here / "file", b"a" * (1 << 16), sync=True)  # three changes
    sync_directory(here)
    write(here / "file", b"b" * (1 << 16))
    until_the_power_is_out(here / "file")
    mounted()
    data = (here / "file").read_bytes()
    pieces = [data[at : at + piece_bytes] for at in range(0, 1 << 16, piece_bytes)]
    assert {bytes(set(piece)) for piece in pieces} == {b"a", b"b"}, "each piece is old or new, and there are both"


def test_a_shared_map_sees_what_is_written(mounted: Callable[..., Mount]) -> None:
    """As LMDB uses them: read-only of the data file, larger than it, and writable of the file of readers."""
    here = mounted().directory
    write(here / "data", b"a" * 8192)
    with open(here / "data", "r+b") as file:
        seen = mmap.mmap(file.fileno(), 8192, mmap.MAP_SHARED, mmap.PROT_READ)
        assert seen[5000:5001] == b"a"
        write(here / "data", b"b", 5000)
        assert seen[5000:5001] == b"b"
        seen.close()
        writable = mmap.mmap(file.fileno(), 8192)
        writable[:5] = b"hello"
        assert os.pread(file.fileno(), 5, 0) == b"hello"
        writable.close()


def test_changes_are_counted(mounted: Callable[..., Mount]) -> None:
    mount = mounted()
    before = mount.changes
    write(mount.directory / "file", b"a", sync=True)  # a name, a write, a sync
    assert mount.changes == before + 3

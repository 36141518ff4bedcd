"""No room: on a small tmpfs, a small ext4, by RLIMIT_FSIZE, by the map. Nothing is lost; it goes on with room."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.lives import Lives
from tests.faults.room import ballast, fill_and_make_room, limit_file_size, loop, tmpfs
from tests.faults.tally import TALLY
from tests.faults.victim import config

DURABILITIES = pytest.mark.parametrize("durability", ["commit", "snapshot"])
KINDS = (
    "put",
    "put",
    "put",
    "look",
    "put",
    "put",
    "delete",
    "flush",
)  # put grows the store, whatever the engine reclaims
OPERATIONS = 240


@pytest.fixture
def is_root() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to mount a small disk")


@DURABILITIES
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.rounds(1, 4)
def test_a_full_disk_loses_nothing(
    tmp_path: Path, durability: str, kind: str, round: int, is_root: None, require_tool: Callable[[str], str]
) -> None:
    require_tool("mkfs.ext4")
    mount = {"tmpfs": tmpfs, "ext4": loop}[kind]
    with mount(tmp_path / "disk", 8 << 20) as disk:
        lives = Lives(disk, durability, seed=400 + round, kinds=KINDS, outside=tmp_path)
        assert lives.live(20).error is None
        lives.judge()
        filler = ballast(disk, (16 << 10) + 24_000 * round)
        fill_and_make_room(lives, lives.born(OPERATIONS), filler.unlink)
        TALLY["full_disks"] += 1
        lives.judge()


@DURABILITIES
@pytest.mark.rounds(1, 4)
def test_a_writer_killed_on_a_full_disk_has_lost_nothing(
    tmp_path: Path, durability: str, round: int, is_root: None
) -> None:
    with tmpfs(tmp_path / "disk", 8 << 20) as disk:
        lives = Lives(disk, durability, seed=420 + round, kinds=KINDS, outside=tmp_path)
        assert lives.live(20).error is None
        lives.judge()
        filler = ballast(disk, (16 << 10) + 24_000 * round)
        writer = lives.born(OPERATIONS)
        writer.talk.send("go")
        while writer.hear() != "full":
            pass
        writer.kill()
        writer.end()
        TALLY["full_disks"] += 1
        TALLY["kills"] += 1
        filler.unlink()
        lives.judge()
        assert lives.live(20).error is None
        lives.judge()


@DURABILITIES
@pytest.mark.rounds(1, 4)
def test_a_limit_on_the_size_of_files_loses_nothing(tmp_path: Path, durability: str, round: int) -> None:
    lives = Lives(tmp_path, durability, seed=440 + round, kinds=KINDS)
    assert lives.live(20).error is None
    lives.judge()
    writer = lives.born(OPERATIONS)
    limit_file_size(writer, (lives.path / "data.mdb").stat().st_size + 5_000 * round)
    fill_and_make_room(lives, writer, lambda: limit_file_size(writer, -1))
    TALLY["full_disks"] += 1
    lives.judge()


@DURABILITIES
@pytest.mark.rounds(1, 4)
def test_a_full_map_loses_nothing_and_a_larger_one_goes_on(tmp_path: Path, durability: str, round: int) -> None:
    small = config(map_size_bytes=(256 << 10) + (round << 15), max_space_ratio=1000.0, compact_bytes_per_s=0)
    lives = Lives(tmp_path, durability, seed=460 + round, kinds=KINDS, sizes=small)
    writer = lives.born()
    writer.talk.send("go")
    assert writer.hear() == "open"
    assert writer.hear() == "full"
    writer.talk.send("again")
    assert writer.hear() == "full"
    writer.kill()
    writer.end()
    TALLY["full_disks"] += 1
    lives.judge()  # with room for more
    larger = Lives(tmp_path, durability, seed=460 + round, kinds=KINDS)
    larger.expected = lives.expected
    assert larger.live(60).error is None
    larger.judge()

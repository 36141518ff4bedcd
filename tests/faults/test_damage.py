"""Bits that flip, files cut short, missing, or another's: an error that names it, never a wrong row or a crash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from storage import CorruptSegmentError, NotAStoreError, StorageError, StoreMissingError
from tests.faults.damage import cut_short, flip_all, flip_bit, refusal, snapshot_records, some_flips, spans
from tests.faults.lives import Lives
from tests.faults.oracle import SNAPSHOTS, Undetected, Versions
from tests.faults.tally import TALLY
from tests.faults.victim import call, inspect_snapshots

Closed = tuple[Path, Versions, bytes]


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Closed:
    """A store that was closed: its path, rows and note."""
    return make_closed(tmp_path_factory.mktemp("closed"))


def make_closed(directory: Path, seed: int = 500, operations: int = 120) -> Closed:
    lives = Lives(directory, "commit", seed)
    assert lives.live(operations).error is None
    return lives.path, lives.judge(), lives.expected.note


@pytest.mark.rounds(1, 8)
def test_every_flipped_bit_is_found(closed: Closed, round: int, request: pytest.FixtureRequest) -> None:
    """In a live row by its id, elsewhere by an error or by nobody, if all rows are as they were."""
    path, live, note = closed
    rng = np.random.default_rng([5, round])
    for where in request.config.getoption("--flip-in", default="rows,ids,headers").split(","):
        flips = some_flips(rng, spans(path, live, where), 60)
        found = flip_all(path, live, note, flips)
        TALLY["flips"] += len(flips)
        assert found == len(flips) or where != "rows"
        assert found > len(flips) // 4 or where == "pages", "the flips are not where they should be"


@pytest.mark.rounds(1, 8)
def test_a_flipped_bit_in_what_a_snapshot_needs_is_found(tmp_path: Path, round: int) -> None:
    """Anywhere in a record, always; in a segment by an error or by nobody, if every snapshot reads as it was."""
    lives, rng = Lives(tmp_path, "commit", seed=600 + round, kinds=SNAPSHOTS), np.random.default_rng([7, round])
    assert lives.live(4 * len(SNAPSHOTS)).error is None
    lives.judge()
    kept, copy = lives.expected.kept, tmp_path / "flipped"
    assert len(kept) >= 2
    records, segments = snapshot_records(lives.path), [[span] for span in spans(lives.path, {}, "segments")]
    for number in range(24):
        in_record = bool(number % 2)
        among = records if in_record else segments
        places = among[int(rng.integers(len(among)))]
        offset, bit = int(rng.integers(places[0].last - places[0].first)), int(rng.integers(8))
        shutil.copytree(lives.path, copy)
        for place in places:
            flip_bit(copy / "data.mdb", place.first + offset, bit)
        TALLY["flips"] += 1
        seen: object = None
        try:
            seen = call(inspect_snapshots, copy, "commit", bool(number % 4 > 1))
        except StorageError as error:
            seen = error
        if in_record:
            assert isinstance(seen, CorruptSegmentError) and "snapshot 's" in str(seen)
        elif not isinstance(seen, StorageError) and seen != kept:
            raise Undetected(f"a view of a store with bit {bit} of {places[0]} + {offset} flipped gave other rows")
        shutil.rmtree(copy)


def test_a_file_cut_short_is_an_error(closed: Closed) -> None:
    path, live, _ = closed
    size = (path / "data.mdb").stat().st_size
    sizes = np.concatenate(
        [[0, 1, 4095, 4096, 8192], np.linspace(8193, size - 1, 20).astype(np.int64), [size - 4096, size - 8192]]
    )
    refused = call(cut_short, path, live, sizes)
    TALLY["truncations"] += len(sizes)
    assert refused >= 2 * (len(sizes) - 4), "only a few whole pages at the end may be missing unseen"


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("name", ["data.mdb", "manifest.json"])
@pytest.mark.parametrize("fault", ["missing", "empty", "another", "another, without rows", "foreign"])
def test_a_file_that_is_not_the_stores_is_refused(
    closed: Closed, tmp_path: Path, name: str, fault: str, read_only: bool
) -> None:
    """And nothing of what is there is changed."""
    shutil.copytree(closed[0], tmp_path / "s")
    path = tmp_path / "s" / name
    if fault == "missing":
        path.unlink()
    elif fault == "empty":
        os.truncate(path, 0)
    elif "another" in fault:
        shutil.copy(_another(tmp_path, operations=0 if "without" in fault else 120) / name, path)
    else:
        path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))
    kept = {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir() if p.name in ("data.mdb", "manifest.json")}
    error = call(refusal, tmp_path / "s", read_only)
    assert isinstance(error, NotAStoreError | CorruptSegmentError | StoreMissingError), error
    assert str(tmp_path / "s") in str(error)
    assert {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir() if p.name in kept} == kept


def _another(directory: Path, operations: int) -> Path:
    (directory / "other").mkdir()
    return make_closed(directory / "other", seed=501, operations=operations)[0]

"""What is drawn of a store; how it looks is for people to judge."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from storage import LmdbStore, StoreConfigError, StoreIOError, describe_store
from storage.describe import AgeBand, Moment, StoreDescription

picture = pytest.importorskip("storage.picture")


def _moment(number: int, put: int, moved: int = 0) -> Moment:
    return Moment(number, 1e9 + number, put // 2, put * 2, put, put * 11 // 10 + moved, moved)


@pytest.fixture
def described(tmp_path: Path) -> StoreDescription:
    with LmdbStore(tmp_path / "store"):
        pass
    return describe_store(tmp_path / "store")


def test_a_store_without_rows_or_history_is_drawn(described: StoreDescription, tmp_path: Path) -> None:
    for ending in ("png", "svg"):
        picture.draw_store(described, tmp_path / f"store.{ending}")
        assert (tmp_path / f"store.{ending}").stat().st_size > 1000
    assert "no records of commits yet" in (tmp_path / "store.svg").read_text()


def test_ages_space_and_writes_are_drawn(described: StoreDescription, tmp_path: Path) -> None:
    moments = tuple(_moment(number, number * 1000) for number in range(1, 100))
    ages = (AgeBand(3, 1, 3, 100, 3000), AgeBand(3, 4, 4, 2900, 3000))
    picture.draw_store(replace(described, history=moments, ages=ages), tmp_path / "full.svg")
    text = (tmp_path / "full.svg").read_text()
    for label in ("97%", "live rows", "bytes on disk", "by compaction", "since creation: 1.10", "seconds since"):
        assert label in text
    assert "no records" not in text


def test_writes_are_averaged_over_about_equal_puts() -> None:
    moments = [_moment(1, 0), *(_moment(number, number * 1000, number * 500) for number in range(2, 602))]
    windows = picture._windows(moments)
    assert 50 <= len(windows) <= 60
    assert windows[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(windows))
    assert picture._ratio(moments, windows[-1], "written_bytes") == pytest.approx(1.6)
    assert picture._ratio(moments, windows[-1], "moved_bytes") == pytest.approx(0.5)


def test_commits_that_put_nothing_make_no_window() -> None:
    assert picture._windows([_moment(1, 1000), _moment(2, 1000), _moment(3, 1000)]) == []


@pytest.mark.parametrize(("seconds", "unit"), [(60, "seconds"), (600, "minutes"), (20_000, "hours"), (400_000, "days")])
def test_time_has_a_unit_that_fits(seconds: int, unit: str) -> None:
    times, label = picture._times([_moment(0, 0), _moment(seconds, 1)])
    assert label.startswith(unit)
    assert 2 <= times[-1] <= 60


def test_a_picture_that_cannot_be_made_is_an_error_of_ours(described: StoreDescription, tmp_path: Path) -> None:
    with pytest.raises(StoreConfigError, match="ends with 'xyz': pictures end with one of"):
        picture.draw_store(described, tmp_path / "store.xyz")
    with pytest.raises(StoreIOError, match="could not be written"):
        picture.draw_store(described, tmp_path / "no" / "store.png")

"""The judge of the fault suites is itself judged: of what it must allow it allows all, of what it must not nothing."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from tests.faults.oracle import (
    CLOSE,
    EVENTS,
    IDS,
    TABLES,
    Crashed,
    Expected,
    Journal,
    Lost,
    Undetected,
    Versions,
    note_of,
    operation,
    rows_of,
    versions_of,
)

KINDS = ("put", "put", "delete", "flush", "put", "delete", "put", "look")


def after(expected: Expected, *lines: str) -> Expected:
    expected.follow(line.split(maxsplit=2) for line in lines)
    return expected


def done(*numbers: int) -> list[str]:
    return [f"{what} {number}" for number in numbers for what in "bd"]


def states(seed: int, last: int) -> list[Versions]:
    """The rows after each operation, by doing them."""
    rows: Versions = {}
    seen = [dict(rows)]
    for number in range(last):
        op = operation(seed, number, KINDS)
        for id, version in zip(op.ids.tolist(), op.versions.tolist(), strict=True):
            if op.kind == "put":
                rows[op.table, id] = version
            elif op.kind == "delete":
                rows.pop((op.table, id), None)
        seen.append(dict(rows))
    return seen


@pytest.mark.parametrize("seed", range(8))
def test_what_was_flushed_and_any_prefix_of_what_came_later_is_allowed(seed: int) -> None:
    seen = states(seed, 8)
    for count in range(4, 9):
        after(Expected(seed, KINDS), *done(*range(8))).judge(seen[count], note_of(3), "commit")
    after(Expected(seed, KINDS), *done(*range(8))).judge(seen[4], note_of(3), "snapshot")


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
@pytest.mark.parametrize("seed", range(8))
def test_an_older_state_is_lost(seed: int, durability: str) -> None:
    seen = states(seed, 8)
    with pytest.raises(Lost):
        after(Expected(seed, KINDS), *done(*range(8))).judge(seen[1], note_of(3), durability)
    with pytest.raises(Lost, match="note"):
        after(Expected(seed, KINDS), *done(*range(8))).judge(seen[4], b"", durability)


def test_a_row_that_nobody_touched_is_missed() -> None:
    rows = states(1, 4)[4]
    for durability in ("commit", "snapshot"):
        found = dict(rows)
        found.pop(next(iter(found)))
        with pytest.raises(Lost):
            after(Expected(1, KINDS), *done(*range(4))).judge(found, note_of(3), durability)


def test_a_deleted_row_that_is_back_is_found() -> None:
    expected = Expected(0, base={(0, 10): 5})
    expected.events[0] = [((0, 10), None)]
    expected.states = [([1, 0], b"")]
    expected.base, expected.events = expected.newest(), [[], []]
    with pytest.raises(Lost, match="nobody touched"):
        expected.judge({(0, 10): 5}, b"", "commit")


def test_a_later_change_without_an_earlier_one_is_lost() -> None:
    expected = Expected(0)
    expected.events[0] = [((0, 10), 1), ((0, 11), 2)]
    with pytest.raises(Lost, match="without an earlier one"):
        expected.judge({(0, 11): 2}, b"", "commit")
    expected = Expected(0)
    expected.events[0] = [((0, 10), 1), ((0, 11), 2)]
    expected.judge({(0, 10): 1}, b"", "commit")


def test_a_state_that_was_begun_may_be_there_and_then_whole(tmp_path: Path) -> None:
    seen = states(3, 3)
    assert seen[2] != seen[3]
    for lines in ([*done(0, 1, 2), "b 3"], [*done(0, 1, 2), f"b {CLOSE}"]):
        note = note_of(3) if "b 3" in lines else b""
        after(Expected(3, KINDS), *lines).judge(seen[3], note, "snapshot")
        after(Expected(3, KINDS), *lines).judge({}, b"", "snapshot")
        with pytest.raises(Lost):
            after(Expected(3, KINDS), *lines).judge(seen[2], note, "snapshot")


def test_after_a_failed_put_its_rows_may_be_there_or_not() -> None:
    seen = states(3, 2)
    for found in seen[1:]:
        after(Expected(3, KINDS), *done(0), "b 1", "f 1 StoreFullError").judge(found, b"", "commit")


@pytest.mark.parametrize(("line", "error"), [("w 3 rows differ", Undetected), ("x Traceback", Crashed)])
def test_what_the_writer_saw_is_believed(line: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        after(Expected(0), line)


def test_bytes_that_nobody_put_are_recognised() -> None:
    rng = np.random.default_rng(0)
    for table in range(len(TABLES)):
        versions = 7 * EVENTS + np.arange(len(IDS))
        rows = np.array(rows_of(versions, table, IDS))
        assert versions_of(table, IDS, rows).tolist() == versions.tolist()
        for _ in range(200):
            spoilt = rows.copy()
            spoilt[rng.integers(len(IDS)), rng.integers(rows.shape[1])] ^= 1 << rng.integers(8)
            with pytest.raises(Undetected):
                versions_of(table, IDS, spoilt)
        with pytest.raises(Undetected):
            versions_of(table, np.roll(IDS, 1), rows)


def test_a_journal_is_there_line_by_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note("b", 1)
    assert Journal.read(tmp_path / "journal") == [["b", "1"]]
    journal.note("f", 1, "StoreFullError")
    assert Journal.read(tmp_path / "journal")[1:] == [["f", "1", "StoreFullError"]]
    assert Journal.read(tmp_path / "none") == []


class TestSnapshots:
    """Operation 0 puts, 1 keeps, 2 puts, 3 is what the case says."""

    @pytest.mark.parametrize("durability", ["commit", "snapshot"])
    def test_one_that_was_acknowledged_must_be_there_and_whole(self, durability: str) -> None:
        kinds = ("put", "snapshot", "flush", "look")
        expected = after(Expected(1, kinds), *done(*range(4)))
        rows, note = expected.newest(), note_of(2)
        kept = {"s1": (rows, note_of(1))}
        copy.deepcopy(expected).judge(rows, note, durability, kept)
        for wrong in ({}, {"s1": ({}, note_of(1))}, {"s1": (rows, b"")}, kept | {"s2": (rows, note)}):
            with pytest.raises(Lost, match="snapshot"):
                copy.deepcopy(expected).judge(rows, note, durability, wrong)

    @pytest.mark.parametrize("durability", ["commit", "snapshot"])
    def test_a_rollback_that_was_begun_has_happened_or_not(self, durability: str) -> None:
        kinds = ("put", "snapshot", "put", "snapshot", "rollback")  # number 4 of two names: to the first
        expected = after(Expected(1, kinds), *done(*range(4)), "b 4")
        first, both = {"s1": expected.kept["s1"]}, dict(expected.kept)
        assert first["s1"][0] != expected.newest()
        for rows, note, kept in ((*first["s1"], first), (*both["s3"], both)):
            one = copy.deepcopy(expected)
            one.judge(rows, note, durability, kept)
            assert (one.kept, one.base) == (kept, rows)
        for rows, note, kept in ((*first["s1"], both), (*both["s3"], first)):
            with pytest.raises(Lost):
                copy.deepcopy(expected).judge(rows, note, durability, kept)

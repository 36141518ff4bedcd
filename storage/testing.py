"""StoreContract: what every Store must do, as a pytest class to inherit. Shipped for stores that others write.

    class TestMyStore(StoreContract):
        def make_store(self, path):
            return MyStore(path)

        def reopen(self, store):          # leave this out if nothing survives closing
            store.close()
            return MyStore(store.path)

The tests speak to the store through the protocol only, and each compares with a plain dict.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from threading import Barrier, Thread
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from storage.errors import SchemaMismatchError, StoreChangedError, StoreClosedError, StoreConfigError
from storage.schema import Column, RowSchema
from storage.store import RowIds, Store, TableRef

Rows = dict[tuple[int, int], bytes]

EXTREME_IDS = np.array([-(2**63), -5, -1, 0, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1])


def schema_of(width: int, state: int = 0) -> RowSchema:
    """A schema of a float32 weight of `width`, and of optimizer state if there is some."""
    columns = [Column("weight", "float32", width)] + ([Column("moment", "float32", state)] if state else [])
    return RowSchema(tuple(columns))


def random_rows(rng: np.random.Generator, count: int, table: TableRef) -> NDArray[np.uint8]:
    """Any bytes: uint8 (count, row_bytes). Not every one is a number, and none is special."""
    return rng.integers(0, 256, (count, table.schema.row_bytes), dtype=np.uint8)


def read(store: Store, rows: RowIds, row_bytes: int) -> list[bytes | None]:
    """What a store holds under each id, None where it holds nothing."""
    out = np.full((len(rows), row_bytes), 0xA5, np.uint8)
    found = np.zeros(len(rows), np.bool_)
    store.get(rows, out, found)
    assert (out[~found] == 0xA5).all(), "get changed rows of ids that it did not find"
    return [row.tobytes() if hit else None for row, hit in zip(out, found, strict=True)]


def contents(store: Store, group: int) -> Rows:
    """All rows of a group, through scan."""
    seen: Rows = {}
    for rows, data in store.scan(group):
        for row, content in zip(named(rows), data, strict=True):
            assert row not in seen, f"scan gave {row} twice"
            seen[row] = content.tobytes()
    return seen


def named(rows: RowIds) -> list[tuple[int, int]]:
    """(table number, id) of each row."""
    return list(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True))


def check_equal(store: Store, group: int, expected: Rows) -> None:
    """Compare a whole group with a dict, through get and through scan."""
    rows = RowIds(
        group, np.array([table for table, _ in expected], np.uint32), np.array([id for _, id in expected], np.int64)
    )
    row_bytes = len(next(iter(expected.values()), b""))
    if expected:
        assert read(store, rows, row_bytes) == list(expected.values())
    assert contents(store, group) == expected


class StoreContract:
    """Inherit, and say how a store is made. See the module's docstring."""

    ROUNDS: ClassVar[int] = 60

    def make_store(self, path: Path) -> Store:
        """A new store; `path` does not exist and may be used."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store | None:
        """Close a store and open it again, or None if nothing survives that."""
        return None

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """A new store, which the test closes."""
        return self.make_store(tmp_path / "store")

    # ---- one verb at a time

    def test_put_rows_are_found_to_the_bit(self, store: Store) -> None:
        """Nine ids from one end of int64 to the other are nine rows; an all-zero row is a row."""
        with store:
            table = store.open_table("t", schema_of(3))
            data = random_rows(np.random.default_rng(1), len(EXTREME_IDS), table)
            data[3] = 0
            data[4] = 255
            store.put(RowIds.of(table, EXTREME_IDS), data)
            assert read(store, RowIds.of(table, EXTREME_IDS), 12) == [row.tobytes() for row in data]
            assert store.stats().rows == 9

    def test_missing_ids_are_a_mask_and_nothing_is_stored_for_them(self, store: Store) -> None:
        """Looking for a row does not make one."""
        with store:
            table = store.open_table("t", schema_of(4))
            store.put(RowIds.of(table, np.array([1, 3])), np.ones((2, 16), np.uint8))
            assert read(store, RowIds.of(table, np.array([0, 1, 2, 3, -1])), 16) == [
                None, b"\1" * 16, None, b"\1" * 16, None,
            ]  # fmt: skip
            assert contents(store, table.group).keys() == {(table.number, 1), (table.number, 3)}

    def test_newest_put_wins_and_later_duplicates_win(self, store: Store) -> None:
        """Across calls, and among the positions of one call."""
        with store:
            table = store.open_table("t", schema_of(1))
            store.put(RowIds.of(table, np.array([7, 8])), np.zeros((2, 4), np.uint8))
            store.put(RowIds.of(table, np.array([7, 9, 7])), np.arange(12, dtype=np.uint8).reshape(3, 4))
            assert read(store, RowIds.of(table, np.array([7, 8, 9, 7])), 4) == [
                b"\x08\x09\x0a\x0b", b"\0\0\0\0", b"\x04\x05\x06\x07", b"\x08\x09\x0a\x0b",
            ]  # fmt: skip

    def test_deleted_rows_are_missing_until_put_again(self, store: Store) -> None:
        """Deleting what is not there, or twice, is fine."""
        with store:
            table = store.open_table("t", schema_of(1))
            both = RowIds.of(table, np.array([1, 2]))
            store.put(both, np.ones((2, 4), np.uint8))
            store.delete(RowIds.of(table, np.array([2, 3, 2, -(2**63)])))
            assert read(store, both, 4) == [b"\1\1\1\1", None]
            assert store.stats().rows == 1
            store.put(RowIds.of(table, np.array([2])), np.zeros((1, 4), np.uint8))
            assert read(store, both, 4) == [b"\1\1\1\1", b"\0\0\0\0"]

    def test_data_is_copied_during_the_call(self, store: Store) -> None:
        """What the caller does to its buffers afterwards changes nothing."""
        with store:
            table = store.open_table("t", schema_of(2))
            ids, data = np.array([5, 6]), np.full((2, 8), 9, np.uint8)
            store.put(RowIds.of(table, ids), data)
            ids[:], data[:] = 0, 0
            assert read(store, RowIds.of(table, np.array([5, 6])), 8) == [b"\x09" * 8] * 2

    def test_views_give_what_their_copies_give(self, store: Store) -> None:
        """Strided ids, rows that are part of wider rows, rows in reverse."""
        with store:
            table = store.open_table("t", schema_of(2))
            rng = np.random.default_rng(2)
            ids, wide = np.arange(20)[::2], rng.integers(0, 256, (10, 24), dtype=np.uint8)
            store.put(RowIds.of(table, ids), wide[::-1, 4:12])
            out, found = np.zeros((10, 24), np.uint8), np.zeros(10, np.bool_)
            store.get(RowIds.of(table, ids), out[::-1, 8:16], found)
            assert (out[:, 8:16] == wide[:, 4:12]).all()
            assert (out[:, :8] == 0).all() and (out[:, 16:] == 0).all()

    def test_empty_batches(self, store: Store) -> None:
        """No ids, no rows, no error."""
        with store:
            table = store.open_table("t", schema_of(2))
            none = RowIds.of(table, np.zeros(0, np.int64))
            store.put(none, np.zeros((0, 8), np.uint8))
            store.get(none, np.zeros((0, 8), np.uint8), np.zeros(0, np.bool_))
            store.delete(none)
            store.flush()
            assert contents(store, table.group) == {}

    @pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 33, 1000])
    def test_any_row_width(self, store: Store, width: int) -> None:
        """Widths that are no multiple of anything."""
        with store:
            table = store.open_table("t", schema_of(width))
            data = random_rows(np.random.default_rng(width), 50, table)
            store.put(RowIds.of(table, np.arange(50)), data)
            assert read(store, RowIds.of(table, np.arange(50)), 4 * width) == [row.tobytes() for row in data]

    # ---- tables and groups

    def test_tables_of_one_schema_share_a_group_and_no_row(self, store: Store) -> None:
        """The same id in two tables is two rows."""
        with store:
            a, b = store.open_table("a", schema_of(1)), store.open_table("b", schema_of(1))
            assert a.group == b.group and a.number != b.number
            rows = RowIds(a.group, np.array([a.number, b.number], np.uint32), np.array([4, 4]))
            store.put(rows, np.array([[1] * 4, [2] * 4], np.uint8))
            assert read(store, rows, 4) == [b"\1" * 4, b"\2" * 4]
            store.delete(RowIds.of(a, np.array([4])))
            assert read(store, rows, 4) == [None, b"\2" * 4]

    def test_groups_are_apart(self, store: Store) -> None:
        """Tables of other schemas are other groups, with rows of other widths."""
        with store:
            a, b = store.open_table("a", schema_of(1)), store.open_table("b", schema_of(1, 2))
            assert a.group != b.group
            store.put(RowIds.of(a, np.array([1])), np.full((1, 4), 1, np.uint8))
            store.put(RowIds.of(b, np.array([1])), np.full((1, 12), 2, np.uint8))
            assert contents(store, a.group) == {(a.number, 1): b"\1" * 4}
            assert contents(store, b.group) == {(b.number, 1): b"\2" * 12}

    def test_opening_a_table_again_gives_the_same_reference(self, store: Store) -> None:
        """And another schema is refused with both named."""
        with store:
            first = store.open_table("t", schema_of(4))
            assert store.open_table("t", schema_of(4)) == first
            with pytest.raises(SchemaMismatchError, match=r"weight float32\[4\].*weight float32\[5\]"):
                store.open_table("t", schema_of(5))

    def test_bad_arguments_are_refused_and_change_nothing(self, store: Store) -> None:
        """Shapes, dtypes and groups that do not fit."""
        with store:
            table = store.open_table("t", schema_of(2))
            two = RowIds.of(table, np.array([1, 2]))
            with pytest.raises(ValueError, match=r"expected uint8 \(2, 8\)"):
                store.put(two, np.zeros((2, 9), np.uint8))
            with pytest.raises(ValueError, match="adjacent"):
                store.put(two, np.zeros((2, 16), np.uint8)[:, ::2])
            with pytest.raises(ValueError, match=r"expected bool \(2,\)"):
                store.get(two, np.zeros((2, 8), np.uint8), np.zeros(3, np.bool_))
            with pytest.raises(StoreConfigError, match="group 5"):
                store.put(RowIds(5, two.tables, two.ids), np.zeros((2, 8), np.uint8))
            assert contents(store, table.group) == {}
            store.put(two, np.ones((2, 8), np.uint8))
            out = np.zeros((2, 8), np.uint8)
            out.flags.writeable = False
            with pytest.raises(ValueError, match="read-only"):
                store.get(two, out, np.zeros(2, np.bool_))
            assert not out.any()

    # ---- sequences

    def test_a_long_random_history_equals_a_dict(self, store: Store) -> None:
        """Puts, deletes, flushes and reopenings of two tables, with many duplicates."""
        rng = np.random.default_rng(3)
        expected: Rows = {}
        tables = [store.open_table(name, schema_of(5)) for name in ("a", "b")]
        numbers = np.array([table.number for table in tables], np.uint32)
        for step in range(self.ROUNDS):
            count = int(rng.integers(0, 400))
            rows = RowIds(tables[0].group, rng.choice(numbers, count), rng.integers(-700, 700, count))
            if step % 3 == 2:
                store.delete(rows)
                for row in named(rows):
                    expected.pop(row, None)
            else:
                data = random_rows(rng, count, tables[0])
                store.put(rows, data)
                expected |= {row: content.tobytes() for row, content in zip(named(rows), data, strict=True)}
            if step % 7 == 0:
                store.flush(str(step).encode())
            if step % 20 == 19:
                store = self.reopen(store) or store
                check_equal(store, tables[0].group, expected)
        with store:
            check_equal(store, tables[0].group, expected)
            assert store.stats().rows == len(expected)

    def test_a_scan_of_some_ids_of_one_table(self, store: Store) -> None:
        """Both ends belong to it; a range from end to end is everything, an empty one nothing."""
        with store:
            tables = [store.open_table(name, schema_of(2)) for name in "ab"]
            for table in tables:
                store.put(RowIds.of(table, EXTREME_IDS), random_rows(np.random.default_rng(table.number), 9, table))
            rows = contents(store, tables[0].group)
            for first, last in [(-5, 2**31), (-(2**63), 2**63 - 1), (0, 0), (1, 0), (2**62, 2**63 - 1)]:
                for which in (None, tables[0].number):
                    seen: Rows = {}
                    for block, data in store.scan(tables[0].group, table=which, first_id=first, last_id=last):
                        seen |= {row: content.tobytes() for row, content in zip(named(block), data, strict=True)}
                    expected = {row for row in rows if first <= row[1] <= last and which in (None, row[0])}
                    assert seen == {row: rows[row] for row in expected}

    def test_scan_refuses_to_go_on_after_a_change(self, store: Store) -> None:
        """Rather than give a row twice or leave one out."""
        with store:
            table = store.open_table("t", schema_of(1))
            store.put(RowIds.of(table, np.arange(20_000)), np.zeros((20_000, 4), np.uint8))
            blocks = store.scan(table.group)
            next(blocks)
            store.put(RowIds.of(table, np.array([5])), np.ones((1, 4), np.uint8))
            with pytest.raises(StoreChangedError, match="scan again"):
                list(blocks)

    def test_what_was_flushed_is_there_after_reopening_with_its_note(self, store: Store) -> None:
        """Tables, rows, deletions and the note; a flush without a note keeps the last."""
        a, b = store.open_table("a", schema_of(3)), store.open_table("b", schema_of(3, 3))
        data = random_rows(np.random.default_rng(4), 9, a)
        store.put(RowIds.of(a, EXTREME_IDS), data)
        store.put(RowIds.of(b, np.array([1])), np.zeros((1, 24), np.uint8))
        store.delete(RowIds.of(a, np.array([-5])))
        store.flush(b"step 7")
        store.flush()
        assert store.note == b"step 7"
        with self.reopen(store) or store as again:
            assert again.note == b"step 7"
            assert again.open_table("b", schema_of(3, 3)) == b
            expected = {
                (a.number, int(id)): row.tobytes() for id, row in zip(EXTREME_IDS, data, strict=True) if id != -5
            }
            check_equal(again, a.group, expected)
            check_equal(again, b.group, {(b.number, 1): bytes(24)})

    def test_memory_stays_below_what_memory_after_said(self, store: Store) -> None:
        """The bound holds for every number of rows, new or not."""
        with store:
            table = store.open_table("t", schema_of(4))
            rng = np.random.default_rng(5)
            for count in (0, 1, 3, 40, 700, 5000, 5000):
                bound = store.memory_after(count)
                assert bound >= store.stats().memory_bytes
                ids = rng.integers(-(2**63), 2**63 - 1, count)
                store.put(RowIds.of(table, ids), np.zeros((count, 16), np.uint8))
                assert store.stats().memory_bytes <= bound

    def test_a_closed_store_says_so(self, store: Store) -> None:
        """Every verb; closing again does nothing."""
        table = store.open_table("t", schema_of(1))
        store.close()
        store.close()
        one = RowIds.of(table, np.array([1]))
        for verb in (
            lambda: store.put(one, np.zeros((1, 4), np.uint8)),
            lambda: store.get(one, np.zeros((1, 4), np.uint8), np.zeros(1, np.bool_)),
            lambda: store.delete(one),
            lambda: store.flush(),
            lambda: list(store.scan(table.group)),
            lambda: store.open_table("t", schema_of(1)),
        ):
            with pytest.raises(StoreClosedError, match="closed"):
                verb()

    def test_a_scan_beside_a_put_gives_every_row_once_or_fails(self, store: Store) -> None:
        """Rows that another thread replaces are neither missing from it nor in it twice."""
        with store:
            table = store.open_table("t", schema_of(2))
            rows, data = RowIds.of(table, np.arange(3000)), np.zeros((3000, 8), np.uint8)
            store.put(rows, data)
            barrier = Barrier(2)

            def write() -> None:
                barrier.wait()
                for _ in range(40):
                    store.put(rows, data)

            writer = Thread(target=write)
            writer.start()
            barrier.wait()
            while writer.is_alive():
                with contextlib.suppress(StoreChangedError):
                    assert len(contents(store, table.group)) == 3000
            writer.join()
            assert len(contents(store, table.group)) == 3000

    def test_threads_see_whole_rows(self, store: Store) -> None:
        """Two writers and two readers of the same ids: a row read is one that somebody put."""
        with store:
            table = store.open_table("t", schema_of(8))
            ids, barrier, torn = np.arange(64), Barrier(4), []

            def write(first: int) -> None:
                barrier.wait()
                for step in range(first, first + 40):
                    store.put(RowIds.of(table, ids), np.full((64, 32), step, np.uint8))

            def look() -> None:
                barrier.wait()
                for _ in range(40):
                    for row in read(store, RowIds.of(table, ids), 32):
                        if row is not None and len(set(row)) != 1:
                            torn.append(row)

            threads = [Thread(target=write, args=(first,)) for first in (0, 100)] + [Thread(target=look) for _ in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not torn
            assert set(read(store, RowIds.of(table, ids), 32)) <= {bytes([39]) * 32, bytes([139]) * 32}

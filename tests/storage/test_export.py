"""Exports and imports: what comes back is what was there, or nothing has changed.

`python -m tests.storage.test_export` made `golden/export_v2`, and `export_v1` before: once, and never again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    Column,
    CorruptExportError,
    CorruptRowError,
    ExportError,
    LmdbStore,
    RowIds,
    RowSchema,
    StoreConfig,
    StoreConfigError,
    StoreFullError,
    StoreIOError,
    StoreReadOnlyError,
)
from storage.export import columns, manifest, read, write
from storage.export.ahead import _Maker, ahead
from storage.export.manifest import ExportFile, FileChecksum, load_export, verified
from storage.export.read import GUARD
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import checksum, long_checksum
from storage.testing import EXTREME_IDS, schema_of

pq = pytest.importorskip("pyarrow.parquet")

CONFIG = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=2)
GOLDEN = Path(__file__).parent / "golden"
ONE = schema_of(4, 1)
NOTE = b"\0 a note of any bytes \xff"

Contents = dict[tuple[str, int], bytes]


def open_store(path: Path, **options: Any) -> LmdbStore:
    return LmdbStore(path, config=CONFIG, **options)


def contents(store: LmdbStore) -> Contents:
    """All rows by table name and id."""
    names = {table.number: table.name for table in store.tables()}
    found: Contents = {}
    for group in sorted({table.group for table in store.tables()}):
        for rows, data in store.scan(group):
            for table, id, row in zip(rows.tables.tolist(), rows.ids.tolist(), data, strict=True):
                assert (names[table], id) not in found
                found[names[table], id] = row.tobytes()
    return found


def put(store: LmdbStore, table: str, ids: Any, seed: int, schema: RowSchema = ONE) -> None:
    ref = store.open_table(table, schema)
    ids = np.asarray(ids, np.int64)
    rows = np.random.default_rng(seed).integers(0, 256, (len(ids), schema.row_bytes), dtype=np.uint8)
    store.put(RowIds.of(ref, ids), rows)


def delete(store: LmdbStore, table: str, ids: Any, schema: RowSchema = ONE) -> None:
    store.delete(RowIds.of(store.open_table(table, schema), np.asarray(ids, np.int64)))


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LmdbStore]:
    """A store with two tables of one schema and one of another, and a snapshot "s0" of it."""
    with open_store(tmp_path / "source") as store:
        put(store, "a", range(2000), 1)
        put(store, "b", EXTREME_IDS, 2)
        put(store, "wide", range(100), 3, schema_of(70))
        store.snapshot("s0", NOTE)
        yield store


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LmdbStore]:
    with open_store(tmp_path / "target", durability="snapshot") as store:
        yield store


def run(arguments: list[str]) -> str:
    """What a Python of its own prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def change(store: LmdbStore, seed: int) -> None:
    """Rows that are replaced, new, deleted, and that come and go, also in a table that is new."""
    put(store, "a", range(seed * 100, seed * 100 + 300), seed)
    delete(store, "a", range(seed * 100 + 250, seed * 100 + 400))
    put(store, "b", range(5000, 5000 + seed * 10), seed)
    delete(store, "b", range(5000, 5000 + seed * 5))
    delete(store, "b", EXTREME_IDS[seed : seed + 2])
    put(store, f"new {seed}", range(50), seed, schema_of(3))


# ---- round trips


def test_a_full_export_gives_the_snapshot_and_not_what_came_after(
    source: LmdbStore, target: LmdbStore, tmp_path: Path
) -> None:
    expected = contents(source)
    change(source, 1)
    report = source.export(tmp_path / "x", snapshot="s0")
    assert (report.kind, report.rows, report.deletions, report.base) == ("full", len(expected), 0, None)
    done = target.import_(tmp_path / "x")
    assert contents(target) == expected
    assert (done.rows, done.row_bytes) == (report.rows, report.row_bytes)
    (made,) = target.snapshots()
    (was,) = source.snapshots()
    assert (made.name, made.note, made.origin, made.rows) == ("s0", NOTE, was.origin, len(expected))
    assert target.note == NOTE


def test_three_deltas_give_the_full_state(source: LmdbStore, target: LmdbStore, tmp_path: Path) -> None:
    """Case 29."""
    states = [contents(source)]
    source.export(tmp_path / "0", snapshot="s0")
    for n in (1, 2, 3):
        change(source, n)
        source.snapshot(f"s{n}", str(n).encode())
        states.append(contents(source))
        report = source.export(tmp_path / str(n), snapshot=f"s{n}", since=f"s{n - 1}")
        assert report.kind == "delta" and report.deletions > 0 and report.base == f"s{n - 1}"
        assert report.rows < len(states[-1])
    source.compact()
    for n in range(4):
        target.import_(tmp_path / str(n))
        assert contents(target) == states[n]
    assert [one.origin for one in target.snapshots()] == [one.origin for one in source.snapshots()]
    with target.at("s1") as view:
        assert sum(len(rows) for group in range(3) for rows, _ in view.scan(group)) == len(states[1])
    source.export(tmp_path / "all", snapshot="s3")
    with open_store(tmp_path / "again") as again:
        again.import_(tmp_path / "all")
        assert contents(again) == states[3]


def test_what_was_imported_can_be_exported_again(source: LmdbStore, target: LmdbStore, tmp_path: Path) -> None:
    source.export(tmp_path / "0", snapshot="s0")
    target.import_(tmp_path / "0", name="other name")
    change(target, 2)
    target.snapshot("after")
    target.export(tmp_path / "1", snapshot="after", since="other name")
    source.import_(tmp_path / "1")  # it has the base, under another name
    assert contents(source) == contents(target)


ALL_DTYPES = RowSchema(
    tuple(
        Column(f"{dtype}_{width}", dtype, width)
        for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
        for width in (1, 3)
    )
)
TAKEN_NAMES = RowSchema(tuple(Column(name, "float32", 1) for name in ("id", "table", "deleted", "id_", "id__")))


@pytest.mark.parametrize("schema", [ALL_DTYPES, TAKEN_NAMES, schema_of(1), schema_of(1, 7)], ids=str)
@pytest.mark.parametrize("compression", write.COMPRESSIONS)
def test_any_bits_of_any_columns(tmp_path: Path, schema: RowSchema, compression: str) -> None:
    with open_store(tmp_path / "s") as store, open_store(tmp_path / "t") as other:
        put(store, "ä 'table'", range(333), 1, schema)  # random bytes: NaNs of any payload among them
        store.snapshot("one")
        delete(store, "ä 'table'", range(5), schema)
        put(store, "ä 'table'", range(5, 9), 2, schema)
        store.snapshot("two")
        store.export(tmp_path / "x", snapshot="one", compression=compression)
        store.export(tmp_path / "y", snapshot="two", since="one", compression=compression)
        other.import_(tmp_path / "x")
        other.import_(tmp_path / "y")
        assert contents(other) == contents(store)


def test_many_blocks(source: LmdbStore, target: LmdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(read, "_PART_ROWS", 7)
    source.export(tmp_path / "x", snapshot="s0")
    assert pq.ParquetFile(tmp_path / "x" / "rows-0.parquet").num_row_groups > 10
    seen: list[tuple[int, int]] = []
    target.import_(tmp_path / "x", progress=lambda done, total: seen.append((done, total)))
    assert contents(target) == contents(source)
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_empty_snapshots_and_tables(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store, open_store(tmp_path / "t") as other:
        store.snapshot("nothing")
        store.open_table("empty", ONE)
        store.snapshot("a table")
        for name, since in (("nothing", None), ("a table", "nothing")):
            report = store.export(tmp_path / name, snapshot=name, since=since)
            assert (report.rows, report.file_bytes) == (0, 0)
            other.import_(tmp_path / name)
        assert [table.name for table in other.tables()] == ["empty"]
        assert [one.origin for one in other.snapshots()] == [one.origin for one in store.snapshots()]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "snapshot", "compact", "rollback"]), st.integers(0, 40)), max_size=25
)


@settings(max_examples=25)
@given(ACTIONS)
def test_deltas_after_any_history(tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]) -> None:
    path = tmp_path_factory.mktemp("export")
    states: list[Contents] = []
    with open_store(path / "s") as store:
        names: list[str] = []
        for seed, (what, n) in enumerate([*actions, ("snapshot", 0)]):
            if what == "put":
                put(store, "ab"[n % 2], range(n, n + 20), seed)
            elif what == "delete":
                delete(store, "ab"[n % 2], range(n, n + 12))
            elif what == "compact":
                store.compact()
            elif what == "rollback" and names:
                store.rollback(names[-1])
            elif what == "snapshot":
                store.snapshot(f"s{seed}")
                states.append(contents(store))
                store.export(path / str(len(names)), snapshot=f"s{seed}", since=names[-1] if names else None)
                names.append(f"s{seed}")
    with open_store(path / "t") as other:
        for n, state in enumerate(states):
            other.import_(path / str(n))
            assert contents(other) == state


def test_rows_without_an_index_are_all_rows_or_none(source: LmdbStore, target: LmdbStore, tmp_path: Path) -> None:
    def found(store: LmdbStore, name: str) -> set[tuple[int, int, bytes]] | None:
        blocks = store.all_rows(name)
        if blocks is None:
            return None
        rows = [
            (*key, row.tobytes()) for ids, data in blocks for *key, row in zip(ids.tables, ids.ids, data, strict=True)
        ]
        assert len(rows) == len(set(rows))
        return {(int(table), int(id), row) for table, id, row in rows}

    expected = len(contents(source))
    first = found(source, "s0")
    assert first is not None and len(first) == expected
    put(source, "a", [4], 9)
    source.snapshot("replaced")
    assert found(source, "replaced") is None  # no tombstone tells of it
    delete(source, "a", [3])
    source.snapshot("deleted")
    assert found(source, "deleted") is None and found(source, "s0") == first
    source.export(tmp_path / "x", snapshot="deleted")
    target.import_(tmp_path / "x")
    again = found(target, "deleted")
    assert again is not None and {row for _, _, row in again} == set(contents(source).values())
    source.rollback("s0", drop_later=True)
    assert found(source, "s0") == first


def test_a_damaged_row_is_found_without_an_index(source: LmdbStore, tmp_path: Path) -> None:
    row = contents(source)["a", 77]
    data = (tmp_path / "source" / "data.mdb").read_bytes()
    at = data.index(row)
    with open(tmp_path / "source" / "data.mdb", "r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    with pytest.raises(CorruptRowError) as caught:
        source.export(tmp_path / "x", snapshot="s0")
    assert caught.value.id == 77
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# ---- what others read


def test_any_reader_of_parquet_reads_it(source: LmdbStore, tmp_path: Path) -> None:
    change(source, 1)
    source.snapshot("s1")
    source.export(tmp_path / "x", snapshot="s1", since="s0")
    table = pq.read_table(tmp_path / "x" / "rows-0.parquet")
    assert table.column_names == ["table", "id", *[column.name for column in ONE.columns], "deleted"]
    field = table.schema.field(ONE.columns[0].name)
    assert field.metadata[b"dtype"] == b"float32" and field.metadata[b"width"] == b"4"
    now = contents(source)
    for row in table.to_pylist():
        key = row["table"], row["id"]
        assert row["deleted"] == (key not in now)
        if key in now:
            assert row[field.name] == now[key][:16]
            one = np.float32(row[ONE.columns[1].name])
            assert np.isnan(one) or one.tobytes() == now[key][16:]


def test_zstd_where_it_pays(tmp_path: Path) -> None:
    schema = RowSchema((Column("weight", "float32", 8), Column("sum", "float32", 8)))
    with open_store(tmp_path / "s") as store:
        ref = store.open_table("a", schema)
        rows = np.random.default_rng(0).integers(0, 256, (3000, 64), dtype=np.uint8)
        rows[:, 32:] = 0
        store.put(RowIds.of(ref, np.arange(3000)), rows)
        store.snapshot("one")
        sizes = {}
        for compression in write.COMPRESSIONS:
            sizes[compression] = store.export(
                tmp_path / compression, snapshot="one", compression=compression
            ).file_bytes
        group = pq.ParquetFile(tmp_path / "auto" / "rows-0.parquet").metadata.row_group(0)
        assert [group.column(at).compression for at in range(4)] == ["ZSTD", "ZSTD", "UNCOMPRESSED", "ZSTD"]
        assert sizes["auto"] < 0.6 * sizes["none"] and sizes["zstd"] <= sizes["auto"] * 1.01
        with pytest.raises(StoreConfigError, match="compression='lz4': expected one of"):
            store.export(tmp_path / "y", snapshot="one", compression="lz4")


# ---- refusals of an export


def test_an_export_goes_into_a_new_directory(source: LmdbStore, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(StoreConfigError, match="is there already"):
        source.export(tmp_path / "x", snapshot="s0")
    (tmp_path / "y.tmp").mkdir()
    (tmp_path / "y.tmp" / "thesis.doc").touch()
    with pytest.raises(StoreConfigError, match=r"holds 'thesis\.doc': remove it"):
        source.export(tmp_path / "y", snapshot="s0")
    (tmp_path / "y.tmp" / "thesis.doc").rename(tmp_path / "y.tmp" / "rows-0.parquet")  # as a killed export leaves it
    (tmp_path / "y.tmp" / "manifest.json.tmp").touch()
    source.export(tmp_path / "y", snapshot="s0")
    assert not (tmp_path / "y.tmp").exists() and not list((tmp_path / "x").iterdir())
    with pytest.raises(StoreIOError, match="could not be written"):
        source.export(tmp_path / "no" / "such", snapshot="s0")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"snapshot": "s9"}, "has no snapshot 's9'"),
        ({"snapshot": "s0", "since": "s9"}, "has no snapshot 's9'"),
        ({"snapshot": "s0", "since": "s0"}, "to itself"),
        ({"snapshot": "s0", "since": "s1"}, "newer"),
    ],
)
def test_snapshots_that_make_no_export(source: LmdbStore, tmp_path: Path, names: Any, message: str) -> None:
    source.snapshot("s1")
    with pytest.raises(StoreConfigError, match=message):
        source.export(tmp_path / "x", **names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("at", [0, 3])
def test_an_export_that_fails_leaves_nothing(
    source: LmdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(write, "_BLOCK_BYTES", 3000)
    calls: list[int] = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) > at:
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreFullError, match="could not be written"):
        source.export(tmp_path / "x", snapshot="s0", progress=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_damaged_row_ends_an_export(source: LmdbStore, tmp_path: Path) -> None:
    source.flush()
    row = contents(source)["a", 77]
    source.close()
    data = bytearray((tmp_path / "source" / "data.mdb").read_bytes())
    data[data.index(row)] ^= 1
    (tmp_path / "source" / "data.mdb").write_bytes(data)
    with open_store(tmp_path / "source", read_only=True) as reader:
        with pytest.raises(Exception, match=r"row with id 77 .* is damaged"):
            reader.export(tmp_path / "x", snapshot="s0")
        assert not (tmp_path / "x").exists() and not (tmp_path / "x.tmp").exists()


def test_a_reader_exports_beside_the_writer(source: LmdbStore, target: LmdbStore, tmp_path: Path) -> None:
    program = (
        "import sys; from storage import LmdbStore\n"
        "with LmdbStore(sys.argv[1], read_only=True) as store: store.export(sys.argv[2], snapshot='s0')"
    )
    run(["-c", program, str(tmp_path / "source"), str(tmp_path / "x")])
    target.import_(tmp_path / "x")
    assert contents(target) == contents(source)
    source.close()
    with open_store(tmp_path / "source", read_only=True) as reader, pytest.raises(StoreReadOnlyError):
        reader.import_(tmp_path / "x")


def test_without_pyarrow_it_says_what_to_install(
    source: LmdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (lambda: source.export(tmp_path / "x", snapshot="s0"), lambda: source.import_(tmp_path / "x")):
        with pytest.raises(StoreConfigError, match=r"pip install 'tiered-emb\[export\]'"):
            call()


# ---- refusals of an import


@pytest.fixture
def full(source: LmdbStore, tmp_path: Path) -> Path:
    source.export(tmp_path / "full", snapshot="s0")
    return tmp_path / "full"


@pytest.fixture
def delta(source: LmdbStore, tmp_path: Path) -> Path:
    change(source, 1)
    source.snapshot("s1")
    source.export(tmp_path / "delta", snapshot="s1", since="s0")
    return tmp_path / "delta"


def refused(store: LmdbStore, path: Path, error: type[Exception], message: str, **options: Any) -> None:
    """An import that is refused changes nothing, not even what is flushed."""
    before, snapshots, states = contents(store), store.snapshots(), store._session.state.number
    with pytest.raises(error, match=message):
        store.import_(path, **options)
    assert contents(store) == before
    assert (store.snapshots(), store._session.state.number) == (snapshots, states)  # compaction commits when it likes


def test_a_full_export_goes_into_tables_without_rows(target: LmdbStore, full: Path) -> None:
    put(target, "b", [7], 1)
    refused(target, full, ExportError, "table 'b' of .* has rows: .* is a full export")
    delete(target, "b", [7])
    target.import_(full)
    refused(target, full, ExportError, "has rows", name="again")


def test_rows_of_other_tables_end_the_chain(target: LmdbStore, full: Path, delta: Path) -> None:
    """The snapshot is not what was exported then, so it must not say so."""
    put(target, "mine", [7], 1)
    report = target.import_(full)
    assert len(contents(target)) == report.rows + 1
    assert report.origin.startswith(str(target.uuid))
    refused(target, delta, ExportError, "does not have")


def test_a_delta_needs_its_base(target: LmdbStore, source: LmdbStore, full: Path, delta: Path) -> None:
    refused(target, delta, ExportError, "is what changed from snapshot 's0' .* import that first.* none")
    target.import_(full)
    target.import_(delta)
    assert contents(target) == contents(source)
    refused(target, delta, ExportError, "changed after its snapshot 's0'", name="twice")


def test_a_delta_of_another_run_is_refused(target: LmdbStore, full: Path, tmp_path: Path) -> None:
    """Case 29: the same names, other rows."""
    with open_store(tmp_path / "other") as other:
        put(other, "a", range(2000), 99)
        other.snapshot("s0")
        put(other, "a", [5], 98)
        other.snapshot("s1")
        other.export(tmp_path / "left over", snapshot="s1", since="s0")
    target.import_(full)
    refused(target, tmp_path / "left over", ExportError, "does not have: import that first. Its newest snapshots: 's0'")


def test_a_delta_of_a_run_that_was_rolled_back_is_refused(
    source: LmdbStore, target: LmdbStore, full: Path, delta: Path, tmp_path: Path
) -> None:
    source.rollback("s0", drop_later=True)
    change(source, 2)
    source.snapshot("s1")
    change(source, 3)
    source.snapshot("s2")
    source.export(tmp_path / "2", snapshot="s2", since="s1")
    target.import_(full)
    target.import_(delta)  # the s1 that was given up
    refused(target, tmp_path / "2", ExportError, "which .* does not have")


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_delta_goes_onto_its_base_alone(
    source: LmdbStore, target: LmdbStore, full: Path, delta: Path, what: str, flushed: bool
) -> None:
    target.import_(full)
    (put(target, "a", [3], 9) if what == "put" else delete(target, "a", [3]))
    if flushed:
        target.flush()
    refused(target, delta, ExportError, "was changed after its snapshot 's0'")
    target.import_(delta, rollback=True)
    assert contents(target) == contents(source)


def test_compaction_changes_nothing(source: LmdbStore, target: LmdbStore, full: Path, delta: Path) -> None:
    target.import_(full)
    target.compact()
    target.snapshot("the same")
    target.import_(delta)
    assert contents(target) == contents(source)


def test_schemas_and_names_must_fit(target: LmdbStore, full: Path) -> None:
    target.open_table("wide", schema_of(3))
    refused(target, full, ExportError, "table 'wide' of .* holds rows of .* has rows of")
    refused(target, full, StoreConfigError, "a snapshot named 'a\\\\nb'", name="a\nb")


def test_a_name_that_is_taken(target: LmdbStore, full: Path) -> None:
    target.snapshot("s0")
    refused(target, full, StoreConfigError, "has a snapshot 's0' already")
    refused(target, full, StoreConfigError, "is kept for what imports need", name=GUARD)
    assert target.import_(full, name="other").snapshot == "other"


def test_what_is_no_export(target: LmdbStore, tmp_path: Path, full: Path) -> None:
    refused(target, tmp_path / "nowhere", ExportError, "is no export")
    refused(target, tmp_path / "source", ExportError, "is not the manifest of an export")
    data = json.loads((full / "manifest.json").read_text())
    data["version"] = 3
    del data["checksum"]
    data["checksum"] = (
        f"{checksum(json.dumps(data, sort_keys=True, separators=(',', ':'), ensure_ascii=False).encode()):016x}"
    )
    (full / "manifest.json").write_text(json.dumps(data))
    refused(target, full, ExportError, "has version 3: this program reads versions 1 and 2")


# ---- interrupts


@pytest.mark.parametrize("verb", ["snapshot", "snapshot_of"])
def test_ctrl_c_at_the_beginning_leaves_no_guard_and_at_the_end_says_that_all_is_there(
    target: LmdbStore, full: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    real = getattr(LmdbStore, verb)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        real(*arguments, **named)
        raise KeyboardInterrupt  # that was held back until then

    monkeypatch.setattr(LmdbStore, verb, interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        target.import_(full)
    monkeypatch.undo()
    names = [one.name for one in target.snapshots()]
    notes = getattr(caught.value, "__notes__", [])
    if verb == "snapshot":
        assert (names, target.stats().rows, notes) == ([], 0, [])
        target.import_(full)
    else:
        assert names == [load_export(full).snapshot]
        assert len(notes) == 1
        assert "by then all was imported" in notes[0]
    assert target.stats().rows == load_export(full).rows


@pytest.mark.parametrize("kind", ["export", "import"])
def test_without_a_thread_it_is_done_all_the_same(
    source: LmdbStore, target: LmdbStore, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    target.flush()
    with monkeypatch.context() as patch:
        patch.setattr(_Maker, "start", refused)
        if kind == "export":
            source.export(tmp_path / "again", snapshot=load_export(full).snapshot)
        else:
            target.import_(full)
    if kind == "export":
        target.import_(tmp_path / "again")
    assert target.stats().rows == load_export(full).rows


def test_a_file_that_is_cut_short_while_it_is_imported_is_an_error(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "s") as store:
        put(store, "a", range(80_000), 1, RowSchema((Column("weight", "float32", 256),)))
        store.snapshot("s0")
        store.export(tmp_path / "export", snapshot="s0")
    file = tmp_path / "export" / "rows-0.parquet"
    size = file.stat().st_size

    def cut(done: int, total: int) -> None:
        if done > size:  # verified, and some of it put
            os.truncate(file, size // 4)

    with LmdbStore(tmp_path / "t") as target:
        with pytest.raises(CorruptExportError, match="was cut short while it was imported"):
            target.import_(tmp_path / "export", progress=cut)
        assert target.stats().rows == 0
        assert not target.snapshots()


# ---- damage


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_flipped_byte_anywhere_is_refused(
    source: LmdbStore, target: LmdbStore, full: Path, delta: Path, kind: str
) -> None:
    export = full if kind == "full" else delta
    if kind == "delta":
        target.import_(full)
    for path in sorted(export.iterdir()):
        whole = path.read_bytes()
        for at in np.linspace(0, len(whole) - 1, 9).astype(int).tolist():
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            if path.name != "manifest.json" or not whole[at : at + 1].isspace():
                refused(target, export, (CorruptExportError, ExportError), path.name)  # type: ignore[arg-type]
        for cut in (whole[:-1], whole + b"\0", b""):
            path.write_bytes(cut)
            if path.name != "manifest.json" or cut != whole[:-1]:  # which is a line end
                refused(target, export, CorruptExportError, path.name)
        path.unlink()
        refused(target, export, (CorruptExportError, ExportError), path.name)  # type: ignore[arg-type]
        path.write_bytes(whole)
    target.import_(export)


def rewritten(export: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that says something else, and means it."""
    data = json.loads((export / "manifest.json").read_text())
    change(data)
    del data["checksum"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (export / "manifest.json").write_text(json.dumps({**data, "checksum": f"{checksum(text.encode()):016x}"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["files"][0].update(rows=5), "rows: expected 5"),
        (lambda data: data["snapshot"].update(rows=5), "its snapshot has 5"),
        (lambda data: data["groups"][0]["columns"].pop(), "other types"),
        (lambda data: data["tables"].pop(0), "rows of table 'a', which its manifest does not name"),
    ],
)
def test_files_that_are_not_what_the_manifest_says_are_taken_back(
    target: LmdbStore, full: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    rewritten(full, change)
    put(target, "other", range(10), 1)
    target.flush(b"mine")
    if "snapshot has" in message:
        delete(target, "other", range(10))
    before = contents(target)
    with pytest.raises(CorruptExportError, match=message):
        target.import_(full)
    assert contents(target) == before and target.snapshots() == [] and target.note == b"mine"


# ---- interrupted


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, StoreFullError])
def test_an_import_that_fails_anywhere_is_taken_back(
    source: LmdbStore,
    target: LmdbStore,
    full: Path,
    delta: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    error: type[BaseException],
) -> None:
    monkeypatch.setattr(read, "_PART_ROWS", 300)
    export = full if kind == "full" else delta
    if kind == "delta":
        target.import_(full)
    before, snapshots = contents(target), target.snapshots()
    whole, calls, fail_at = LmdbStore.put, 0, 0

    def failing(self: LmdbStore, *arguments: Any) -> None:
        nonlocal calls
        whole(self, *arguments)
        calls += 1
        if calls == fail_at:
            raise error("in the middle")

    while True:
        calls, fail_at = 0, fail_at + 1
        with monkeypatch.context() as patch:
            patch.setattr(LmdbStore, "put", failing)
            try:
                target.import_(export)
                break
            except error:
                pass
        assert contents(target) == before and target.snapshots() == snapshots
    assert fail_at > (7 if kind == "full" else 2)
    names = [one.origin for one in source.snapshots()]
    assert [one.origin for one in target.snapshots()] == names[: len(snapshots) + 1]


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_a_crash_in_the_middle(
    source: LmdbStore, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Any
) -> None:
    class Crash(BaseException):
        pass

    def die(self: Any) -> None:
        target.abandon()
        raise Crash

    target = open_store(tmp_path / "target", durability=durability)
    put(target, "mine", [1], 1)
    before = contents(target)
    with monkeypatch.context() as patch:
        patch.setattr(read._Import, "_finish", die)
        patch.setattr(read._Import, "_undo", lambda self, error: None)
        with pytest.raises(Crash):
            target.import_(full)
    with open_store(tmp_path / "target", durability=durability) as target:
        assert [one.name for one in target.snapshots()] == [GUARD]
        if durability == "snapshot":
            assert contents(target) == before
            target.import_(full)
        else:
            assert len(contents(target)) > len(before)
            refused(target, full, ExportError, "was cut off. Its rows, and whatever was put after it began")
            target.import_(full, rollback=True)
        assert contents(target) == before | contents(source)
        assert [one.name for one in target.snapshots()] == ["s0"]


def test_a_disk_that_fails_leaves_the_guard(target: LmdbStore, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise StoreIOError("the disk is gone")

    monkeypatch.setattr(LmdbStore, "put", fail)
    monkeypatch.setattr(LmdbStore, "rollback", fail)
    with pytest.raises(StoreIOError, match="the disk is gone") as caught:
        target.import_(full)
    assert "go back to its snapshot 'before an import'" in caught.value.__notes__[0]
    assert [one.name for one in target.snapshots()] == [GUARD]


# ---- memory


def test_imports_and_exports_hold_two_blocks(tmp_path: Path) -> None:
    """Case 31: 64 MB above the imported interpreter and what the store and an index of the snapshot take."""
    done = run([str(Path(__file__).with_name("export_memory.py")), str(tmp_path)])
    figures = json.loads(done.splitlines()[-1])
    assert figures["export_mb"] < 64 + figures["index_mb"], figures
    assert figures["import_mb"] < 64 + figures["store_mb"], figures


# ---- parts


def test_a_files_checksum_is_the_same_in_any_pieces() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5_000_001, dtype=np.uint8).tobytes()
    digests = set()
    for size in (999, 1 << 20, 3_000_000, len(data)):
        file = FileChecksum()
        for at in range(0, len(data), size):
            file.add(memoryview(data)[at : at + size])
        digests.add(file.digest())
    blocks = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
    words = b"".join(long_checksum(block).to_bytes(8, "little") for block in blocks)
    assert digests == {f"{checksum(words):016x}"}


def _chain(data: bytes) -> str:
    """As version 1 of the format had it."""
    value = 0
    for at in range(0, len(data), 1 << 20):
        value = checksum(data[at : at + (1 << 20)], value)
    return f"{value:016x}"


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("size", [0, 1, 239, 241, 1 << 20, (3 << 20) + 1, (1 << 23) + 1])
def test_files_of_any_size_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, chained: bool
) -> None:
    monkeypatch.setattr(manifest, "_SPAN_BYTES", 1 << 21)
    monkeypatch.setattr(manifest, "_CHUNK_BYTES", 1 << 22)
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    (tmp_path / "rows-0.parquet").write_bytes(data)
    of = FileChecksum()
    of.add(memoryview(data))
    file = ExportFile("rows-0.parquet", 0, 1, 0, size, _chain(data) if chained else of.digest())
    assert sum(verified(tmp_path / file.name, file, chained=chained)) == size
    for at in (0, size // 2, size - 1) if size else ():
        (tmp_path / file.name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptExportError, match="is damaged: its checksum is"):
            sum(verified(tmp_path / file.name, file, chained=chained))


@pytest.mark.parametrize("chained", [False, True])
def test_files_that_are_read_in_short_pieces_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chained: bool
) -> None:
    data, preadv = bytes(range(256)) * 20_000, os.preadv
    (tmp_path / "rows-0.parquet").write_bytes(data)
    of = FileChecksum()
    of.add(memoryview(data))
    file = ExportFile("rows-0.parquet", 0, 1, 0, len(data), _chain(data) if chained else of.digest())
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:70_001]], at))
    assert sum(verified(tmp_path / file.name, file, chained=chained)) == len(data)


def test_a_delta_asks_for_the_stored_ids_of_its_rows_and_a_full_export_does_not(
    target: LmdbStore, full: Path, delta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ask = GroupRows._ask_for_ids

    def counted(group: GroupRows, tables: Any, ids: Any, known: Any) -> None:
        asked.append(len(ids))
        ask(group, tables, ids, known)

    monkeypatch.setattr(GroupRows, "_ask_for_ids", counted)
    target.import_(full)
    assert not asked
    target.import_(delta)
    assert asked


def test_ahead_makes_one_item_ahead_and_passes_errors_on() -> None:
    made: list[int] = []
    closed: list[bool] = []

    def items() -> Iterator[int]:
        try:
            for n in range(10):
                made.append(n)
                yield n
        finally:
            closed.append(True)

    loop = ahead(items())
    assert next(loop) == 0 and next(loop) == 1 and next(loop) == 2
    loop.close()
    assert 3 <= len(made) <= 4 and closed == [True]
    assert list(ahead(range(5))) == [0, 1, 2, 3, 4]

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("in the thread")

    loop = ahead(failing())
    assert next(loop) == 1
    with pytest.raises(ValueError, match="in the thread"):
        next(loop)


def test_column_names_are_different() -> None:
    names = columns.column_names(TAKEN_NAMES)
    assert len({*names, "table", "id", "deleted"}) == 8


# ---- golden files


def fill(store: LmdbStore) -> None:
    put(store, "a", [*EXTREME_IDS, 10, 11], 1)
    put(store, "mixed", range(5), 2, ALL_DTYPES)
    store.snapshot("s0", NOTE)


def fill_more(store: LmdbStore) -> None:
    put(store, "a", [10, 12], 3)
    delete(store, "a", [11, *EXTREME_IDS[:2]])
    put(store, "b", [1], 4)
    store.snapshot("s1")


@pytest.mark.parametrize("version", [1, 2])
def test_golden_exports_load_for_ever(target: LmdbStore, tmp_path: Path, version: int) -> None:
    golden = GOLDEN / f"export_v{version}"
    with open_store(tmp_path / "s") as same:
        for name, more in (("full", fill), ("delta", fill_more)):
            shutil.copytree(golden / name, tmp_path / name)
            more(same)
            target.import_(tmp_path / name)
            assert contents(target) == contents(same)
    assert target.snapshots()[0].note == NOTE
    assert load_export(golden / "delta").base == "s0"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch, open_store(Path(scratch) / "s") as made:
        fill(made)
        made.export(GOLDEN / "export_v2" / "full", snapshot="s0")
        fill_more(made)
        made.export(GOLDEN / "export_v2" / "delta", snapshot="s1", since="s0")

"""`python -m benchmarks store` at sizes that take seconds, and what its figures rest on."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import disk, store, store_phases
from benchmarks.__main__ import main
from benchmarks.disk import CannotMeasure, drop_page_cache, file_system, fio_pages_per_s, scratch, written_bytes
from benchmarks.store_internals import index_bytes, pages_of, store_config
from benchmarks.store_latency import PacedLoad, Turns, beside_compaction, p999
from benchmarks.store_phases import Workload
from benchmarks.store_sides import Batch, LmdbRows, Ours, RocksRows, Side
from benchmarks.store_writer import write_and_kill
from storage import CorruptionError, LmdbStore, RowIds

MUST_SHOW = {
    *("get_ns", "lmdb_rows_ns", "rocksdict_ns", "vs_lmdb_rows_read", "vs_rocksdb_read", "vs_lmdb_rows_update"),
    *("cold_pages_per_s", "fio_pages_per_s", "cold_read_vs_fio", "vs_rocksdb_update", "write_amplification"),
    *("write_amplification_steady", "space_amplification_steady", "recovery_rows_per_s", "clean_open_s"),
    *("index_bytes_per_row", "p999_beside_compaction"),
}
SMALL = (
    "--rows 3000 --wide-rows 1000 --open-rows 3000 --rounds 2 --update-rounds 2 --upkeep-batches 2 --rewrites 1 "
    "--cold-rounds 1"
)
WORK = Workload(rows=3000, row_bytes=128, batch=1000)


@pytest.fixture
def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.mark.usefixtures("no_fio")
def test_small_sizes_give_every_figure_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"{SMALL} --turns 1 --turn-seconds 0.2 --pace 20 --directory {tmp_path} --json -"
    assert main(["store", *options.split()]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert set(figures) >= MUST_SHOW
    assert {"get_ns_wide", "vs_lmdb_rows_read_wide", "write_amplification_steady_wide"} <= set(figures)
    assert figures["fio_pages_per_s"] is None
    assert figures["cold_read_vs_fio"] is None
    assert "fio is not installed" in figures["cold_read_reason"]
    assert "Not measured: fio is not installed" in printed.replace("\n", " ")
    assert figures["write_amplification"] > 1  # ids and checksums
    assert figures["index_bytes_per_row"] > 8
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "argument --rows: 0 is too few; expected 1 or more"),
        (["--rewrites", "0.5"], "argument --rewrites: 0.5 is too few; expected 1 or more"),
        (["--wide-rows", "many"], "argument --wide-rows: invalid integer value: 'many'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "measure", lambda options: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        main(["store", *options])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(params=[Ours, LmdbRows, RocksRows], ids=lambda kind: kind.__name__)
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Side:
    if request.param is RocksRows:
        pytest.importorskip("rocksdict")
    made: Side = request.param(tmp_path, WORK.row_bytes)
    return made


def test_every_side_gives_back_what_was_written_last(side: Side) -> None:
    store_phases.load({"one": side}, WORK)
    batch, data = Batch.of(np.array([5, 7, 2999])), WORK.data(9)[:3]
    side.update(batch, data)
    side.settle()
    assert bytes(side.read(batch)) == data.tobytes()
    assert bytes(side.read(Batch.of(np.array([6])))) == np.roll(WORK.data(0), 0, axis=0)[6].tobytes()
    side.close()


def test_sides_that_differ_are_not_timed(tmp_path: Path) -> None:
    sides: dict[str, Side] = {"ours": Ours(tmp_path, 128), "lmdb_rows": LmdbRows(tmp_path, 128)}
    store_phases.load(sides, WORK)
    sides["ours"].update(Batch.of(np.array([1500])), WORK.data(1)[:1])
    with pytest.raises(RuntimeError, match="different bytes for ids 1000 to 2000"):
        store_phases.warm_reads(sides, WORK, rounds=1)
    for one in sides.values():
        one.close()


def test_pages_are_those_that_the_rows_of_a_batch_lie_on(tmp_path: Path) -> None:
    ours = Ours(tmp_path, 516)
    rows = Workload(1000, 516, 1000)
    store_phases.load({"ours": ours}, rows)
    everything = RowIds.of(ours.table, np.arange(1000))
    whole = 1000 * 528 / mmap.PAGESIZE
    assert whole <= pages_of(ours.store, everything) <= whole + 3
    assert pages_of(ours.store, RowIds.of(ours.table, np.array([3, 3, 3]))) in (1, 2)
    assert 8 * 1000 < index_bytes(ours.store) < ours.store.stats().memory_bytes
    ours.close()


def test_dropping_the_page_cache_drops_it_and_harms_no_mapping(tmp_path: Path) -> None:
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        with pytest.raises(CannotMeasure):
            _drop(tmp_path)
        return
    _drop(tmp_path)


def _drop(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = mapped[:]
        drop_page_cache(path)
        assert mapped[:] == before


def test_a_file_that_stays_in_memory_is_no_cold_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(disk, "_resident_share", lambda descriptor: 0.5)
    monkeypatch.setattr(disk, "_drop_all", lambda: None)
    with pytest.raises(CannotMeasure, match="50% of file stayed in memory"):
        drop_page_cache(tmp_path / "file")


def test_bytes_written_are_counted(tmp_path: Path) -> None:
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("nothing is written to a file system in memory")
    before = written_bytes()
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    assert 1 << 20 <= written_bytes() - before < 3 << 20


def test_fio_reads_the_file(
    tmp_path: Path, require_tool: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_tool("fio")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert fio_pages_per_s(path, 0.2) > 0
    monkeypatch.setattr(disk, "_ENGINES", ("no_such_engine",))
    with pytest.raises(CannotMeasure, match="could not read file with no_such_engine"):
        fio_pages_per_s(path, 0.2)


def test_scratch_is_on_a_disk_if_there_is_one_and_goes_when_the_work_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "memory"))
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "disk"))
    monkeypatch.setattr(disk, "file_system", lambda path: "ext4" if path == tmp_path / "disk" else "tmpfs")
    failing = scratch(None)
    assert failing.__enter__().parent == tmp_path / "disk"
    assert failing.__exit__(ZeroDivisionError, ZeroDivisionError(), None) is False
    assert not list((tmp_path / "disk").iterdir())
    with scratch(str(tmp_path / "memory")) as made:
        assert made.parent == tmp_path / "memory"


def test_the_writer_is_killed_with_all_rows_durable(tmp_path: Path) -> None:
    write_and_kill(tmp_path / "store", 2000, 16)
    with LmdbStore(tmp_path / "store") as opened:
        assert opened.stats().rows == 2000


def test_a_store_with_too_few_rows_is_no_recovery(tmp_path: Path) -> None:
    ours = Ours(tmp_path, 16)
    ours.update(Batch.of(np.arange(10)), np.zeros((10, 16), np.uint8))
    ours.close()
    with pytest.raises(RuntimeError, match="opened with 10 rows; 11 were written"):
        store_phases._open_seconds(ours.path, 11, close=True)


def test_latencies_count_from_when_a_call_was_due_and_turns_alternate(tmp_path: Path) -> None:
    ours = Ours(tmp_path, 16)
    ours.update(Batch.of(np.arange(5000)), np.zeros((5000, 16), np.uint8))
    ours.close()
    turns = Turns()
    load = PacedLoad(ours.path, 16, 5000, compacting=False, a_second=50, seconds=0.2)
    load.turn(turns)
    assert load.rows == 5000
    assert [len(turn) for turn in (*turns.gets, *turns.puts)] == [10, 10]
    load.compacting = True
    load.turn(turns)
    assert load.rows == 5000 + 60 * 512  # an eighth of each put is new
    with LmdbStore(ours.path) as opened:
        assert opened.stats().rows == load.rows


def test_beside_compaction_a_store_grows_and_its_copy_does_not(tmp_path: Path) -> None:
    ours = Ours(tmp_path, 16)
    ours.update(Batch.of(np.arange(5000)), np.zeros((5000, 16), np.uint8))
    ours.close()
    load = PacedLoad(ours.path, 16, 5000, compacting=True, a_second=50, seconds=0.2)
    figures = beside_compaction(load, 2)
    assert set(figures) >= {"p999_beside_compaction", "p999_gets_alone_ms", "p999_puts_beside_ms"}
    sizes = []
    for path in (ours.path, tmp_path / "ours-alone"):
        with LmdbStore(path) as opened:
            sizes.append(opened.stats().rows)
    assert sizes == [5000 + 2 * 60 * 512, 5000]


def test_a_call_that_fails_ends_the_latencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Ours(tmp_path, 16)
    ours.update(Batch.of(np.arange(10)), np.zeros((10, 16), np.uint8))
    ours.close()

    def fails(*arguments: object) -> None:
        raise CorruptionError("a damaged row")

    monkeypatch.setattr(LmdbStore, "get", fails)
    with pytest.raises(CorruptionError, match="a damaged row"):
        PacedLoad(ours.path, 16, 10, compacting=False, a_second=50, seconds=0.1).turn(Turns())


def test_p999_is_the_one_in_a_thousand() -> None:
    assert p999([*map(float, range(2000))]) == 1998.0


def test_without_compaction_means_never_by_itself() -> None:
    assert getattr(store_config(compacting=False), "compact_bytes_per_s", 0) == 0

"""What TraceWriter records comes back; a file that is cut or damaged is noticed, and gives only what is whole."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.schema import table_number
from tiered_emb.errors import ConfigError, InvalidBatchError, TieredEmbError, TraceError, TraceWriteError
from tiered_emb.trace import Trace, TraceWriter, read_trace, sampled, writer
from tiered_emb.trace.sampling import sample_hash

Batch = tuple[np.ndarray | int, np.ndarray]


def batch(tables: list[int] | int, ids: list[int]) -> Batch:
    return (tables if isinstance(tables, int) else np.array(tables, np.uint32)), np.array(ids, np.int64)


BATCHES = [
    batch([4, 4, 9, 4], [1, -5, 1, 2**63 - 1]),
    batch(4, [7, 7, 7]),
    batch(4, []),
    batch([], []),
    batch([2**32 - 1, 0], [-(2**63), 0]),
    batch(9, [3]),
]


def flat(batches: list[Batch]) -> tuple[list[int], list[int], list[int]]:
    """Tables, ids and ends of batches."""
    tables = np.concatenate([np.broadcast_to(np.asarray(tables), ids.shape) for tables, ids in batches])
    ends = np.cumsum([0, *(len(ids) for _, ids in batches)])
    return tables.tolist(), np.concatenate([ids for _, ids in batches]).tolist(), ends.tolist()


def assert_holds(trace: Trace, batches: list[Batch]) -> None:
    tables, ids, ends = flat(batches)
    assert trace.ids.tolist() == ids
    assert trace.part(0, len(trace))[0].tolist() == tables
    assert trace.batches is not None
    assert trace.batches.tolist() == ends


def record(path: Path, batches: list[Batch], **options: object) -> Path:
    with TraceWriter(path, ["ads", "users"], **options) as to:  # type: ignore[arg-type]
        for tables, ids in batches:
            to.append(tables, ids)
    return path


def test_batches_come_back_in_order(tmp_path: Path) -> None:
    trace = read_trace(record(tmp_path / "a.bin", BATCHES))
    assert_holds(trace, BATCHES)
    assert trace.table_names == {table_number(name): name for name in ("ads", "users")}
    assert (trace.name, trace.rate, trace.seed) == ("a", 1.0, 0)


def test_requests_of_one_table_have_one_number(tmp_path: Path) -> None:
    trace = read_trace(record(tmp_path / "a", [batch([6, 6], [1, 2]), batch(6, [3])]))
    assert trace.tables == 6


@given(st.data())
def test_any_batches_in_blocks_of_any_size(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    requests = st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), max_size=8)
    drawn = data.draw(st.lists(requests, min_size=1, max_size=8))
    batches = [batch([table for table, _ in one], [id for _, id in one]) for one in drawn]
    if not any(drawn):
        batches.append(batch(1, [1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_BLOCK_REQUESTS", data.draw(st.integers(1, 20)))
        patch.setattr(writer, "_BLOCK_BATCHES", data.draw(st.integers(1, 4)))
        path = record(tmp_path_factory.mktemp("any") / "trace", batches)
    assert_holds(read_trace(path), batches)


def test_what_is_appended_may_be_changed_afterwards(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a") as to:
        tables, ids = batch([4, 9], [1, 2])
        to.append(tables, ids)
        assert isinstance(tables, np.ndarray)
        tables[:], ids[:] = 0, 0
    assert_holds(read_trace(tmp_path / "a"), [batch([4, 9], [1, 2])])


def test_tables_are_added_on_the_way(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a", ["ads"]) as to:
        to.append(table_number("ads"), np.arange(3))
        to.add_tables(["ads", "users", "users"])
        to.append(table_number("users"), np.arange(2))
    trace = read_trace(tmp_path / "a")
    assert sorted(trace.table_names.values()) == ["ads", "users"]
    assert [trace.table_names[number] for number in trace.part(0, 5)[0].tolist()] == ["ads"] * 3 + ["users"] * 2


# Cut and damaged files


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """BATCHES in several blocks."""
    monkeypatch.setattr(writer, "_BLOCK_REQUESTS", 3)
    return record(tmp_path / "small", BATCHES)


def assert_error_or_prefix(path: Path, *, whole: bool = False) -> int:
    """How many batches are left; none of them differs from what was recorded."""
    with pytest.raises(TraceError, match="small"):
        read_trace(path, "tiered")
    try:
        trace = read_trace(path, "tiered", tolerate_cut=True)
    except TraceError as error:
        if whole and "holds no requests" not in str(error) and "in its header" not in str(error):
            raise
        return 0
    assert_holds(trace, BATCHES[: trace.num_batches])
    return trace.num_batches


def test_a_file_cut_at_any_byte_gives_an_error_or_its_whole_blocks(small: Path) -> None:
    data, left = small.read_bytes(), []
    for size in range(8, len(data)):
        small.write_bytes(data[:size])
        left.append(assert_error_or_prefix(small, whole=True))
    assert left == sorted(left)
    assert set(left) >= {0, 1, 2, len(BATCHES)}


def test_zeros_in_place_of_what_never_reached_the_disk_are_a_cut(small: Path) -> None:
    data, left = small.read_bytes(), []
    for size in range(40, len(data.rstrip(b"\0"))):
        small.write_bytes(data[:size] + bytes(len(data) - size))
        left.append(assert_error_or_prefix(small, whole=True))
    assert left == sorted(left)
    assert set(left) == {0, 1, 2, len(BATCHES)}


def test_any_byte_that_is_not_as_written_is_noticed(small: Path) -> None:
    data = small.read_bytes()
    for at in range(len(data)):
        small.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        with pytest.raises(TraceError, match=r"small (is damaged|is cut short|is no trace|is of version)"):
            read_trace(small, "tiered")
        assert_error_or_prefix(small)


def test_blocks_in_another_order_missing_or_behind_the_end(small: Path) -> None:
    data = small.read_bytes()
    starts = [at for at in range(len(data)) if data[at : at + 4] == b"TEBK"]
    blocks = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for order in ([0, 2, 1, *range(3, len(blocks))], [0, *range(2, len(blocks))], [*range(len(blocks)), 1]):
        small.write_bytes(data[: starts[0]] + b"".join(blocks[number] for number in order))
        for tolerate_cut in (False, True):
            with pytest.raises(TraceError, match="damaged"):
                read_trace(small, tolerate_cut=tolerate_cut)


def test_a_recording_that_was_killed_keeps_its_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_BLOCK_REQUESTS", 3)
    child = os.fork()
    if child == 0:
        try:
            to = TraceWriter(tmp_path / "small")
            for tables, ids in BATCHES:
                to.append(tables, ids)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert assert_error_or_prefix(tmp_path / "small", whole=True) in range(2, len(BATCHES))


def test_other_versions_are_named(small: Path) -> None:
    data = bytearray(small.read_bytes())
    data[8] = 9
    small.write_bytes(data)
    with pytest.raises(TraceError, match="is of version 9, and this program reads 1"):
        read_trace(small)


# Writing


def test_a_file_that_is_there_is_left_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("precious")
    with pytest.raises(TraceError, match="a is there already and is not overwritten"):
        TraceWriter(path)
    assert path.read_text() == "precious"
    record(path, BATCHES, overwrite=True)
    assert_holds(read_trace(path), BATCHES)


def test_a_place_that_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceWriteError, match="cannot be written: No such file or directory") as caught:
        TraceWriter(tmp_path / "no" / "where")
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, TieredEmbError)


def test_a_trace_of_nothing_leaves_no_file(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "a", ["ads"]).close()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    to = TraceWriter(tmp_path / "a")
    to.append(0, np.arange(3))
    to.close()
    to.close()
    size = (tmp_path / "a").stat().st_size
    for call in (lambda: to.append(0, np.arange(3)), to.make_room, to.flush, lambda: to.add_tables(["ads"])):
        with pytest.raises(TraceError, match="is closed"):
            call()
    assert (tmp_path / "a").stat().st_size == size


def test_a_writer_cannot_be_copied(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a") as to, pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(to)


def test_a_fork_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_BLOCK_REQUESTS", 3)
    with TraceWriter(tmp_path / "a") as to:
        to.append(*BATCHES[0])
        to.append(*BATCHES[1])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                to.append(*BATCHES[2])
            except TraceError as error:
                to.close()
                status = 0 if "is a fork" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for one in BATCHES[2:]:
            to.append(*one)
    assert_holds(read_trace(tmp_path / "a"), BATCHES)


class FullDisk:
    """In place of os.pwrite: room for so many bytes more, then ENOSPC, after a part of a write."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.pwrite

    def __call__(self, file: int, data: bytes, offset: int) -> int:
        if self.room == 0 and data:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.write(file, data[: self.room], offset)
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 64, 100, 130])
def test_a_full_disk_is_reported_and_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(writer, "_BLOCK_REQUESTS", 3)
    path, failures = tmp_path / "a", 0
    with TraceWriter(path) as to:
        disk = FullDisk(room)
        monkeypatch.setattr("os.pwrite", disk)
        for tables, ids in BATCHES:
            try:
                to.append(tables, ids)
            except TraceWriteError:
                failures += 1
                size = path.stat().st_size
                with pytest.raises(TraceWriteError, match="cannot be written: No space left on device"):
                    to.append(tables, ids)
                assert path.stat().st_size == size
                disk.room = 1 << 20
                to.append(tables, ids)
        disk.room = 1 << 20
    assert failures == 1
    assert_holds(read_trace(path), BATCHES)


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = TraceWriter(tmp_path / "small")
    to.append(*BATCHES[0])
    to.flush()
    to.append(*BATCHES[1])
    monkeypatch.setattr("os.pwrite", FullDisk(20))
    with pytest.raises(TraceWriteError, match="No space left"):
        to.close()
    to.close()
    assert assert_error_or_prefix(tmp_path / "small", whole=True) == 1


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    for rate in (0, -1, 1.5, float("nan"), True, "1"):
        with pytest.raises(ConfigError, match="rate is"):
            TraceWriter(tmp_path / "a", rate=rate)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seed is -1"):
        TraceWriter(tmp_path / "a", seed=-1)
    with pytest.raises(ConfigError, match="zero character"):
        TraceWriter(tmp_path / "a", ["a\0b"])
    assert list(tmp_path.iterdir()) == []
    with TraceWriter(tmp_path / "a") as to, pytest.raises(InvalidBatchError, match="2 table numbers came with 3 ids"):
        to.append(np.zeros(2, np.uint32), np.arange(3))


# Samples


def test_a_sample_is_recorded_by_id(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 3, 900).astype(np.uint32), rng.zipf(1.2, 900)) for _ in range(20)]
    record(tmp_path / "a", batches, rate=0.25, seed=3)
    trace = read_trace(tmp_path / "a")
    assert (trace.rate, trace.seed, trace.num_batches) == (0.25, 3, 20)
    kept = [sampled(tables, ids, 0.25, 3) for tables, ids in batches]
    assert_holds(trace, [(tables[mask], ids[mask]) for (tables, ids), mask in zip(batches, kept, strict=True)])


def test_a_sample_keeps_its_share_and_grows_with_the_rate() -> None:
    tables = np.repeat(np.arange(4, dtype=np.uint32) * 2654435761, 50_000)
    for ids in (np.arange(200_000), np.arange(200_000) % 50_000, np.arange(200_000) << 20):
        for seed in range(3):
            low, high = sampled(tables, ids, 0.01, seed), sampled(tables, ids, 0.1, seed)
            assert abs(low.mean() - 0.01) < 0.0012  # five standard deviations
            assert abs(high.mean() - 0.1) < 0.0035
            assert not (low & ~high).any()
    assert sampled(tables, ids, 1.0).all()


def test_seeds_and_tables_keep_other_ids() -> None:
    ids = np.arange(100_000, dtype=np.int64)
    samples = [sampled(table, ids, 0.1, seed) for table in (0, 1, 2**31) for seed in (0, 1, 2)]
    for at, one in enumerate(samples):
        for other in samples[:at]:
            assert 700 < (one & other).sum() < 1300


def test_a_hash_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**63), 2**63 - 1, 70_000)
    tables = rng.integers(0, 2**32, 70_000).astype(np.uint32)
    mask = sampled(tables, ids, 0.5, 7)
    for at in (0, 1, 32_767, 32_768, 69_999):
        assert mask[at] == sampled(int(tables[at]), ids[at : at + 1], 0.5, 7)[0]
    assert len(np.unique(sample_hash(tables, ids, 7))) == 70_000
    assert ids.min() < 0
    assert sample_hash(5, np.array([7], np.int64), 0).tolist() == [sample_hash(5, np.array([7], np.int64), 0)[0]]


def test_no_row_is_in_every_sample() -> None:
    """The first row of a densely numbered trace is often its hottest, and 0 is the seed that most people have."""
    tables, ids = np.zeros(3, np.uint32), np.array([0, 1, -1], np.int64)
    kept = [sampled(tables, ids, 0.01, seed) for seed in range(200)]
    assert not kept[0].any()
    assert np.sum(kept) < 20

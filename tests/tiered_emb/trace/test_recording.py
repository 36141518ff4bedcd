"""Look-ups that train are recorded, once each, and nothing else is; recording changes no bit and harms no row."""

from __future__ import annotations

import copy
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage.schema import table_number
from tiered_emb import (
    Adagrad,
    ConfigError,
    IdRangeError,
    JaggedIds,
    TableConfig,
    TierCapacityError,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    TraceError,
    TraceWriteError,
)
from tiered_emb.group import TableGroup
from tiered_emb.plan import IdBatch, Plan
from tiered_emb.trace import Trace, read_trace, sampled, writer

TABLES = (TableConfig("ads", None, 4, ["shown", "clicked"]), TableConfig("users", 100, 8, mode="mean"))


def collection(record: Path | None, store: Path | None = None, **options: Any) -> TieredEmbeddingBagCollection:
    tiers = TierConfig(0, "256KiB", store, record=record, **options)
    return TieredEmbeddingBagCollection(TABLES, tiers=tiers, optimizer=Adagrad(0.1), seed=5)


def batches(count: int) -> list[JaggedIds]:
    """Three features of 8 bags of 0 to 4 ids, some of them twice."""
    rng, found = np.random.default_rng(1), []
    for _ in range(count):
        features = {}
        for name in ("users", "shown", "clicked"):
            lengths = rng.integers(0, 5, 8)
            features[name] = (torch.from_numpy(rng.zipf(1.3, lengths.sum()) % 100), torch.from_numpy(lengths))
        found.append(JaggedIds.from_dict(features))
    return found


def step(bags: TieredEmbeddingBagCollection, batch: JaggedIds) -> float:
    loss = sum(rows.square().sum() for rows in bags(batch).values())
    loss.backward()
    return float(loss.detach())


def asked_for(batch: JaggedIds) -> list[tuple[str, int]]:
    """Table and id of each request of a batch, in any order."""
    size, ends = batch.batch_size, batch.offsets.tolist()
    table = {"users": "users", "shown": "ads", "clicked": "ads"}
    return sorted(
        (table[name], id)
        for at, name in enumerate(batch.features)
        for id in batch.ids[ends[at * size] : ends[(at + 1) * size]].tolist()
    )


def recorded(trace: Trace) -> list[list[tuple[str, int]]]:
    """The same of each batch of a trace."""
    names = trace.table_names
    return [
        sorted((names[table], id) for table, id in zip(tables.tolist(), ids.tolist(), strict=True))
        for tables, ids in trace.each_batch()
    ]


def test_training_is_recorded_and_changes_no_bit(tmp_path: Path) -> None:
    given, found = batches(30), []
    for record, options in (
        (None, {}),
        (tmp_path / "all", {}),
        (tmp_path / "some", {"record_rate": 0.5}),
    ):
        with collection(record, **options) as bags:
            losses = [step(bags, batch) for batch in given]
            rows = {name: bags.rows(name, torch.arange(100)).numpy().tobytes() for name in ("ads", "users")}
            found.append((losses, rows))
    assert found[0] == found[1] == found[2]
    whole, part = read_trace(tmp_path / "all"), read_trace(tmp_path / "some")
    assert recorded(whole) == [asked_for(batch) for batch in given]
    assert (part.rate, part.num_batches) == (0.5, 30)
    kept = sampled(*whole.part(0, len(whole)), 0.5)
    assert 0 < kept.sum() < len(whole)
    assert np.array_equal(part.ids, whole.ids[kept])
    assert np.array_equal(part.tables, whole.part(0, len(whole))[0][kept])


def test_requests_stand_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    tiers = TierConfig(0, "128KiB", record=tmp_path / "a")
    with TieredEmbeddingBag(None, 4, mode="sum", padding_idx=0, tiers=tiers) as bag:
        bag(torch.tensor([7, -3, 7, 0, 9, 7]), torch.tensor([0, 2, 2])).sum().backward()
        bag(torch.tensor([[4, 4], [2, 0]])).sum().backward()
    trace = read_trace(tmp_path / "a")
    assert [ids.tolist() for _, ids in trace.each_batch()] == [[7, -3, 7, 9, 7], [4, 4, 2]]
    assert trace.tables == table_number("embedding")


def test_only_look_ups_that_train_are_recorded(tmp_path: Path) -> None:
    first, second, third = batches(3)
    with collection(tmp_path / "a") as bags:
        step(bags, first)
        bags.eval()
        bags(second)
        bags.train()
        with torch.no_grad():
            bags(second)
        bags.rows("ads", torch.arange(50))
        bags.set_rows("ads", torch.arange(3), torch.ones(3, 4))
        assert len(list(bags.scan())) > 0
        step(bags, third)
    assert recorded(read_trace(tmp_path / "a")) == [asked_for(first), asked_for(third)]


def test_a_batch_that_is_refused_is_not_recorded(tmp_path: Path) -> None:
    with TieredEmbedding(1 << 20, 64, tiers=TierConfig(0, "64KiB", record=tmp_path / "a")) as table:
        with pytest.raises(IdRangeError):
            table(torch.tensor([1, 1 << 20]))
        with pytest.raises(TierCapacityError):
            table(torch.arange(2 * table.stats().tiers[0].capacity_rows))
        table(torch.tensor([5, 6])).sum().backward()
    assert [ids.tolist() for _, ids in read_trace(tmp_path / "a").each_batch()] == [[5, 6]]


def test_a_batch_for_which_room_was_found_the_second_time_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given,) = batches(1)
    tried = []
    prepare = TableGroup.prepare

    def refuse_once(group: TableGroup, batch: IdBatch, at: Callable[[str], None]) -> Plan:
        tried.append(batch)
        if len(tried) == 2:  # the second look-up of the first try
            raise TierCapacityError("full of what failed passes hold")
        return prepare(group, batch, at)

    monkeypatch.setattr(TableGroup, "prepare", refuse_once)
    with collection(tmp_path / "a") as bags:
        step(bags, given)
    assert len(tried) == 4
    assert recorded(read_trace(tmp_path / "a")) == [asked_for(given)]


def test_modules_of_one_store_share_a_trace(tmp_path: Path) -> None:
    tiers = TierConfig(0, "256KiB", tmp_path / "rows", record=tmp_path / "a")
    with TieredEmbedding(None, 4, name="one", tiers=tiers) as one:
        with TieredEmbedding(None, 4, name="two", tiers=tiers) as two:
            one(torch.tensor([1, 2])).sum().backward()
            two(torch.tensor([3])).sum().backward()
        one(torch.tensor([4])).sum().backward()
        with pytest.raises(ConfigError, match="give them the same TierConfig"):
            TieredEmbedding(None, 4, name="three", tiers=TierConfig(0, "256KiB", tmp_path / "rows"))
    assert recorded(read_trace(tmp_path / "a")) == [[("one", 1), ("one", 2)], [("two", 3)], [("one", 4)]]


def test_a_trace_that_is_there_is_left_and_a_failed_start_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(TierCapacityError):
        TieredEmbedding(None, 4, tiers=TierConfig(0, "1KiB", tmp_path / "rows", record=tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").write_text("precious")
    tiers = TierConfig(0, "256KiB", tmp_path / "rows", record=tmp_path / "a")
    with pytest.raises(TraceError, match="a is there already and is not overwritten"):
        TieredEmbedding(None, 4, tiers=tiers)
    assert (tmp_path / "a").read_text() == "precious"
    with TieredEmbedding(None, 4, tiers=TierConfig(0, "256KiB", tmp_path / "rows")):  # the store is not left locked
        pass


def test_a_flush_writes_what_was_recorded_so_far(tmp_path: Path) -> None:
    given = batches(2)
    with collection(tmp_path / "a") as bags:
        step(bags, given[0])
        bags.flush()
        with pytest.raises(TraceError, match="a was not closed: it has no end behind"):
            read_trace(tmp_path / "a")
        assert recorded(read_trace(tmp_path / "a", tolerate_cut=True)) == [asked_for(given[0])]
        step(bags, given[1])
    assert recorded(read_trace(tmp_path / "a")) == [asked_for(batch) for batch in given]


def test_a_module_that_is_dropped_leaves_a_whole_trace(tmp_path: Path) -> None:
    (given,) = batches(1)
    bags = collection(tmp_path / "a", tmp_path / "rows")
    step(bags, given)
    del bags
    gc.collect()
    assert recorded(read_trace(tmp_path / "a")) == [asked_for(given)]


def test_copies_and_forks_do_not_touch_the_trace(tmp_path: Path) -> None:
    given = batches(3)
    with collection(tmp_path / "a") as bags:
        step(bags, given[0])
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(bags)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                step(bags, given[1])
            except TraceError as error:
                status = 0 if "is a fork" in str(error) else 2
                bags.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        step(bags, given[2])
    assert recorded(read_trace(tmp_path / "a")) == [asked_for(given[0]), asked_for(given[2])]
    size = (tmp_path / "a").stat().st_size
    bags.close()
    with pytest.raises(RuntimeError, match="is closed"):
        step(bags, given[0])
    assert (tmp_path / "a").stat().st_size == size


def refuse(file: int, data: bytes, offset: int) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_training_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_BLOCK_REQUESTS", 1)
    given = batches(4)
    with collection(None) as plain:
        expected = [step(plain, batch) for batch in given]
    with collection(tmp_path / "a") as bags:
        losses = [step(bags, given[0])]
        with monkeypatch.context() as full:
            full.setattr("os.pwrite", refuse)
            for _ in range(2):
                with pytest.raises(
                    TraceWriteError, match=r"a cannot be written: No space left on device; .* free space"
                ):
                    step(bags, given[1])
            assert bags.stats().tiers[0].hits + bags.stats().tiers[0].misses > 0
            with pytest.raises(TraceWriteError):
                bags.flush()
        losses += [step(bags, batch) for batch in given[1:]]
    assert losses == expected
    assert recorded(read_trace(tmp_path / "a")) == [asked_for(batch) for batch in given]


def test_a_full_disk_at_the_end_is_reported_and_the_rows_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given,) = batches(1)
    bags = collection(tmp_path / "a", tmp_path / "rows")
    step(bags, given)
    rows = bags.rows("ads", torch.arange(100))
    with monkeypatch.context() as full:
        full.setattr("os.pwrite", refuse)
        with pytest.raises(TraceWriteError, match="No space left on device"):
            bags.close()
    bags.close()
    with collection(None, tmp_path / "rows") as again:
        assert torch.equal(again.rows("ads", torch.arange(100)), rows)
        assert again.stats().store.rows > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": 7}, "record is 7; expected the path of a file"),
        ({"record": ""}, "record is ''; expected the path"),
        ({"record": "a", "record_rate": 0}, "record_rate is 0; expected a share"),
        ({"record": "a", "record_rate": 1.01}, "record_rate is 1.01; expected a share"),
        ({"record": "a", "record_rate": "half"}, "record_rate is 'half'; expected a share"),
        ({"record_rate": 0.5}, "record_rate is 0.5, but nothing is recorded"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierConfig(**options)

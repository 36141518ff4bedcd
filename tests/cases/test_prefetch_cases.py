"""Prefetch: cases 14 to 19, and what a loop may do with batches that were prepared for it."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from storage import MemoryStore, RowIds
from tiered_emb import (
    SGD,
    ConfigError,
    IdRangeError,
    JaggedIds,
    RowwiseAdagrad,
    TableConfig,
    TierCapacityError,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    prefetch,
)
from tiered_emb.testing import DenseOracle

ROW_BYTES = 4 * 4
SMALL = TierConfig(10 * ROW_BYTES, "64KiB")


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def make(tiers: TierConfig = SMALL, **options: Any) -> TieredEmbedding:
    return TieredEmbedding(None, 4, tiers=tiers, optimizer=SGD(1.0), seed=1, **options)


def settle() -> None:
    """Until threads of loops that were dropped have ended; each may be in the middle of a batch."""
    for thread in threading.enumerate():
        if thread.name == "tiered-emb-prefetch":
            thread.join(60)


def pinned(module: TieredEmbedding) -> int:
    group = module._lookup.group
    group.release_dropped()
    return group.top.directory.pinned_rows


def zipf_batches(count: int, size: int = 40, most: int = 300) -> list[torch.Tensor]:
    """Batches that share ids with their neighbours."""
    rng = np.random.default_rng(0)
    return [torch.from_numpy(np.minimum(rng.zipf(1.3, size), most).astype(np.int64)) for _ in range(count)]


def train(module: TieredEmbedding, batches: Iterator[torch.Tensor] | list[torch.Tensor]) -> list[bytes]:
    outputs = []
    for ids in batches:
        out = module(ids)
        outputs.append(out.detach().numpy().tobytes())
        (out.sin() * 0.1).sum().backward()
    return outputs


def trained(tiers: TierConfig, batches: list[torch.Tensor], lookahead: int) -> tuple[list[bytes], bytes]:
    """Outputs and final rows."""
    with make(tiers) as module:
        outputs = train(module, prefetch(batches, module, lookahead=lookahead))
        assert pinned(module) == 0
        return outputs, module.rows(torch.arange(1, 301)).numpy().tobytes()


class Gate(MemoryStore):
    """A store whose reads, or writes, wait until they are let through."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb
        self.opened, self.reached = threading.Event(), threading.Event()
        self.opened.set()

    def _pass(self, verb: str) -> None:
        if verb == self.verb:
            self.reached.set()
            assert self.opened.wait(60)

    def get(self, *args: Any) -> None:
        self._pass("get")
        super().get(*args)

    def put(self, *args: Any) -> None:
        self._pass("put")
        super().put(*args)


@pytest.mark.parametrize("lower", [0, "64KiB"])
def test_case_14_two_batches_that_fill_the_tier(lower: int | str) -> None:
    batches = [ids_of(1, 2, 3, 4), ids_of(5, 6, 7, 8), ids_of(1, 2, 3, 4), ids_of(5, 6, 7, 8)]
    expected = trained(TierConfig(100 * ROW_BYTES, 0), batches, 0)
    for lookahead in range(4):
        assert trained(TierConfig(4 * ROW_BYTES, lower), batches, lookahead) == expected


def test_case_14_a_batch_that_does_not_fit_says_so_in_its_turn() -> None:
    with make(TierConfig(4 * ROW_BYTES, "64KiB")) as module:
        loop = prefetch([ids_of(1, 2, 3, 4), ids_of(1, 2, 3, 4, 5), ids_of(6)], module)
        module(next(loop)).sum().backward()
        with pytest.raises(TierCapacityError, match="5 distinct rows"):
            module(next(loop))
        module(next(loop)).sum().backward()
        assert pinned(module) == 0


@pytest.mark.parametrize("tiers", [SMALL, TierConfig(0, "64KiB")])
def test_case_15_a_batch_that_was_prepared_before_an_update_sees_it(tiers: TierConfig) -> None:
    with make(tiers) as module:
        before = module.rows(ids_of(7))
        loop = prefetch([ids_of(7), ids_of(7, 8)], module, lookahead=1)
        out = module(next(loop))
        await_prepared(module, 2)
        out.backward(torch.full((1, 4), 2.0))
        assert torch.equal(module(next(loop))[:1], before - 2)


def await_prepared(module: TieredEmbedding, batches: int) -> None:
    """Until the preparing thread has nothing left to do of so many batches."""
    loop = module._ahead._prefetch()  # type: ignore[union-attr]
    assert len(loop._entries) == batches
    for entry in loop._entries:
        assert entry.done.wait(60)


@pytest.mark.parametrize("tiers", [SMALL, TierConfig(0, "64KiB"), TierConfig(200 * ROW_BYTES, 0)])
def test_case_16_lookahead_changes_no_bit(tiers: TierConfig) -> None:
    batches = [batch[:8] if tiers is SMALL else batch for batch in zipf_batches(200)]
    expected = trained(tiers, batches, 0)
    for lookahead in range(1, 5):
        assert trained(tiers, batches, lookahead) == expected


@pytest.mark.parametrize("lookahead", range(5))
def test_case_16_a_loader_is_drawn_from_once_a_batch(lookahead: int) -> None:
    drawn = []

    def loader() -> Iterator[torch.Tensor]:
        for number in range(12):
            drawn.append(number)
            yield ids_of(number, number + 1)

    with make() as module:
        seen = [int(ids[0]) for ids in prefetch(loader(), module, lookahead=lookahead)]
    assert seen == drawn == list(range(12))


def test_case_16_ids_that_the_loop_renames_reach_the_right_rows() -> None:
    """Renamed into a new tensor, or in the one that was prepared for, which is then another batch by value."""
    with make() as module:
        batches = [ids_of(1, 2), ids_of(3, 4), ids_of(5, 6)]
        loop = prefetch(batches, module)
        for ids in loop:
            expected = module.rows(ids + 100)
            assert torch.equal(module(ids + 100), expected)
            expected = module.rows(ids + 50)
            ids += 50
            assert torch.equal(module(ids), expected)
        assert (loop.stats.prepared, loop.stats.unprepared) == (0, 6)
        assert pinned(module) == 0


def test_case_17_a_slow_read_gives_the_right_rows_and_is_seen_as_a_stall() -> None:
    store = Gate("get")
    with make(TierConfig(0, "64KiB", store)) as module:
        module.set_rows(ids_of(1, 2), torch.tensor([[1.0] * 4, [2.0] * 4]))
        module.flush()
    with make(TierConfig(0, "64KiB", store)) as module:
        store.opened.clear()
        store.reached.clear()
        loop = prefetch([ids_of(1), ids_of(2)], module)
        first = next(loop)
        assert store.reached.wait(60), "it is read before the forward asks"
        timer = threading.Timer(0.05, store.opened.set)
        timer.start()
        assert module(first).tolist() == [[1.0] * 4]
        assert module(next(loop)).tolist() == [[2.0] * 4]
        timer.join()
        assert loop.stats.stalls >= 1 and loop.stats.stall_seconds["store"] > 0


def test_case_17_steps_do_not_wait_for_writes() -> None:
    """Forwards and backwards of prepared batches go on while what a later batch pushes out is being written."""
    store = Gate("put")
    batches = [ids_of(1, 2), ids_of(3, 4), ids_of(5, 6), ids_of(7, 8)]
    with make(TierConfig(6 * ROW_BYTES, 0, store)) as module:
        loop = prefetch(batches, module, lookahead=1)
        module(next(loop)).sum().backward()
        await_prepared(module, 2)
        store.opened.clear()
        second = next(loop)  # and batch 5, 6, which fits
        await_prepared(module, 2)
        module(second).sum().backward()
        third = next(loop)  # and batch 7, 8, which pushes out two rows that were changed
        assert store.reached.wait(60)
        module(third).sum().backward()
        assert not store.opened.is_set() and loop.stats.prepared == 3
        store.opened.set()
        fourth = next(loop)
        assert torch.equal(module(fourth), module.rows(fourth))


def test_case_18_nothing_is_left_of_steps_that_fail() -> None:
    with make(TierConfig(30 * ROW_BYTES, "64KiB")) as module:
        rng = np.random.default_rng(0)
        for round_ in range(24):
            batches = [torch.from_numpy(rng.integers(0, 1000, 5)) for _ in range(6)]
            try:
                for step, ids in enumerate(prefetch(batches, module, lookahead=round_ % 4)):
                    out = module(ids)
                    if step == round_ % 6:
                        raise KeyError(step)
                    if step % 3 == 1:
                        continue  # no backward
                    out.sum().backward()
            except KeyError:
                pass
            del out
            gc.collect()
            settle()
            assert pinned(module) == 0, round_
        module.eval()
        module(ids_of(1))
        with torch.no_grad():
            module.train()(ids_of(2))
        assert pinned(module) == 0
        threads = [one.name for one in threading.enumerate() if one.is_alive()]
        assert threads.count("tiered-emb-prefetch") <= 1


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("lookahead", [None, 2])
def test_case_18_memory_is_flat(lookahead: int | None, tmp_path: Path) -> None:
    """5,000 steps: trained, in eval, under no_grad in train mode, without a backward, with an exception in the loop."""
    rng, size = np.random.default_rng(0), []
    with make(TierConfig(400 * ROW_BYTES, "256KiB", tmp_path / "s")) as module:
        done = 0
        while done < 5000:
            batches = [torch.from_numpy(rng.integers(0, 3000, 20)) for _ in range(50)]
            with suppress(KeyError):
                for ids in batches if lookahead is None else prefetch(batches, module, lookahead=lookahead):
                    done += 1
                    if done % 10 == 3:
                        module.eval()(ids)
                        module.train()
                    elif done % 10 == 5:
                        with torch.no_grad():
                            module(ids)
                    elif done % 10 == 7:
                        module(ids)
                    else:
                        module(ids).sin().sum().backward()
                    if done % 10 == 9 and done % 3 == 0:
                        raise KeyError
            if done >= 1500:
                size.append(anonymous_bytes())
        gc.collect()
        settle()
        assert pinned(module) == 0
        assert max(size[-5:]) - min(size[:5]) < 3 << 20
        module(ids_of(10**6)).sum().backward()


@pytest.mark.parametrize("hbm_rows", [0, 1, 7, 1023])
@pytest.mark.parametrize("ddr", [0, "48KiB", "1MiB"])
def test_case_19_tiers_of_any_size(hbm_rows: int, ddr: int | str) -> None:
    if hbm_rows == 0 and ddr == 0:
        pytest.skip("no tier at all is refused, see the lookup cases")
    batches = zipf_batches(30, 7 if hbm_rows != 1 else 1)
    expected = trained(TierConfig(1023 * ROW_BYTES, 0), batches, 0)
    assert trained(TierConfig(hbm_rows * ROW_BYTES, ddr), batches, 3) == expected
    if hbm_rows == 1:
        with make(TierConfig(ROW_BYTES, ddr)) as module:
            (ids,) = prefetch([ids_of(1, 2)], module)
            with pytest.raises(TierCapacityError, match=f"needs {2 * ROW_BYTES} bytes"):
                module(ids)


# ---- what a loop may do


def test_batches_may_be_used_out_of_order_twice_or_not_at_all() -> None:
    batches = [ids_of(1, 2), ids_of(2, 3), ids_of(1, 2), ids_of(4)]
    with make() as module, make(SMALL) as plain:
        loop = prefetch(batches, module, lookahead=3)
        first = next(loop)
        for ids in (batches[1], first, first, batches[3]):
            out, expected = module(ids), plain(ids)
            assert torch.equal(out, expected)
            for one in (out, expected):
                one.sin().sum().backward()
        assert (loop.stats.prepared, loop.stats.unprepared) == (4, 0)  # the second `first` is batch 2, by value
        assert [ids.tolist() for ids in loop] == [[2, 3], [1, 2], [4]]
        assert pinned(module) == 0


@pytest.mark.parametrize("end", ["break", "close", "drop", "with", "module"])
def test_pins_end_with_the_loop(end: str) -> None:
    module = make()
    loop = prefetch(itertools.repeat(ids_of(1, 2, 3)), module, lookahead=3)
    if end == "break":
        for _ in loop:
            break
    elif end == "with":
        with loop:
            next(loop)
    else:
        next(loop)
    if end == "module":
        module.close()
        return
    if end == "close":
        loop.close()
        assert list(loop) == []
    if end in ("break", "drop"):
        del loop
        settle()
    assert pinned(module) == 0
    module(ids_of(9)).sum().backward()
    module.close()


def test_a_bad_batch_is_refused_by_its_forward_and_no_other() -> None:
    with make_bounded() as module:
        loop = prefetch([ids_of(1), ids_of(100), ids_of(2)], module)
        module(next(loop)).sum().backward()
        with pytest.raises(IdRangeError, match="id 100 at position 0"):
            module(next(loop))
        module(next(loop)).sum().backward()
        assert loop.stats.failed == 1 and pinned(module) == 0


def test_ids_that_the_module_does_not_take_are_told_and_change_nothing() -> None:
    with make() as module:
        loop = prefetch([ids_of(1), ids_of(2)], module, ids=lambda ids: ids.float())
        for ids in loop:
            module(ids).sum().backward()
        assert (loop.stats.failed, loop.stats.unprepared, loop.stats.prepared) == (2, 2, 0)
        assert "float32" in loop.stats.last_failure


def make_bounded() -> TieredEmbedding:
    return TieredEmbedding(10, 4, tiers=SMALL, optimizer=SGD(1.0), seed=1)


def test_an_error_of_the_store_comes_in_the_loop_and_loses_nothing() -> None:
    class Failing(MemoryStore):
        failing = False

        def get(self, *args: Any) -> None:
            if self.failing:
                raise OSError(5, "EIO")
            super().get(*args)

    store = Failing()
    with make(TierConfig(0, "64KiB", store)) as module:
        loop = prefetch([ids_of(1), ids_of(2), ids_of(3)], module, lookahead=1)
        module(next(loop)).sum().backward()
        await_prepared(module, 2)
        store.failing = True
        module(next(loop)).sum().backward()  # was prepared before
        third = next(loop)
        with pytest.raises(OSError, match="EIO"):
            module(third)
        store.failing = False
        module(third).sum().backward()
        assert pinned(module) == 0


def test_what_the_loader_raises_ends_the_loop() -> None:
    """After the batches before it."""

    def loader() -> Iterator[torch.Tensor]:
        yield ids_of(1)
        yield ids_of(2)
        raise ValueError("of the loader")

    for lookahead in range(4):
        with make() as module:
            loop = prefetch(loader(), module, lookahead=lookahead)
            for _ in range(2):
                module(next(loop)).sum().backward()
            with pytest.raises(ValueError, match="of the loader"):
                next(loop)
            assert pinned(module) == 0


def test_rows_set_read_and_flushed_between_are_those_of_the_loop(tmp_path: Path) -> None:
    batches = zipf_batches(40)
    plain, ahead = [], []
    for lookahead, outputs in ((0, plain), (3, ahead)):
        with make(TierConfig(60 * ROW_BYTES, "64KiB", tmp_path / str(lookahead))) as module:
            for step, ids in enumerate(prefetch(batches, module, lookahead=lookahead)):
                if step % 5 == 1:
                    module.set_rows(ids_of(1, 2, 900 + step), torch.full((3, 4), float(step)))
                if step % 7 == 2:
                    module.flush()
                if step % 6 == 3:
                    module.eval()
                    outputs.append(module(batches[step - 3]).detach().clone())
                    module.train()
                out = module(ids)
                out.sin().sum().backward()
                outputs.append(module.rows(ids))
    assert all(torch.equal(one, other) for one, other in zip(plain, ahead, strict=True))


def test_a_model_of_several_tables_and_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [TableConfig("a", None, 4), TableConfig("b", None, 6, mode="max")]
            rule = RowwiseAdagrad(0.1)
            self.bags = TieredEmbeddingBagCollection(tables, tiers=SMALL_SHARED, optimizer=rule, seed=3)
            self.extra = TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "64KiB"), optimizer=rule, seed=4)

        def forward(self, batch: JaggedIds, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            outs = self.bags(batch)
            return outs["a"].sum() + outs["b"].square().sum() + self.extra(ids, None, weights).square().sum()

    rng = np.random.default_rng(0)
    samples = []
    for _ in range(20):
        parts = {name: (torch.from_numpy(rng.integers(0, 90, 12)), torch.full((6,), 2)) for name in "ab"}
        ids, weights = torch.from_numpy(rng.integers(0, 30, (3, 2))), torch.rand(3, 2)
        samples.append((JaggedIds.from_dict(parts), ids, weights))

    def of(lookahead: int, ids: Callable[[Any], Any]) -> tuple[list[float], int]:
        model = Model()
        loop, losses = prefetch(samples, model, ids=ids, lookahead=lookahead), []
        for batch, extra, weights in loop:
            loss = model(batch, extra, weights.requires_grad_())
            loss.backward()
            losses.append(loss.item())
        model.bags.close()
        model.extra.close()
        return losses, loop.stats.prepared

    def both(sample: Any) -> Any:
        return {"bags": sample[0], "extra": (sample[1], None, sample[2])}

    expected, _ = of(0, both)
    assert of(2, both) == (expected, 40)
    assert of(2, lambda sample: {"bags": sample[0]}) == (expected, 20)
    with pytest.raises(ConfigError, match="2 tiered modules"):
        of(2, lambda sample: sample[0])


SMALL_SHARED = TierConfig(90 * ROW_BYTES * 3, "128KiB")


def test_what_cannot_be_prefetched_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tiered module"):
        prefetch([], nn.Linear(1, 1))
    with make() as module:
        for lookahead in (-1, 65, 1.0, True):
            with pytest.raises(ConfigError, match="lookahead is"):
                prefetch([], module, lookahead=lookahead)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="ids gave a str"):
            next(prefetch(["x"], module))
        with pytest.raises(ConfigError, match="something for 'odd'"):
            next(prefetch([{"odd": ids_of(1)}], module))


def test_a_collection_is_as_the_oracle_with_prefetch(tmp_path: Path) -> None:
    tables = [TableConfig("a", None, 4, ["x", "y"]), TableConfig("b", 50, 4, mode="mean")]
    rng, rule = np.random.default_rng(1), RowwiseAdagrad(0.1)
    batches = []
    for _ in range(50):
        parts = {name: (torch.from_numpy(rng.integers(0, 50, 20)), torch.full((5,), 4)) for name in ("x", "y", "b")}
        batches.append(JaggedIds.from_dict(parts))
    oracle = DenseOracle(tables, optimizer=rule, seed=3)
    tiers = TierConfig(100 * 20, "256KiB", tmp_path / "s")
    with TieredEmbeddingBagCollection(tables, tiers=tiers, optimizer=rule, seed=3) as bags:
        loop = prefetch(batches, bags, lookahead=2)
        for batch in loop:
            outs, expected = bags(batch), oracle(batch)
            assert all(torch.equal(outs[name], expected[name]) for name in outs)
            for given in (outs, expected):
                torch.stack([out.square().sum() for out in given.values()]).sum().backward()
        assert loop.stats.prepared == 50


def test_a_new_loop_takes_the_place_of_one_that_was_left_behind() -> None:
    with make() as module:
        left = prefetch([ids_of(1, 2), ids_of(3), ids_of(4)], module)
        next(left)
        loop = prefetch([ids_of(5), ids_of(6)], module)
        for ids in loop:
            module(ids).sum().backward()
        assert loop.stats.prepared == 2
        assert [ids.tolist() for ids in left] == [[3], [4]]
        assert pinned(module) == 0


def test_a_finalizer_takes_no_lock() -> None:
    """The collector may run in a thread that the holder of the road waits for."""
    with make() as module, make(TierConfig(0, "64KiB"), name="other") as other:
        loop = prefetch(itertools.repeat(ids_of(1, 2, 3)), module, lookahead=2)
        next(loop)
        await_prepared(module, 3)
        with module.road:
            finalize = threading.Thread(target=loop._finalizer)
            finalize.start()
            finalize.join(10)
            assert not finalize.is_alive()
            gone = threading.Thread(target=other._engine.abandon, args=(["nobody"],))
            with other.road:
                gone.start()
                gone.join(10)
                assert not gone.is_alive()
            other._engine._gone.clear()
        del loop
        settle()
        assert pinned(module) == 0


def test_an_id_out_of_range_is_the_forwards_error_with_padding_too() -> None:
    with TieredEmbedding(10, 4, padding_idx=0, tiers=SMALL, optimizer=SGD(1.0), seed=1) as module:
        loop = prefetch([ids_of(1), ids_of(100), ids_of(2)], module)
        module(next(loop)).sum().backward()
        with pytest.raises(IdRangeError):
            module(next(loop))
        module(next(loop)).sum().backward()


def test_a_flush_in_the_loop_keeps_the_budget(tmp_path: Path) -> None:
    """The index grows by what is written, and tiers are lowered for it, in which nothing pinned may stand."""
    tiers = TierConfig(0, "6MiB", tmp_path / "s")
    with TieredEmbedding(None, 16, tiers=tiers, optimizer=SGD(1.0), seed=1) as module:
        batches = [torch.arange(2000 * step, 2000 * step + 2000) for step in range(60)]
        loop = prefetch(batches, module, lookahead=4)
        for step, ids in enumerate(loop):
            module(ids).sum().backward()
            if step % 10 == 9:
                for entry in loop._entries:
                    assert entry.done.wait(60)
                module.flush()
                (tier,) = module.stats().tiers
                assert tier.peak_bytes <= tier.capacity_bytes


def test_a_child_forked_while_a_batch_is_prepared_may_read() -> None:
    store = Gate("get")
    with make(TierConfig(0, "64KiB", store)) as module:
        module(ids_of(1, 2)).sum().backward()
        expected = module.rows(ids_of(1))
        store.opened.clear()
        store.reached.clear()
        loop = prefetch([ids_of(10), ids_of(1, 2), ids_of(11)], module, lookahead=1)
        next(loop)
        assert store.reached.wait(60)
        threading.Timer(0.2, store.opened.set).start()
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                signal.alarm(30)
                read = torch.equal(module.rows(ids_of(1)), expected)
                code = 0 if read and torch.equal(module(ids_of(1, 2))[:1], expected) else 2
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        loop.close()


class Hinted(MemoryStore):
    """A store that says it waits for the disk, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.deletions = 0
        self.waits_for_disk = True
        self.announced: list[list[int]] = []
        self.known: dict[int, bool] = {}  # of rows, when they were put last

    def will_need(self, rows: RowIds) -> None:
        self.announced.append(rows.ids.tolist())

    def put(self, rows: RowIds, data: Any) -> None:
        assert rows.stored is not None
        believed = rows.stored.deletions == self.deletions
        self.known |= {int(id): bool(known) and believed for id, known in zip(rows.ids, rows.stored.rows, strict=True)}
        super().put(rows, data)

    def delete(self, rows: RowIds) -> None:
        super().delete(rows)
        self.deletions += 1


class SlowHinted(Hinted):
    """Its reads wait until they are let through, and are noted among what is announced, after a -1."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def get(self, rows: RowIds, *args: Any) -> None:
        self.announced.append([-1, *rows.ids.tolist()])
        self.reached.set()
        assert self.opened.wait(60)
        super().get(rows, *args)


def test_rows_that_a_later_batch_will_miss_are_announced() -> None:
    store = SlowHinted()
    with make(TierConfig(0, "64KiB", store)) as module:
        module(ids_of(1, 2)).sum().backward()
        store.opened.clear()
        loop = prefetch([ids_of(1, 10), ids_of(2, 11, 10), ids_of(2, 3)], module, lookahead=2)
        first = next(loop)
        store.opened.set()  # now that all three are in the queue
        module(first).sum().backward()
        for ids in loop:
            module(ids).sum().backward()
        announced = [ids for ids in store.announced if ids[0] != -1]
        assert [3] in announced and all(ids in ([11, 10], [11], [3]) for ids in announced)  # 2 is in memory
        store.waits_for_disk, store.announced = False, []
        for ids in prefetch([ids_of(20), ids_of(21), ids_of(22)], module, lookahead=2):
            module(ids).sum().backward()
        assert all(ids[0] == -1 for ids in store.announced)


def test_the_next_batch_is_announced_before_this_one_is_read() -> None:
    store = SlowHinted()
    store.opened.clear()
    with make(TierConfig(0, "64KiB", store)) as module:
        loop = prefetch([ids_of(1), ids_of(2), ids_of(3), ids_of(4)], module, lookahead=3)
        next(loop)
        assert store.reached.wait(60)
        store.opened.set()
        for entry in loop._entries:
            assert entry.done.wait(60)
        # The thread had the first when the others were in the queue already, or else the second.
        assert store.announced.index([3]) == store.announced.index([-1, 2]) - 1
        loop.close()


@pytest.mark.parametrize("tiers", [("0", "64KiB"), (4 * ROW_BYTES, "64KiB")])
def test_rows_that_came_from_the_store_are_known_to_be_there(tiers: tuple[int | str, int | str]) -> None:
    store = Hinted()

    def train(module: TieredEmbedding, *ids: int) -> dict[int, bool]:
        module(ids_of(*ids)).sum().backward()
        store.known.clear()
        module.flush()
        return dict(store.known)

    with make(TierConfig(*tiers, store)) as module:
        assert train(module, 1) == {1: False}
        assert train(module, 1, 3) == {1: True, 3: False}
    with make(TierConfig(*tiers, store)) as module:
        assert train(module, 1, 3, 4) == {1: True, 3: True, 4: False}
        ((_, ref),) = module._opened.values()
        store.delete(RowIds.of(ref, np.array([3])))  # by somebody else
        assert train(module, 1, 3, 4) == {1: False, 3: False, 4: False}
        assert train(module, 1, 3, 4) == {1: True, 3: True, 4: True}


def test_a_flush_of_another_thread_does_not_disturb_the_loop(tmp_path: Path) -> None:
    with make(TierConfig(0, "1MiB", tmp_path / "s")) as module:
        batches = zipf_batches(200)
        expected = trained(TierConfig(0, "1MiB"), batches, 0)
        stop, failures = threading.Event(), []

        def flush() -> None:
            while not stop.is_set():
                try:
                    module.flush()
                except BaseException as error:
                    failures.append(error)
                    return

        thread = threading.Thread(target=flush)
        thread.start()
        outputs = train(module, prefetch(batches, module, lookahead=3))
        stop.set()
        thread.join(60)
        assert failures == []
        assert outputs == expected[0]
    with make(TierConfig(0, "1MiB", tmp_path / "s")) as module:
        assert module.rows(torch.arange(1, 301)).numpy().tobytes() == expected[1]


def test_an_update_beside_a_flush_of_another_thread_is_not_lost(tmp_path: Path) -> None:
    """It waits for the end of what is being copied, or comes before it."""
    store = Gate("put")
    module = make(TierConfig(0, "1MiB", store))
    module(ids_of(1, 2)).sum().backward()
    out = module(ids_of(1, 2))
    store.opened.clear()
    store.reached.clear()
    flushing = threading.Thread(target=module.flush)
    flushing.start()
    assert store.reached.wait(60)
    training = threading.Thread(target=lambda: out.sum().backward())
    training.start()
    training.join(0.3)  # long enough for an update that waits for nobody
    store.opened.set()
    flushing.join(60)
    training.join(60)
    expected = module.rows(ids_of(1, 2))
    module.close()
    with make(TierConfig(0, "1MiB", store)) as module:
        assert torch.equal(module.rows(ids_of(1, 2)), expected)


def test_a_forward_of_another_thread_leaves_a_pass_alone() -> None:
    with make(TierConfig(0, "1MiB")) as module:
        before = module.rows(ids_of(1, 2, 10, 11))
        first, last = module(ids_of(1, 2)), module(ids_of(10, 11))

        def beside(grad: torch.Tensor) -> torch.Tensor:
            def look() -> None:
                with torch.no_grad():
                    module(ids_of(1))

            thread = threading.Thread(target=look)
            thread.start()
            thread.join(60)
            return grad

        first.register_hook(beside)  # comes when the gradients of the last one are recorded
        (first.sum() + last.sum()).backward()
        assert torch.equal(module.rows(ids_of(1, 2, 10, 11)), before - 1)


def test_modules_of_one_store_trained_in_two_threads() -> None:
    batches = zipf_batches(60)

    def run(threads: bool) -> list[bytes]:
        tiers = TierConfig(0, "1MiB", MemoryStore())
        with make(tiers, name="a") as one, make(tiers, name="b") as other:
            workers = [threading.Thread(target=train, args=(module, batches)) for module in (one, other)]
            for worker in workers:
                worker.start()
                if not threads:
                    worker.join(60)
            for worker in workers:
                worker.join(60)
            return [module.rows(torch.arange(1, 301)).numpy().tobytes() for module in (one, other)]

    assert run(threads=True) == run(threads=False)


def test_a_flush_keeps_what_is_prepared_where_there_is_room() -> None:
    with make(TierConfig(0, "1MiB", MemoryStore())) as module:
        loop = prefetch([ids_of(1), ids_of(2), ids_of(3)], module, lookahead=2)
        for ids in loop:
            for entry in loop._entries:
                assert entry.done.wait(60)
            module.flush()
            module(ids).sum().backward()
        assert (loop.stats.prepared, loop.stats.refused) == (3, 0)


def test_an_engine_that_could_not_be_made_does_not_disturb_forks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a store")
    with make(SMALL) as module:
        module(ids_of(1)).sum().backward()
        try:
            make(TierConfig(0, "64KiB", tmp_path / "file"))
        except Exception as error:
            kept = error  # and the frames that have the engine
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                signal.alarm(30)
                done = []
                thread = threading.Thread(target=lambda: done.append(len(module.rows(ids_of(1)))))
                thread.start()
                thread.join(20)
                code = 0 if done == [1] else 2
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert kept.__traceback__ is not None


def test_an_error_of_deduplicating_comes_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(SMALL) as module:
        group = module._lookup.group
        failing, dedupe = [True], group.dedupe

        def short_of_memory(*args: Any) -> Any:
            if failing[0]:
                raise MemoryError
            return dedupe(*args)

        monkeypatch.setattr(group, "dedupe", short_of_memory)
        loop = prefetch([ids_of(1), ids_of(2)], module, lookahead=1)
        ids = next(loop)
        with pytest.raises(MemoryError):
            module(ids)
        failing[0] = False
        module(ids).sum().backward()
        module(next(loop)).sum().backward()
        assert loop.stats.failed == 2 and pinned(module) == 0
        assert loop.stats.last_failure == "MemoryError: "


def test_a_child_forked_while_ids_are_deduplicated_may_look_up() -> None:
    with make(SMALL) as module:
        module(ids_of(1, 2)).sum().backward()
        ((group, _),) = module._opened.values()
        held, forked = threading.Event(), threading.Event()

        def dedupe_for_long() -> None:
            with group.deduping:
                held.set()
                assert forked.wait(60)

        thread = threading.Thread(target=dedupe_for_long)
        thread.start()
        assert held.wait(60)
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                signal.alarm(30)
                code = 0 if len(module(ids_of(1))) == 1 else 2
            os._exit(code)
        forked.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0

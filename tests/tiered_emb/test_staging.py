"""Rows on their way to a device: in order with the trainer's work, whatever either stream is late with.

`LateCopies` stands for a device that does nothing before it has to: what it is asked to copy happens when somebody who
is entitled to the result waits for it, and no sooner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from storage.memory_store import MemoryStore
from tiered_emb import RowwiseAdagrad, TierConfig, TieredEmbeddingBag, prefetch
from tiered_emb import tier as tier_module
from tiered_emb.cache import Directory
from tiered_emb.staging import PlainCopies, Staging, block_rows, staging_bytes
from tiered_emb.tier import Slab, Tier

CPU = torch.device("cpu")


class LateCopies:
    """Copies that are done as late as their contract allows."""

    def __init__(self) -> None:
        self.late: list[Callable[[], None]] = []
        self.used_since_run = False  # the caller's stream was given work that no copy has waited for
        self.uses = 0
        self.ran = 0
        self._one_at_a_time = threading.Lock()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype)

    def run(self, work: Callable[[], None]) -> None:
        self.used_since_run = False
        self.late.append(work)

    def mark(self) -> Callable[[], None]:
        with self._one_at_a_time:
            count = self.ran + len(self.late)
        return lambda: self._catch_up(count)

    def lead(self) -> None:
        self.mark()()

    def used(self) -> None:
        self.used_since_run = True
        self.uses += 1

    def share(self, tensor: torch.Tensor) -> None:
        pass

    def _catch_up(self, count: int) -> None:
        with self._one_at_a_time:
            while self.ran < count:
                self.ran += 1
                self.late.pop(0)()


def slab_of(rows: int) -> Slab:
    slab = Slab(rows, 3, 1, CPU)
    slab.weight.zero_()
    slab.state.zero_()
    return slab


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """Every tier is given rows by late copies; those that were made."""
    made: list[LateCopies] = []

    def staging_for(weight: torch.Tensor, state: torch.Tensor) -> Staging:
        made.append(LateCopies())
        return Staging(made[-1], weight, state)

    monkeypatch.setattr(tier_module, "staging_for", staging_for)
    return made


@pytest.mark.parametrize("rows", [0, 1, 5, 64, 65, 129, 700])
@pytest.mark.parametrize("copies", [PlainCopies, LateCopies])
def test_rows_arrive_however_many_blocks_they_take(rows: int, copies: Callable[[], LateCopies]) -> None:
    slab = slab_of(1024)
    staging = Staging(copies(), slab.weight, slab.state)
    rng = np.random.default_rng(rows)
    slots = rng.permutation(1024)[:rows].astype(np.int32)
    sent, back = rng.random((rows, 4), np.float32), np.full((rows, 4), np.nan, np.float32)
    tier = Tier("hbm", Directory(1024, "lru"), slab)
    tier.slab._staging = staging
    tier.write(slots, sent)
    sent_before = sent.copy()
    sent[:] = -1  # the caller's array is its own again at once
    tier.read(slots, back)
    assert np.array_equal(back, sent_before)
    with tier.working():
        assert np.array_equal(slab.weight[slots].numpy(), sent_before[:, :3])
        assert np.array_equal(slab.state[slots].numpy(), sent_before[:, 3:])
        assert float(slab.weight.sum()) == pytest.approx(float(sent_before[:, :3].sum()), rel=1e-4)


def test_rows_move_after_the_work_that_was_given_before_them() -> None:
    slab, copies = slab_of(64), LateCopies()
    tier = Tier("hbm", Directory(64, "lru"), slab)
    tier.slab._staging = Staging(copies, slab.weight, slab.state)
    with tier.working():
        pass
    assert copies.used_since_run
    tier.write(np.arange(3, dtype=np.int32), np.ones((3, 4), np.float32))
    assert not copies.used_since_run


class MetCopies(PlainCopies):
    """Copies in the middle of which a thread waits until others have come as far, or cannot."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self._changed = threading.Condition()

    def run(self, work: Callable[[], None]) -> None:
        with self._changed:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most > 1, 0.2)
        work()
        with self._changed:
            self.inside -= 1


def test_who_reads_beside_who_writes_gets_blocks_of_its_own() -> None:
    """The trainer reads rows that it is about to change for a state that is being written, and has no road."""
    slab, copies = slab_of(64), MetCopies()
    slab.weight[:] = torch.arange(64.0)[:, None]
    tier = Tier("hbm", Directory(64, "lru"), slab)
    tier.slab._staging = Staging(copies, slab.weight, slab.state)
    out = np.full((4, 4), np.nan, np.float32)
    reading = threading.Thread(target=tier.read, args=(np.arange(4, dtype=np.int32), out))
    reading.start()
    tier.write(np.arange(32, 36, dtype=np.int32), np.full((4, 4), 9.0, np.float32))
    reading.join()
    assert copies.most == 1
    assert np.array_equal(out[:, :3], np.repeat(np.arange(4, dtype=np.float32)[:, None], 3, 1))
    assert np.array_equal(slab.weight[32:36].numpy(), np.full((4, 3), 9, np.float32))


def test_work_that_fails_is_waited_for_too() -> None:
    slab, copies = slab_of(64), LateCopies()
    tier = Tier("hbm", Directory(64, "lru"), slab)
    tier.slab._staging = Staging(copies, slab.weight, slab.state)
    with pytest.raises(ValueError, match="half-way"), tier.working():
        raise ValueError("half-way")
    assert copies.used_since_run


def test_a_read_that_fails_leaves_no_block_that_writes_to_the_callers_memory_later() -> None:
    slab, copies = slab_of(1024), LateCopies()
    staging = Staging(copies, slab.weight, slab.state)
    out, asked = np.full((300, 4), np.nan, np.float32), []

    def take(slots: torch.Tensor, rows: torch.Tensor) -> None:
        asked.append(len(slots))
        if len(asked) == 3:
            raise RuntimeError("no memory on the device")
        rows.fill_(1)

    with pytest.raises(RuntimeError, match="no memory"):
        staging.read(np.arange(300, dtype=np.int32), out, take)
    kept = out.copy()
    staging.read(np.arange(64, dtype=np.int32), np.empty((64, 4), np.float32), lambda slots, rows: None)
    assert np.array_equal(out, kept, equal_nan=True)


def test_blocks_are_a_small_part_of_the_slab_and_counted() -> None:
    assert block_rows(10, 4) == 1
    assert block_rows(1024, 4) == 64
    assert block_rows(1 << 24, 65) == (1 << 18) // 260
    assert staging_bytes(CPU, 1024, 4) == 0
    slab = slab_of(1024)
    staging = Staging(PlainCopies(), slab.weight, slab.state)
    held = sum(block.slots.nbytes + block.rows.nbytes for block in staging._blocks)
    assert staging_bytes(torch.device("cuda"), 1024, 4) == held == 2 * 64 * 20


@contextmanager
def module(hbm_rows: int, store: MemoryStore) -> Iterator[TieredEmbeddingBag]:
    tiers = TierConfig(hbm_bytes=hbm_rows * 20, ddr_bytes=1 << 20, store=store)
    with TieredEmbeddingBag(
        5000, 4, mode="sum", name="t", tiers=tiers, optimizer=RowwiseAdagrad(lr=0.1), seed=3, device="cpu"
    ) as one:
        yield one


def trained(lookahead: int) -> tuple[list[bytes], bytes]:
    """Every output of some steps on rows that hardly fit, and the rows at the end."""
    rng = np.random.default_rng(5)
    batches = [torch.from_numpy(rng.zipf(1.3, (16, 4)) % 5000) for _ in range(60)]
    with module(200, MemoryStore()) as table:
        outs = []
        for batch in prefetch(batches, table, lookahead=lookahead):
            out = table(batch)
            outs.append(out.detach().numpy().tobytes())
            (out * out).sum().backward()
        return outs, table.rows(torch.arange(5000)).numpy().tobytes()


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_training_is_the_same_to_the_bit_when_copies_are_late(lookahead: int, late: list[LateCopies]) -> None:
    outcome = trained(lookahead)
    assert late and sum(copies.ran for copies in late) > 100
    assert late[0].uses >= 2 * 60  # a forward and an update a step, each to be over before its slots get other rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_module, "staging_for", lambda weight, state: None)
        assert trained(0) == outcome


def test_what_a_look_up_does_not_wait_for_is_seen(late: list[LateCopies], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices a look-up that does not wait for its rows."""
    monkeypatch.setattr(LateCopies, "lead", lambda self: None)
    outcome = trained(1)
    monkeypatch.setattr(tier_module, "staging_for", lambda weight, state: None)
    assert trained(0) != outcome

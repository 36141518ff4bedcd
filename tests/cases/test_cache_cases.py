"""The cache engine: cases 20 (what is counted), 21 (rows that were popular once) and 23 (saved, loaded elsewhere)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from storage import HeapStore
from tests.cases import another_machine
from tests.cases.test_tier_cases import batch_of, group_of
from tiered_emb import SGD, TierConfig, TieredEmbeddingBag
from tiered_emb.cache import POLICIES, Directory
from tiered_emb.cache.admission import ADMISSIONS

COUNTING = (
    "lfu",
    "lfu-aged",
    "lirs",
    "s3fifo",
    "arc",
    "wtinylfu",
    "clock",
    "sieve",
)  # a second request makes a difference
EXACT = ("lfu", "lfu-aged")  # so does each further one


def request(directory: Directory, ids: list[int]) -> list[int]:
    """A batch; the rows that leave for it."""
    unique, counts = np.unique(ids, return_counts=True)
    order = sorted(range(len(unique)), key=lambda i: ids.index(int(unique[i])))
    unique, counts = unique[order].astype(np.int64), counts[order].astype(np.int32)
    return another_machine.request(directory, np.zeros(len(unique), np.uint32), unique, counts)[1]


@pytest.mark.parametrize("batch", [[1, 1, 1, 2], [2, 1, 1, 1]])
@pytest.mark.parametrize("policy", COUNTING)
def test_case_20_the_row_with_most_requests_of_a_batch_stays(policy: str, batch: list[int]) -> None:
    """Room for 2: of [A, A, A, B] B leaves for C, whichever came first."""
    directory = Directory(2, policy)
    assert request(directory, batch) == []
    assert request(directory, [3]) == [2]


@pytest.mark.parametrize(("more", "leaves"), [(1, 3), (2, 1), (3, 1)])
@pytest.mark.parametrize("policy", EXACT)
def test_case_20_and_its_count_is_three(policy: str, more: int, leaves: int) -> None:
    """C has 2 requests and leaves before A; with 3 it came to them later, so that A leaves."""
    directory = Directory(2, policy)
    request(directory, [1, 1, 1, 2])
    request(directory, [3])
    request(directory, [3] * more)
    assert request(directory, [4]) == [leaves]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_case_20_prefetch_and_forward_of_one_batch_count_once(policy: str) -> None:
    """What is fetched ahead is counted as its batch is planned; the forward, the update and the end change nothing."""
    group = group_of(20, 10, HeapStore(), policy)
    for ids in ([1, 1, 1, 2], [2, 3, 3, 1, 1, 7], list(range(5, 24))):
        before = group.top.directory.save()
        batch = batch_of(group, np.array(ids))
        plan = group.prepare(batch)
        planned = group.top.directory.save()
        group.lookup(plan)
        group.overwrite(plan, group.read_rows(batch.tables, batch.ids))
        group.peek(batch)
        group.release(plan)
        after = group.top.directory.save()
        assert any(not np.array_equal(before[name], planned[name]) for name in before)
        assert all(np.array_equal(planned[name], after[name]) for name in planned)


def test_case_20_a_training_step_counts_each_request_once() -> None:
    """Three of A and one of B, forward, backward and update; once more, and once in eval, where nothing counts."""
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "64KiB", None, "lfu"), optimizer=SGD(0.1)) as bag:
        ids = torch.tensor([[5], [5], [5], [6]])
        for steps in (1, 2):
            bag(ids).sum().backward()
            assert counts_of(bag) == {5: 3 * steps, 6: steps}
        bag.eval()(ids)
        assert counts_of(bag) == {5: 6, 6: 2}


def counts_of(bag: TieredEmbeddingBag) -> dict[int, int]:
    """Requests of each row by LFU's classes."""
    (group,) = bag._engine.groups.values()
    saved = group.top.directory.save()
    classes = saved["policy.nodes"][3 * (saved["slots"] + 1) + 2]
    return dict(zip(saved["ids"].tolist(), saved["policy.class_counts"][classes].tolist(), strict=True))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_case_20_a_slot_given_to_a_new_id_starts_anew(policy: str) -> None:
    """A row with many requests leaves; who gets its slot is treated as in a tier where it never was."""
    reused, fresh = Directory(1000, policy), Directory(1000, policy)
    request(reused, [1] * 50)
    reused.remove(reused.occupied())
    for directory in (reused, fresh):
        assert request(directory, list(range(2, 1002))) == []
    leaving = [
        [request(each, list(range(first, first + 90))) for first in range(2000, 2900, 90)] for each in (reused, fresh)
    ]
    assert leaving[0] == leaving[1]
    assert any(2 in ids for ids in leaving[0])


@pytest.mark.parametrize("policy", EXACT)
def test_case_20_a_victims_slot_starts_at_the_count_of_the_next_id(policy: str) -> None:
    directory = Directory(2, policy)
    request(directory, [1] * 50)
    request(directory, [2] * 60)
    assert request(directory, [3, 3]) == [1]
    assert request(directory, [4]) == [3]
    assert request(directory, [5]) == [4]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine whose clock is a day ahead went on with, for every policy and rule of admission."""
    folder = tmp_path_factory.mktemp("saved")
    for policy in POLICIES:
        another_machine.save(folder / f"{policy}.npz", another_machine.trained(policy))
    for name in ADMISSIONS:
        another_machine.save(folder / f"admission-{name}.npz", another_machine.asked(name))
    command = [sys.executable, another_machine.__file__, str(folder)]
    subprocess.run(command, check=True, timeout=240, env=another_machine.environment())
    return folder


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_case_23_loaded_a_day_off_it_has_the_same_victims(policy: str, elsewhere: Path) -> None:
    """Saved at step 100, loaded where all clocks are a day ahead: the victims of the run that was not interrupted."""
    directory = another_machine.trained(policy)
    expected = another_machine.victims(directory)
    assert len(set(expected)) > 300
    assert np.load(elsewhere / f"{policy}.npy").tolist() == expected


@pytest.mark.parametrize("name", sorted(ADMISSIONS))
def test_case_23_loaded_a_day_off_it_admits_the_same_rows(name: str, elsewhere: Path) -> None:
    expected = another_machine.answers(another_machine.asked(name))
    assert any(expected)
    assert np.load(elsewhere / f"admission-{name}.npy").tolist() == expected


def hit_rate(directory: Directory, ids: NDArray[np.int64]) -> float:
    """The hit rate of one batch of distinct ids, admitted after it."""
    tables, slots = np.zeros(len(ids), np.uint32), np.empty(len(ids), np.int32)
    hits = directory.find(tables, ids, slots)
    here = slots[slots >= 0]
    directory.touch(here, np.ones(len(here), np.int32))
    directory.pin(here)
    new = ids[slots < 0]
    admitted = np.empty(len(new), np.int32)
    directory.admit(tables[: len(new)], new, np.ones(len(new), np.int32), admitted)
    directory.unpin(here)
    return hits / len(ids)


def batch(random: np.random.Generator, first: int) -> NDArray[np.int64]:
    """16 rows of the hot set, and 16 that come once in a while."""
    hot = first + random.permutation(100)[:16]
    return np.concatenate([hot, 10_000 + random.permutation(5_000)[:16]])


def rate_on(directory: Directory, first: int, rounds: int) -> list[float]:
    random = np.random.default_rng(first)
    return [hit_rate(directory, batch(random, first)) for _ in range(rounds)]


@pytest.mark.parametrize(("policy", "recovers"), [("lfu-aged", True), ("lfu", False)])
def test_case_21_a_hot_set_gives_way_to_the_next(policy: str, recovers: bool) -> None:
    """Room for 120 rows; set 1 is hot for 1,000 rounds, then set 2. LFU with ageing hits it again within 150 batches.

    4 periods of 1,200 requests: by then counts of set 1 are a sixteenth of what they were. LFU without ageing has not
    got over it: set 1's rows have 160 requests each, and set 2's have to pass them all.
    """
    directory = Directory(120, policy)
    before = np.mean(rate_on(directory, 0, 1000)[-100:])
    assert before > 0.45
    rate_on(directory, 1000, 150)
    after = np.mean(rate_on(directory, 1000, 50))
    assert (after > 0.9 * before) == recovers

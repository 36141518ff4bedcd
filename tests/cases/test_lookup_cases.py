"""Look-ups and new rows: inputs on which stores of embeddings have failed, cases 1 to 7, 13 and 22."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tiered_emb import (
    SGD,
    Adagrad,
    Constant,
    IdRangeError,
    InvalidBatchError,
    JaggedIds,
    Normal,
    RowwiseAdagrad,
    TableConfig,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    Uniform,
)
from tiered_emb.cache import POLICIES

EDGES = [-(2**63), -5, -1, 0, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]
ROOT = Path(__file__).parents[2]


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def look_up(bag: TieredEmbeddingBag, ids: torch.Tensor) -> torch.Tensor:
    """Each id in a bag of its own."""
    out: torch.Tensor = bag(ids.unsqueeze(1))
    return out.detach()


@pytest.mark.parametrize(("hbm", "ddr"), [(0, "64KiB"), (40 * 4 * 5, "64KiB"), (40 * 4 * 5, 0)])
def test_case_01_the_same_rows_every_time(tmp_path: Path, hbm: int, ddr: int | str) -> None:
    tiers = TierConfig(hbm, ddr, tmp_path / "rows")
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, seed=7, name="ads") as bag:
        first = look_up(bag, ids_of(1, 2, 3))
        assert torch.equal(look_up(bag, ids_of(1, 2, 3)), first)
        for start in range(1000, 4000, 30):  # other rows push these out
            look_up(bag, torch.arange(start, start + 30))
        assert bag.stats().tiers[0].evictions > 0
        bag.eval()
        assert torch.equal(look_up(bag, ids_of(3, 2, 1)), first.flip(0))
        bag.train()
        assert torch.equal(look_up(bag, ids_of(1, 2, 3)), first)
        assert bag.stats().store.rows_written == 0  # nothing was updated
    code = (
        "import torch, sys; from tiered_emb import *;"
        "bag = TieredEmbeddingBag(None, 4, mode='sum', tiers=TierConfig(0, '64KiB', sys.argv[1]), seed=7, name='ads');"
        "print(bag.rows(torch.tensor([1, 2, 3])).numpy().tobytes().hex())"
    )
    other = subprocess.run([sys.executable, "-c", code, tmp_path / "rows"], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == first.numpy().tobytes().hex()


def test_case_01_eval_leaves_no_trace() -> None:
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "64KiB"), seed=7) as bag:
        look_up(bag, ids_of(1, 2))
        before = bag.stats()
        bag.eval()
        look_up(bag, ids_of(1, 2, 3))
        bag.train()
        with torch.no_grad():
            look_up(bag, ids_of(2, 4))
        bag.rows(ids_of(1, 5))
        assert bag.stats().tiers == before.tiers
        bag.flush()
        assert bag.stats().store.rows_written == 0


@pytest.mark.parametrize("hbm", [0, 12 * 4 * 4])
def test_case_02_any_64_bit_integer_is_an_id(tmp_path: Path, hbm: int) -> None:
    edges = ids_of(*EDGES)
    tiers = TierConfig(hbm, "64KiB", tmp_path / "rows")
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=1, name="t") as bag:
        first = look_up(bag, edges)
        assert len({row.numpy().tobytes() for row in first}) == len(EDGES)
        bag(edges.unsqueeze(1)).sum().backward()
        bag.set_rows(ids_of(-1), torch.zeros(1, 4))
        for start in range(0, 3000, 10):
            look_up(bag, torch.arange(start + 10, start + 20))
        expected = first - 1
        expected[EDGES.index(-1)] = 0
        assert torch.equal(look_up(bag, edges), expected)
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=1, name="t") as bag:
        assert torch.equal(bag.rows(edges), expected)
        assert sorted(int(row_id) for _, ids, _ in bag.scan() for row_id in ids) == sorted(EDGES)


def two_bounded(mode_of_second: str = "sum") -> TieredEmbeddingBagCollection:
    tables = [
        TableConfig("first", 10, 3, ["a"]),
        TableConfig("second", 10, 3, ["b"], mode=mode_of_second),  # type: ignore[arg-type]
    ]
    return TieredEmbeddingBagCollection(tables, tiers=TierConfig(0, "1MiB"), optimizer=SGD(1.0), seed=1)


def jagged(**features: list[int]) -> JaggedIds:
    """One bag of one id for each id given."""
    return JaggedIds.from_dict(
        {name: (ids_of(*ids), torch.ones(len(ids), dtype=torch.int64)) for name, ids in features.items()}
    )


def test_case_03_an_id_past_a_table_is_refused_by_name() -> None:
    with two_bounded() as bags:
        batch = jagged(b=[9, 0], a=[3, 10])
        copy = batch.ids.clone()
        with pytest.raises(IdRangeError, match="table 'first', feature 'a': id 10 at position 1 "):
            bags(batch)
        assert torch.equal(batch.ids, copy)
        assert bags.stats().tiers[0].rows == 0
        with pytest.raises(IdRangeError, match="id -1 at position 0"):
            bags(jagged(a=[0, 0], b=[-1, 0]))
        with pytest.raises(IdRangeError, match="id 10"):
            bags.rows("first", ids_of(10))
        with pytest.raises(IdRangeError, match="id 11"):
            bags.set_rows("first", ids_of(1, 11), torch.zeros(2, 3))


def test_case_03_feature_order_does_not_matter() -> None:
    with two_bounded() as bags:
        one, other = bags(jagged(a=[1, 9], b=[9, 2])), bags(jagged(b=[9, 2], a=[1, 9]))
        assert torch.equal(one["a"], other["a"])
        assert torch.equal(one["b"], other["b"])
        assert torch.equal(one["a"], bags.rows("first", ids_of(1, 9)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_case_04_empty_batches_bags_and_features(mode: str) -> None:
    with TieredEmbeddingBag(None, 4, mode=mode, tiers=TierConfig(0, "64KiB"), seed=1) as bag:  # type: ignore[arg-type]
        for ids, offsets, bags in ((ids_of(), ids_of(), 0), (ids_of(), ids_of(0), 1), (ids_of(), ids_of(0, 0, 0), 3)):
            out = bag(ids, offsets)
            assert torch.equal(out, torch.zeros(bags, 4))
            out.sum().backward()
        assert bag(torch.empty((0, 5), dtype=torch.int64)).shape == (0, 4)
        out = bag(ids_of(5, 6), ids_of(0, 0, 2))
        assert torch.equal(out[0], torch.zeros(4))
        assert torch.equal(out[2], torch.zeros(4))
        out.sum().backward()
    with two_bounded(mode) as bags:
        none = torch.zeros(2, dtype=torch.int64)
        out = bags(JaggedIds.from_dict({"a": (ids_of(), none), "b": (ids_of(1), ids_of(0, 1))}))
        assert torch.equal(out["a"], torch.zeros(2, 3))
        (out["a"].sum() + out["b"].sum()).backward()
        empty = (ids_of(), ids_of())
        assert bags(JaggedIds.from_dict({"a": empty, "b": empty}))["b"].shape == (0, 3)


def test_case_04_empty_embedding() -> None:
    with TieredEmbedding(None, 4, tiers=TierConfig(0, "64KiB"), seed=1) as embedding:
        assert embedding(torch.empty((0, 3), dtype=torch.int64)).shape == (0, 3, 4)


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (ids_of(1, 2, 3, 4, 5), ids_of(0, 5, 2), r"offsets\[2\] is 2"),
        (ids_of(1, 2), ids_of(1, 2), r"offsets\[0\] is 1"),
        (ids_of(1, 2), ids_of(0, 3), "offsets"),
        (ids_of(1, 2), torch.tensor([0, 2**31 - 1], dtype=torch.int32), "offsets"),
        (ids_of(1, 2), None, "offsets"),
        (torch.tensor([1.0]), ids_of(0), "float32"),
        (torch.zeros((1, 1, 1), dtype=torch.int64), None, "dimensions"),
    ],
)
def test_case_05_bad_bags_are_refused(ids: torch.Tensor, offsets: torch.Tensor | None, message: str) -> None:
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "64KiB"), seed=1) as bag:
        with pytest.raises(InvalidBatchError, match=message):
            bag(ids, offsets)
        assert bag.stats().tiers[0].rows == 0


def test_case_05_the_last_offset_is_the_number_of_ids() -> None:
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "64KiB"), seed=1, include_last_offset=True) as bag:
        for offsets in (ids_of(0, 1), ids_of(0, 3), ids_of()):
            with pytest.raises(InvalidBatchError, match="offsets"):
                bag(ids_of(1, 2), offsets)
        assert bag(ids_of(1, 2), ids_of(0, 2)).shape == (1, 4)


def test_case_05_bad_lengths_are_refused() -> None:
    for lengths, message in ((ids_of(2, -1), "length -1"), (ids_of(2, 2), "add up to 4")):
        with pytest.raises(InvalidBatchError, match=message):
            JaggedIds.from_dict({"a": (ids_of(1), lengths)})
    with pytest.raises(InvalidBatchError, match="has 1 bags"):
        JaggedIds.from_dict({"a": (ids_of(1), ids_of(1, 0)), "b": (ids_of(1), ids_of(1))})
    with two_bounded() as bags, pytest.raises(InvalidBatchError, match="features"):
        bags(jagged(a=[1], c=[1]))
    with two_bounded() as bags, pytest.raises(InvalidBatchError, match="offsets"):
        bags(JaggedIds(("a", "b"), ids_of(1, 2), ids_of(0, 2, 1)))


def test_case_05_strides_do_not_matter() -> None:
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "64KiB"), seed=1) as bag:
        ids, weights = torch.arange(12), torch.rand(3, 2).T
        assert torch.equal(bag(ids[::2], ids_of(0, 2)), bag(ids[::2].clone(), ids_of(0, 2)))
        pairs = ids[:6].reshape(3, 2).T
        assert torch.equal(bag(pairs, None, weights), bag(pairs.contiguous(), None, weights.contiguous()))
        assert torch.equal(bag(pairs.to(torch.int32)), bag(pairs))


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 1000])
def test_case_06_any_dimension(dim: int) -> None:
    rule = Adagrad(0.1)
    with TieredEmbeddingBag(None, dim, mode="sum", tiers=TierConfig(0, "1MiB"), optimizer=rule, seed=1) as bag:
        reference = torch.nn.EmbeddingBag.from_pretrained(bag.rows(torch.arange(9)), freeze=False, mode="sum")
        optimizer = torch.optim.Adagrad(reference.parameters(), 0.1)
        for _ in range(3):
            ids = torch.randint(0, 9, (5, 3), generator=torch.Generator().manual_seed(dim))
            out, expected = bag(ids), reference(ids)
            torch.testing.assert_close(out, expected)
            out.square().sum().backward()
            optimizer.zero_grad()
            expected.square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(bag.rows(torch.arange(9)), reference.weight.detach(), rtol=1e-4, atol=1e-5)


def test_case_06_a_table_costs_nothing_until_it_is_touched() -> None:
    code = """
import torch
from tiered_emb import TieredEmbeddingBag, TierConfig
anonymous = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = anonymous()
bag = TieredEmbeddingBag(10**9, 64, mode="sum", tiers=TierConfig(0, "1GiB"), seed=3)
print(anonymous() - before, bag.rows(torch.tensor([999_999_999])).numpy().tobytes().hex())
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    (grown, row), (_, again) = (run.stdout.split() for run in runs)
    assert int(grown) < 50_000, f"{grown} kB"
    assert row == again


@pytest.mark.parametrize(("hbm", "ddr"), [(0, "64KiB"), (40 * 4 * 5, "64KiB"), (40 * 4 * 5, 0)])
def test_case_07_assigned_rows_are_exact_and_start_anew(hbm: int, ddr: int | str) -> None:
    values = torch.randn(3000, 4)
    with TieredEmbeddingBag(3000, 4, mode="sum", tiers=TierConfig(hbm, ddr), optimizer=RowwiseAdagrad(0.5)) as bag:
        bag(torch.arange(30).unsqueeze(1)).sum().backward()
        bag.set_rows(torch.arange(3000), values)
        assert torch.equal(bag.rows(torch.arange(3000)), values)
        assert torch.equal(look_up(bag, ids_of(7, 2999)), values[[7, 2999]])
        grad = torch.full((1, 4), 2.0)
        bag(ids_of(7).unsqueeze(1)).backward(grad)
        expected = values[7] - 0.5 * 2 / (torch.tensor(4.0).sqrt() + 1e-8)
        torch.testing.assert_close(bag.rows(ids_of(7))[0], expected)
        bag.set_rows(ids_of(5, 6, 5), torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4))
        assert bag.rows(ids_of(5, 6))[:, 0].tolist() == [3.0, 2.0]
        with pytest.raises(InvalidBatchError, match="shape"):
            bag.set_rows(ids_of(5), torch.zeros(1, 3))


def test_case_07_first_weights() -> None:
    weight = torch.randn(10, 4)
    with TieredEmbeddingBag(10, 4, mode="sum", _weight=weight, tiers=TierConfig(0, "64KiB")) as bag:
        assert torch.equal(bag.rows(torch.arange(10)), weight)


def test_case_13_options_of_one_table_leave_another_alone() -> None:
    def second(first: TableConfig) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        tables = [first, TableConfig("second", None, 4, ["b"], init=Normal())]
        with TieredEmbeddingBagCollection(tables, tiers=TierConfig(0, "1MiB"), seed=5) as bags:
            for step in range(3):
                out = bags(jagged(a=[1, 2, step], b=[1, 7, step]))
                (out["a"].sum() + out["b"].square().sum()).backward()
            return np.concatenate([rows for name, _, rows in bags.scan() if name == "second"])

    plain = second(TableConfig("first", None, 4, ["a"], init=Normal()))
    for other in (
        TableConfig("first", None, 4, ["a"], mode="mean", init=Constant(3.0)),
        TableConfig("first", 10, 4, ["a"], mode="max", init=Uniform(-1, 1)),
        TableConfig("first", None, 6, ["a"]),
    ):
        assert second(other).tobytes() == plain.tobytes()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("step", [1, 8, 2**20, 2**32])
def test_case_22_as_many_ids_as_rows_evict_nothing(policy: str, step: int) -> None:
    rows = 1000
    tiers = TierConfig(rows * 4 * 4, 0, None, policy)
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(0.1)) as bag:
        for _ in range(2):
            for start in range(0, rows, 100):
                bag((torch.arange(start, start + 100) * step).unsqueeze(1)).sum().backward()
        (tier,) = bag.stats().tiers
        assert (tier.capacity_rows, tier.rows, tier.evictions, tier.hits) == (rows, rows, 0, rows)

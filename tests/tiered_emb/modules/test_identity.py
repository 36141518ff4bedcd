"""Tiers change nothing: modules over small tiers against DenseOracle, outputs and rows to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_emb import SGD, Adagrad, Adam, JaggedIds, Normal, RowwiseAdagrad, TableConfig, TierConfig, Uniform, kernels
from tiered_emb import TieredEmbeddingBagCollection as Collection
from tiered_emb.engine import row_schema
from tiered_emb.optim import RowRule
from tiered_emb.testing import DenseOracle

RULES = {"sgd": SGD(0.1), "adagrad": Adagrad(0.1), "rowwise_adagrad": RowwiseAdagrad(0.1), "adam": Adam(0.01)}
TABLES = [
    TableConfig("ads", None, 4, ["clicked", "shown"], init=Uniform(-1, 1)),
    TableConfig("users", 40, 4, mode="mean"),
    TableConfig("shops", None, 6, mode="max"),
    TableConfig("places", None, 4, init=Normal(0, 0.5)),
]
FEATURES = [name for table in TABLES for name in table.feature_names]
EDGES = [-(2**63), -5, -1, 0, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]


def batch_of(rng: np.random.Generator, size: int, spread: int) -> JaggedIds:
    """Random bags for every feature in random order: empty ones, repeats and edge ids among them."""
    features = {}
    for name in rng.permutation(FEATURES).tolist():
        lengths = torch.from_numpy(rng.integers(0, 4, size) * (rng.random(size) < 0.8)).to(torch.int64)
        ids = rng.integers(0, spread, int(lengths.sum()))
        ids = ids % 40 if name == "users" else np.where(rng.random(len(ids)) < 0.1, rng.choice(EDGES, len(ids)), ids)
        features[name] = (torch.from_numpy(ids), lengths)
    return JaggedIds.from_dict(features)


def train(bags: Any, seed: int, steps: int, spread: int, unused: bool) -> list[torch.Tensor]:
    """Outputs of every step; the loss weighs them with random numbers, and leaves some features out."""
    rng, outputs = np.random.default_rng(seed), []
    for _ in range(steps):
        batch = batch_of(rng, int(rng.integers(0, 12)), spread)
        outs = bags(batch)
        outputs += [outs[name].detach().clone() for name in FEATURES]
        part = [name for name in FEATURES if not unused or rng.random() < 0.7] or FEATURES
        factors = {name: torch.from_numpy(rng.standard_normal(outs[name].shape).astype(np.float32)) for name in part}
        sum((outs[name] * factors[name]).sum() for name in part).backward()  # type: ignore[union-attr]
    return outputs


def rows_of(bags: Collection) -> dict[str, dict[int, bytes]]:
    found: dict[str, dict[int, bytes]] = {table.name: {} for table in TABLES}
    for name, ids, rows in bags.scan():
        for row_id, row in zip(ids.tolist(), rows, strict=True):
            assert row_id not in found[name]
            found[name][row_id] = row.tobytes()
    return found


def check(tiers: TierConfig, rule: RowRule, seed: int, unused: bool = False, spread: int = 150) -> Collection:
    """Train both, compare every output and every row ever updated."""
    oracle = DenseOracle(TABLES, optimizer=rule, seed=3)
    expected = train(oracle, seed, spread // 10, spread, unused)
    bags = Collection(TABLES, tiers=tiers, optimizer=rule, seed=3)
    for at, (one, other) in enumerate(zip(train(bags, seed, spread // 10, spread, unused), expected, strict=True)):
        assert torch.equal(one, other), f"output {at}"
    found = rows_of(bags)
    for name, (ids, rows) in oracle.touched().items():
        assert found[name] == {row_id: row.tobytes() for row_id, row in zip(ids.tolist(), rows, strict=True)}
    return bags


def bytes_of(rows_a_table: int, rule: RowRule) -> int:
    """HBM budget that holds so many rows of each table."""
    return rows_a_table * sum(row_schema(table.embedding_dim, rule).row_bytes for table in TABLES)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("hbm_rows", "ddr"), [(0, "96KiB"), (45, "100KiB"), (45, "0"), (1000, "1MiB")])
def test_tiers_do_not_change_a_bit(rule: RowRule, policy: str, hbm_rows: int, ddr: str) -> None:
    with check(TierConfig(bytes_of(hbm_rows, rule), ddr, None, policy), rule, seed=1) as bags:
        tiers = bags.stats().tiers
        assert all(tier.peak_bytes <= tier.capacity_bytes for tier in tiers)
        assert (tiers[0].evictions > 0) == (hbm_rows == 45)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("hbm_rows", [0, 45])
def test_the_row_log_below_does_not_either(tmp_path: Path, policy: str, hbm_rows: int) -> None:
    rule = RULES["rowwise_adagrad"]
    with check(
        TierConfig(bytes_of(hbm_rows, rule), "140KiB", tmp_path / "rows", policy), rule, seed=2, spread=800
    ) as bags:
        stats = bags.stats()
        assert stats.store.rows_read > 0
        assert stats.tiers[-1].peak_bytes <= stats.tiers[-1].capacity_bytes


def test_features_out_of_the_loss_are_not_updated() -> None:
    check(TierConfig("16KiB", "100KiB"), RULES["adam"], seed=3, unused=True).close()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    hbm_rows=st.sampled_from([0, 45, 100]),
    ddr=st.sampled_from([0, 100_000, 130_000, 1 << 20]),
    policy=st.sampled_from(["lru", "lfu"]),
    rule=st.sampled_from(list(RULES.values())),
)
def test_random_streams(seed: int, hbm_rows: int, ddr: int, policy: str, rule: RowRule) -> None:
    if hbm_rows or ddr:
        check(TierConfig(bytes_of(hbm_rows, rule), ddr, None, policy), rule, seed, unused=seed % 2 == 0).close()


def test_the_reference_kernels_drive_the_tiers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an HBM tier on another device runs."""
    monkeypatch.setattr(kernels, "for_device", lambda device: kernels.reference)
    rule = RULES["rowwise_adagrad"]
    check(TierConfig(bytes_of(45, rule), "100KiB"), rule, seed=4).close()


def test_a_table_used_twice_is_updated_once() -> None:
    """By the sum of both uses in call order, whatever order the backward pass visits them in."""
    rule, rng = RULES["adagrad"], np.random.default_rng(5)
    batches = [batch_of(rng, 6, 30) for _ in range(2)]
    results = []
    for make in (
        lambda: DenseOracle(TABLES, optimizer=rule, seed=1),
        lambda: Collection(TABLES, tiers=TierConfig(0, "1MiB"), optimizer=rule, seed=1),
    ):
        bags: Any = make()
        first, second = bags(batches[0]), bags(batches[1])
        loss = sum(second[name].square().sum() for name in FEATURES) + 3 * sum(first[name].sum() for name in FEATURES)
        loss.backward()
        results.append(bags(batches[0]))
    for name in FEATURES:
        assert torch.equal(results[0][name], results[1][name]), name

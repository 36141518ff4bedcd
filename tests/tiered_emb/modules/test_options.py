"""Options of the tiers together: every pair trains to the bit like whole tables, or is refused with a reason."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage import HeapStore, MemoryStore
from tiered_emb import (
    ConfigError,
    JaggedIds,
    Normal,
    RowwiseAdagrad,
    TableConfig,
    TierCapacityError,
    TierConfig,
    Uniform,
)
from tiered_emb import TieredEmbeddingBagCollection as Collection
from tiered_emb.cache import POLICIES
from tiered_emb.testing import DenseOracle

TABLES = [
    TableConfig("ads", None, 4, ["clicked", "shown"], init=Uniform(-1, 1)),
    TableConfig("users", None, 4, mode="mean"),
    TableConfig("shops", None, 6, mode="max", init=Normal(0, 0.5)),
]
FEATURES = [name for table in TABLES for name in table.feature_names]
RULE = RowwiseAdagrad(0.1)
STEPS, SPREAD = 16, 1_000
FLOOR, QUOTA, TIGHT = 105, 130, 25  # batches have fewer rows of a table than QUOTA, and one has more than TIGHT

Option = tuple[str, Any]
BASE: dict[str, Any] = {"hbm_bytes": 8_000, "ddr_bytes": 66_000}
ROW_LOG = {"ddr_bytes": 170_000}  # with its index and buffers
OPTIONS: list[Option] = [
    *(("policy", name) for name in [*POLICIES, "belady"]),
    ("min_rows", {"users": FLOOR, "shops": 5, "nobody": 10**6}),
    ("max_rows", {"ads": QUOTA, "users": 115, "nobody": 10**6}),
    ("max_rows", {"shops": TIGHT}),
    ("admission", "tinylfu"),
    ("admission", "probability:0.3"),
    ("hbm_bytes", 0),
    ("hbm_bytes", 9_000),
    ("ddr_bytes", 0),
    ("ddr_bytes", 300_000),
    ("record", "trace"),
    ("store", "path"),
    ("store", MemoryStore),
    ("store", HeapStore),
]


def named(option: Option) -> str:
    name, value = option
    return f"{name}={value if isinstance(value, str | int) else getattr(value, '__name__', 'set')}"


def reason_against(options: dict[str, Any]) -> str | None:
    """Why options do not go together."""
    if options["hbm_bytes"] == options["ddr_bytes"] == 0:
        return "a batch needs a tier"
    if options.get("policy") == "belady":
        return "belady must know every request to come"
    if "admission" in options and 0 in (options["hbm_bytes"], options["ddr_bytes"]):
        return "it says which of the rows that leave an HBM tier may come into a DDR tier"
    return None


def tiers_of(options: dict[str, Any], place: Path) -> TierConfig:
    """Files and stores are made anew for each test."""
    made = {"path": place / "rows", "trace": place / "trace"}
    values = {name: value() if isinstance(value, type) else value for name, value in options.items()}
    return TierConfig(**{name: made.get(v, v) if isinstance(v, str) else v for name, v in values.items()})


def batch_of(rng: np.random.Generator, spread: int) -> JaggedIds:
    features = {}
    for name in rng.permutation(FEATURES).tolist():
        lengths = torch.from_numpy(rng.integers(0, 4, 24))
        skewed = (spread * rng.random(int(lengths.sum())) ** 2).astype(np.int64)
        features[name] = (torch.from_numpy(skewed - 3), lengths)
    return JaggedIds.from_dict(features)


def train(bags: Any, after: Any = None) -> list[torch.Tensor]:
    """Outputs of every step."""
    rng, outputs = np.random.default_rng(7), []
    for step in range(STEPS):
        outs = bags(batch_of(rng, SPREAD * (1 + step % 2)))
        outputs += [outs[name].detach().clone() for name in FEATURES]
        sum(outs[name].square().sum() for name in FEATURES).backward()  # type: ignore[union-attr]
        if after is not None:
            after()
    return outputs


@pytest.fixture(scope="module")
def expected() -> tuple[list[torch.Tensor], dict[str, dict[int, bytes]]]:
    oracle = DenseOracle(TABLES, optimizer=RULE, seed=3)
    outputs = train(oracle)
    rows = {
        name: {row_id: row.tobytes() for row_id, row in zip(ids.tolist(), rows, strict=True)}
        for name, (ids, rows) in oracle.touched().items()
    }
    return outputs, rows


def check_stats(bags: Collection) -> None:
    """Budgets and quotas hold."""
    tiers = bags.stats().tiers
    assert all(tier.bytes <= tier.peak_bytes <= tier.capacity_bytes for tier in tiers)
    for name, quota in bags._engine.config.max_rows.items():
        assert tiers[-1].by_table.get(name, {"rows": 0})["rows"] <= quota


PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if pair[0][0] != pair[1][0]]


@pytest.mark.parametrize("pair", PAIRS, ids=[" ".join(map(named, pair)) for pair in PAIRS])
def test_every_pair_of_options(pair: tuple[Option, Option], tmp_path: Path, expected: Any) -> None:
    options = BASE | (ROW_LOG if ("store", "path") in pair else {}) | dict(pair)
    if reason := reason_against(options):
        with pytest.raises(ConfigError, match=reason):
            Collection(TABLES, tiers=tiers_of(options, tmp_path), optimizer=RULE, seed=3)
        assert not (tmp_path / "rows").exists()
        return
    if options.get("max_rows", {}).get("shops") and 0 in (options["hbm_bytes"], options["ddr_bytes"]):
        bags = Collection(TABLES, tiers=tiers_of(options, tmp_path), optimizer=RULE, seed=3)
        with bags, pytest.raises(TierCapacityError, match=f"rows of table 'shops' .* its max_rows is {TIGHT}"):
            train(bags)
        return
    outputs, rows = expected
    with Collection(TABLES, tiers=tiers_of(options, tmp_path), optimizer=RULE, seed=3) as bags:
        found = train(bags, lambda: check_stats(bags))
        assert all(torch.equal(one, other) for one, other in zip(found, outputs, strict=True))
        stored: dict[str, dict[int, bytes]] = {table.name: {} for table in TABLES}
        for name, ids, data in bags.scan():
            stored[name].update(zip(ids.tolist(), map(np.ndarray.tobytes, data), strict=True))
        assert stored == rows
        if "admission" not in options and options["ddr_bytes"] != 300_000:
            assert all(tier.evictions for tier in bags.stats().tiers)

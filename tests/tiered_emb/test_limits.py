"""Limits of gradients: clipped as torch clips, to the bit as the reference, and bounds that are never wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tiered_emb import SGD, ConfigError, Constant, JaggedIds, TableConfig, TierConfig, TieredEmbeddingBagCollection
from tiered_emb.limits import Limits, TableLimits, certainly_finite, clip_reference

TABLES = np.array([1, 2, 3, 4] * 25, np.uint32)
LIMITS = {1: (np.inf, np.inf), 2: (0.5, np.inf), 3: (np.inf, 2.0), 4: (0.7, 1.5)}


def some_limits() -> Limits:
    limits = Limits()
    for number, (value, norm) in LIMITS.items():
        limits.set(number, TableLimits(f"t{number}", value, norm))
    return limits


@pytest.mark.parametrize("dim", [1, 3, 8, 64])
def test_clipped(dim: int) -> None:
    sums = torch.from_numpy(np.random.default_rng(dim).standard_normal((len(TABLES), dim)).astype(np.float32))
    sums[::7] = 0
    found, plain = sums.clone(), sums.clone()
    some_limits().clipped(TABLES, found)
    values, norms = (torch.tensor([LIMITS[int(table)][at] for table in TABLES]) for at in (0, 1))
    clip_reference(plain, values, norms)
    assert torch.equal(found, plain)
    expected = sums.double().clamp(-values[:, None].double(), values[:, None].double())
    lengths = expected.norm(dim=1)
    expected *= torch.where(lengths > norms, norms / lengths, torch.ones_like(lengths))[:, None]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    assert (found.norm(dim=1) <= norms * (1 + 1e-6)).all()


def test_tables_without_limits_are_not_looked_at() -> None:
    limits = Limits()
    limits.set(1, TableLimits("a"))
    assert not limits.clip
    limits.set(2, TableLimits("b", norm=1.0))
    assert limits.clip


@pytest.mark.parametrize(
    ("grad", "weights", "most", "expected"),
    [
        (torch.ones(3, 4), None, 5, True),
        (torch.empty(0, 4), None, 0, True),
        (torch.tensor([[1.0, np.nan]]), None, 1, False),
        (torch.tensor([[1.0, -np.inf]]), None, 1, False),
        (torch.full((2, 2), 1e38), None, 1, True),
        (torch.full((2, 2), 1e38), None, 2, False),
        (torch.full((2, 2), -1e30), torch.tensor([1e9]), 1, False),
        (torch.ones(2, 2), torch.tensor([np.nan]), 1, False),
        (torch.tensor(np.nan).expand(1000, 1000), None, 1, False),
        (torch.tensor(1.0).expand(1000, 1000), None, 10, True),
        (torch.tensor([[1.0, 2.0], [np.nan, 4.0]]).t(), None, 1, False),
        (torch.tensor([1.0, np.inf])[:, None].expand(2, 7), None, 1, False),
    ],
)
def test_certainly_finite(grad: torch.Tensor, weights: torch.Tensor | None, most: int, expected: bool) -> None:
    assert certainly_finite([torch.zeros(1, 1), grad], weights, most) == expected


@pytest.mark.parametrize("option", ["clip_value", "clip_norm"])
def test_a_clip_is_a_tables_own(option: str) -> None:
    """Case 13: two tables in one group, of which one is clipped."""
    configs = [
        TableConfig("a", None, 4, init=Constant(0.0), **{option: 0.5}),  # type: ignore[arg-type]
        TableConfig("b", None, 4, init=Constant(0.0)),
    ]
    with TieredEmbeddingBagCollection(configs, tiers=TierConfig(ddr_bytes=40_000), optimizer=SGD(1.0)) as bags:
        ids = torch.tensor([3, 3])
        out = bags(JaggedIds.from_dict({name: (ids, torch.ones(2, dtype=torch.int64)) for name in "ab"}))
        (out["a"].sum() + out["b"].sum()).backward()  # 2 for each number of row 3
        assert bags.rows("b", torch.tensor([3])).tolist() == [[-2.0] * 4]
        expected = -0.5 if option == "clip_value" else -0.25
        assert bags.rows("a", torch.tensor([3])).tolist() == [[expected] * 4]


@pytest.mark.parametrize("option", [{"clip_value": 0}, {"clip_norm": -1.0}, {"clip_norm": np.inf}, {"clip_value": "1"}])
def test_wrong_limits(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"table 'a': clip_(value|norm) is"):
        TableConfig("a", 5, 4, **option)


def test_wrong_policies() -> None:
    with pytest.raises(ConfigError, match="on_nan is 'ignore'; expected one of error, skip"):
        TableConfig("a", 5, 4, on_nan="ignore")  # type: ignore[arg-type]

"""Gradients that are not finite, found by the device: rows are left out at once, and the host hears of it later.

Without a GPU, an HBM tier in host memory and the rule's kernel in the interpreter stand for one; see `conftest`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiered_emb import SGD, Constant, GradientError, JaggedIds, TableConfig, TierConfig, TieredEmbeddingBagCollection

pytest.importorskip("triton")
from tiered_emb.optim._gpu import LAUNCHES

# The interpreter computes what is masked, with numpy, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAN = float("nan")


@pytest.fixture(autouse=True)
def _device_that_tells_later(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr("tiered_emb.gradients.runs_in_triton", lambda rule, device: True)
        monkeypatch.setattr(SGD, "apply", lambda rule, *arguments: LAUNCHES["sgd"](rule, *arguments))
        monkeypatch.setattr("tiered_emb.group.are_finite", lambda uses: pytest.fail("looked at by the host"))


def bags(device: torch.device, **options: Any) -> TieredEmbeddingBagCollection:
    tables = [
        TableConfig("lenient", 100, 2, init=Constant(1.0), on_nan="skip", **options),
        TableConfig("strict", 100, 2, init=Constant(1.0), **options),
    ]
    tiers = TierConfig(hbm_bytes=1 << 16, ddr_bytes=1 << 20)
    return TieredEmbeddingBagCollection(tables, tiers=tiers, optimizer=SGD(1.0), device=device)


def step(bag: TieredEmbeddingBagCollection, name: str, ids: list[int], factors: list[float]) -> None:
    """One backward pass: the gradient of the row of each id is its factor, in both columns."""
    one_a_bag = torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64)
    out = bag(JaggedIds.from_dict(dict.fromkeys(("lenient", "strict"), one_a_bag)))[name]
    (out * torch.tensor(factors, device=out.device)[:, None]).sum().backward()


def test_rows_are_left_out_and_counted(device: torch.device) -> None:
    with bags(device) as bag:
        step(bag, "lenient", [3, 4, 5], [0.5, NAN, float("inf")])
        assert bag.rows("lenient", torch.tensor([3, 4, 5])).tolist() == [[0.5, 0.5], [1, 1], [1, 1]]
        assert bag.stats().skipped == {"lenient": 2}
        step(bag, "lenient", [4], [0.25])
        assert bag.rows("lenient", torch.tensor([4])).tolist() == [[0.75, 0.75]]
        assert bag.stats().skipped == {"lenient": 2}


def test_a_refused_step_changes_no_row_and_is_raised_later_once(device: torch.device) -> None:
    with bags(device) as bag:
        step(bag, "strict", [3, 4], [0.5, NAN])
        assert bag.rows("strict", torch.tensor([3, 4])).tolist() == [[1, 1], [1, 1]]
        bag.stats()  # waits for what the device has to tell, and keeps it
        with pytest.raises(
            GradientError, match="table 'strict': the gradient of the row of id 4 is not finite; no row"
        ):
            step(bag, "strict", [3], [0.5])
        step(bag, "strict", [3], [0.5])
        assert bag.rows("strict", torch.tensor([3])).tolist() == [[0.5, 0.5]]
        assert bag.stats().skipped == {}


def test_a_flush_waits_for_it(device: torch.device) -> None:
    with bags(device) as bag:
        step(bag, "strict", [4], [NAN])
        with pytest.raises(GradientError, match="id 4"):
            bag.flush()
        bag.flush()


def test_what_is_clipped_by_value_may_be_finite_again(device: torch.device) -> None:
    with bags(device, clip_value=0.5) as bag:
        step(bag, "lenient", [3, 4], [float("inf"), NAN])
        assert bag.rows("lenient", torch.tensor([3, 4])).tolist() == [[0.5, 0.5], [1, 1]]
        assert bag.stats().skipped == {"lenient": 1}

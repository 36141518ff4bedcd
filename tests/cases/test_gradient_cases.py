"""Cases 9 to 12: tables of several dimensions, gradients that are no numbers, accumulation and GradScaler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from storage import HeapStore
from tiered_emb import (
    Adagrad,
    Adam,
    GradientError,
    JaggedIds,
    TableConfig,
    TierConfig,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
)
from tiered_emb.config import OnNaN
from tiered_emb.optim import RULES

SMALL = 40_000  # bytes of host memory: rows move


def test_case_9_tables_of_several_dimensions_are_as_separate_ones() -> None:
    """Dimensions 8, 4 and 6 in one collection, Adam, 20 steps."""
    dims, rng = {"a": 8, "b": 4, "c": 6}, np.random.default_rng(9)
    configs = [TableConfig(name, 500, dim) for name, dim in dims.items()]
    together = TieredEmbeddingBagCollection(configs, tiers=TierConfig(ddr_bytes=SMALL), optimizer=Adam(0.1), seed=1)
    apart = {
        one.name: TieredEmbeddingBagCollection([one], tiers=TierConfig(ddr_bytes=SMALL), optimizer=Adam(0.1), seed=1)
        for one in configs
    }
    for _ in range(20):
        lengths = torch.from_numpy(rng.integers(0, 5, 10))
        ids = {name: torch.from_numpy(rng.integers(0, 500, int(lengths.sum()))) for name in dims}
        out = together(JaggedIds.from_dict({name: (ids[name], lengths) for name in dims}))
        torch.stack([one.square().sum() for one in out.values()]).sum().backward()
        for name, bags in apart.items():
            one = bags(JaggedIds.from_dict({name: (ids[name], lengths)}))[name]
            assert torch.equal(one, out[name])
            one.square().sum().backward()
    everything = torch.arange(500)
    for name, bags in apart.items():
        assert torch.equal(bags.rows(name, everything), together.rows(name, everything))
        bags.close()
    together.close()


def bag(on_nan: OnNaN, rule: Any = None, **more: Any) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(
        None,
        4,
        mode="sum",
        tiers=TierConfig(ddr_bytes=SMALL, store=HeapStore()),
        optimizer=rule or Adagrad(0.1),
        seed=2,
        on_nan=on_nan,
        **more,
    )


def whole_rows(bags: TieredEmbeddingBag) -> dict[int, bytes]:
    """Every stored row with its optimizer state, by id."""
    return {int(id): row.tobytes() for _, ids, rows in bags.scan() for id, row in zip(ids, rows, strict=True)}


BATCH = torch.tensor([[7, 8], [9, 9], [8, 10], [11, 12]])


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_case_10_a_bag_whose_gradient_is_no_number_is_left_out(rule: str, wrong: float) -> None:
    """Rows of that bag stay as they were; every other row has the bits of a run without it."""
    ends = []
    for gradient in (wrong, 0.0):
        with bag("skip", RULES[rule](lr=0.1)) as bags:
            bags(BATCH).square().sum().backward()
            before = whole_rows(bags)
            out = bags(BATCH)
            grad = torch.ones_like(out)
            grad[2, 1] = gradient
            out.backward(grad)
            ends.append(whole_rows(bags))
            assert bags.stats().skipped == ({} if gradient == 0 else {"embedding": 2})
    assert {id for id in before if ends[0][id] == before[id]} == {8, 10}
    assert all(ends[0][id] == ends[1][id] for id in (7, 9, 11, 12))
    assert all(np.isfinite(np.frombuffer(row, np.float32)).all() for row in ends[0].values())


@pytest.mark.parametrize("update", ["backward", "step"])
def test_case_10_or_refused_before_any_row_changes(update: Any) -> None:
    with bag("error", update=update) as bags:
        bags(BATCH).square().sum().backward()
        bags.optimizer.step()
        before = whole_rows(bags)
        out = bags(BATCH)
        grad = torch.ones_like(out)
        grad[1, 0] = np.nan
        if update == "step":
            out.backward(grad)
        with pytest.raises(GradientError, match=r"table 'embedding': the gradient of the row of id 9 is not finite;"):
            out.backward(grad) if update == "backward" else bags.optimizer.step()
        assert whole_rows(bags) == before and bags.steps == 1
        bags(BATCH).square().sum().backward()  # and training can go on
        bags.optimizer.step()
        assert bags.steps == 2


def test_case_10_in_one_table_of_several() -> None:
    """What is wrong in the last table keeps the first from changing too, though their rows are of several groups."""
    configs = [TableConfig("a", None, 4), TableConfig("b", None, 8), TableConfig("c", None, 4, mode="mean")]
    with TieredEmbeddingBagCollection(configs, tiers=TierConfig(ddr_bytes=4 * SMALL), seed=0) as bags:
        batch = JaggedIds.from_dict({name: (torch.arange(6), torch.full((3,), 2)) for name in "abc"})
        before = {name: bags.rows(name, torch.arange(6)) for name in "abc"}
        out = bags(batch)
        grads = [torch.ones_like(one) for one in out.values()]
        grads[2][1, 1] = -np.inf
        with pytest.raises(
            GradientError, match=r"table 'c': the gradient of the row of id 2 .* nor are those of 1 others"
        ):
            torch.autograd.backward(list(out.values()), grads)
        assert all(torch.equal(bags.rows(name, torch.arange(6)), before[name]) for name in "abc")


def test_case_10_a_sum_that_overflows_is_no_number_either() -> None:
    for on_nan in ("error", "skip"):
        with bag(on_nan) as bags:  # type: ignore[arg-type]
            out = bags(BATCH)
            grad = torch.ones_like(out)
            grad[1] = 3e38  # of a bag that has row 9 twice
            if on_nan == "error":
                with pytest.raises(GradientError, match="id 9"):
                    out.backward(grad)
            else:
                out.backward(grad)
                assert bags.stats().skipped == {"embedding": 1} and 9 not in whole_rows(bags).keys() - {9}


def test_case_11_two_micro_batches_are_one_double_batch() -> None:
    rows = []
    for parts in ([BATCH], [BATCH[:2], BATCH[2:]]):
        with bag("error", update="step") as bags:
            for _ in range(5):
                for part in parts:
                    bags(part).square().sum().backward()
                bags.optimizer.step()
                bags.optimizer.zero_grad()
            rows.append(whole_rows(bags))
            assert bags.steps == 5
    assert rows[0] == rows[1]


def test_case_11_with_a_grad_scaler_the_update_sees_unscaled_gradients() -> None:
    ends = []
    for scale in (None, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        with bag("error", update="step") as bags:
            for _ in range(5):
                for part in (BATCH[:2], BATCH[2:]):
                    scaler.scale(bags(part).square().sum()).backward()
                scaler.step(bags.optimizer)
                scaler.update()
                bags.optimizer.zero_grad()
            ends.append(whole_rows(bags))
    assert ends[0] == ends[1]


def test_case_11_a_step_that_overflows_changes_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with bag("error", update="step") as bags:
        bags(BATCH).square().sum().backward()
        bags.optimizer.step()
        before = whole_rows(bags)
        scaler.scale((bags(BATCH) * 1e35).sum()).backward()
        scaler.step(bags.optimizer)
        scaler.update()
        bags.optimizer.zero_grad()
        assert whole_rows(bags) == before and bags.steps == 1 and scaler.get_scale() == 2.0**15
        scaler.scale(bags(BATCH).square().sum()).backward()
        scaler.unscale_(bags.optimizer)
        scaler.step(bags.optimizer)
        scaler.update()
        assert bags.steps == 2 and whole_rows(bags) != before


def test_case_11_a_grad_scaler_and_updates_in_the_backward_pass_are_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    with bag("error") as bags:
        scaler.scale(bags(BATCH).sum()).backward()
        with pytest.raises(ValueError, match="make the module with update='step'"):
            scaler.step(bags.optimizer)

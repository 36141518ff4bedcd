"""Gradients and updates: case 8, and when rows change, how often, and what a pin is worth."""

from __future__ import annotations

import gc

import pytest
import torch

from tiered_emb import (
    SGD,
    Adam,
    ConfigError,
    ModuleClosedError,
    PlanReleasedError,
    RowwiseAdagrad,
    TierCapacityError,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
)

HOST = TierConfig(0, "64KiB")
HBM_OF_10 = TierConfig(10 * 4 * 4, 0)  # ten rows of four floats


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def make(tiers: TierConfig = HOST, update: str = "backward") -> TieredEmbeddingBag:
    return TieredEmbeddingBag(
        None,
        4,
        mode="sum",
        tiers=tiers,
        optimizer=SGD(1.0),
        seed=1,
        update=update,  # type: ignore[arg-type]
    )


def pinned(bag: TieredEmbeddingBag) -> int:
    bag._lookup.group.release_dropped()
    return bag._lookup.group.top.directory.pinned_rows


@pytest.mark.parametrize("tiers", [TierConfig(0, "64KiB"), TierConfig("4KiB", "64KiB"), TierConfig("4KiB", 0)])
def test_case_08_repeated_ids_fall_by_the_sum(tiers: TierConfig) -> None:
    with make(tiers) as bag:
        before, grads = bag.rows(ids_of(7, 9)), torch.randn(3, 4)
        bag(ids_of(7, 7, 9), ids_of(0, 1, 2)).backward(grads)
        assert torch.equal(
            bag.rows(ids_of(7, 9)), torch.stack([before[0] - (grads[0] + grads[1]), before[1] - grads[2]])
        )


@pytest.mark.parametrize("update", ["backward", "step"])
def test_case_08_a_table_used_twice_is_updated_once(update: str) -> None:
    with make(update=update) as bag:
        before = bag.rows(ids_of(1, 2, 3))
        weights = torch.tensor([0.5, 2.0], requires_grad=True)
        out = bag(ids_of(1, 2), ids_of(0)) @ torch.ones(4)
        again = bag(ids_of(2, 3), ids_of(0), weights) @ torch.ones(4)
        (out.sum() + 3 * again.sum()).backward()
        assert weights.grad is not None
        torch.testing.assert_close(weights.grad, 3 * before[1:].sum(1))  # from the rows before the update
        if update == "step":
            assert torch.equal(bag.rows(ids_of(1, 2, 3)), before)
            bag.optimizer.step()
        assert torch.equal(bag.rows(ids_of(1, 2, 3)), before - torch.tensor([[1.0], [1.0 + 1.5], [6.0]]))
        assert pinned(bag) == 0


def test_weights_gradient_outside_training() -> None:
    with make() as bag:
        bag.eval()
        weights = torch.tensor([0.5, 2.0], requires_grad=True)
        bag(ids_of(2, 3), ids_of(0), weights).sum().backward()
        torch.testing.assert_close(weights.grad, bag.rows(ids_of(2, 3)).sum(1))


def test_steps_accumulate_in_forward_order() -> None:
    """Two micro-batches with "step" are one batch twice as long."""
    with make(update="step") as bag, make() as other:
        grads = torch.randn(4, 4)
        for part in (slice(0, 2), slice(2, 4)):
            bag(ids_of(5, 6, 5, 5)[part].unsqueeze(1)).backward(grads[part])
        assert pinned(bag) > 0
        bag.optimizer.step()
        other(ids_of(5, 6, 5, 5).unsqueeze(1)).backward(grads)
        assert torch.equal(bag.rows(ids_of(5, 6)), other.rows(ids_of(5, 6)))
        bag(ids_of(5).unsqueeze(1)).sum().backward()
        before = bag.rows(ids_of(5))
        bag.optimizer.zero_grad()
        bag.optimizer.step()
        assert torch.equal(bag.rows(ids_of(5)), before)
        assert pinned(bag) == 0


def test_a_second_backward_is_refused() -> None:
    with make() as bag:
        out = bag(ids_of(1, 2), ids_of(0)).sum()
        out.backward(retain_graph=True)
        after = bag.rows(ids_of(1, 2))
        with pytest.raises(PlanReleasedError, match="embedding"):
            out.backward()
        assert torch.equal(bag.rows(ids_of(1, 2)), after)


def test_pins_end_with_the_graph_whatever_becomes_of_it() -> None:
    """Forwards without a backward, in eval, under no_grad, with failing backwards: no pin stays, new ids come in."""
    with make(HBM_OF_10) as bag:
        for step in range(100):
            ids = torch.arange(step * 8, step * 8 + 8).unsqueeze(1)
            kind = step % 5
            if kind == 0:
                bag(ids)
            elif kind == 1:
                bag(ids).sum().backward()
            elif kind == 2:
                bag.eval()(ids)
                bag.train()
            elif kind == 3:
                with torch.no_grad():
                    bag(ids)
            else:
                out = bag(ids)
                bad = out.sum() * torch.ones((), requires_grad=True)
                bad.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    bad.backward()
                del out, bad
                gc.collect()
            assert pinned(bag) == 0, step


def test_a_backward_that_fails_half_way_leaves_nothing() -> None:
    with make() as bag, make() as other:
        first, second = bag(ids_of(1).unsqueeze(1)), other(ids_of(1).unsqueeze(1)).clone()
        second.register_hook(lambda grad: 1 / 0)  # runs after the first bag's gradient was recorded, or before
        before = bag.rows(ids_of(1)), other.rows(ids_of(1))
        with pytest.raises(ZeroDivisionError):
            (first.sum() + second.sum()).backward()
        del first, second
        bag(ids_of(2).unsqueeze(1)).sum().backward()
        assert torch.equal(bag.rows(ids_of(1)), before[0])
        assert torch.equal(other.rows(ids_of(1)), before[1])
        assert pinned(bag) == 0


def test_pinned_rows_stay_and_a_batch_beside_them_says_what_it_needs() -> None:
    with make(HBM_OF_10) as bag:
        first = bag(torch.arange(6).unsqueeze(1))
        expected = first.detach().clone()
        with pytest.raises(TierCapacityError, match=r"6 distinct rows.*192 bytes"):
            bag(torch.arange(100, 106).unsqueeze(1))
        bag(torch.arange(100, 104).unsqueeze(1))
        assert torch.equal(bag(torch.arange(6).unsqueeze(1)), expected)
        first.sum().backward()
        assert torch.equal(bag.rows(torch.arange(6)), expected - 1)


def test_outputs_may_be_changed_in_place() -> None:
    with make() as bag:
        before = bag.rows(ids_of(1))
        torch.relu_(bag(ids_of(1).unsqueeze(1))).sum().backward()
        assert torch.equal(bag.rows(ids_of(1)), before - (before > 0).float())


def test_embedding_takes_any_shape_and_its_padding_stays() -> None:
    with TieredEmbedding(10, 4, padding_idx=-1, tiers=TierConfig(0, "64KiB"), optimizer=SGD(1.0), seed=1) as embedding:
        ids = torch.tensor([[1, 9, 2], [9, 9, 1]])
        before = embedding.rows(torch.arange(10))
        out = embedding(ids)
        assert out.shape == (2, 3, 4)
        assert torch.equal(out[0, 0], before[1])
        assert not out[ids == 9].any()
        out.sum().backward()
        after = embedding.rows(torch.arange(10))
        assert torch.equal(after[[1, 2, 9]], before[[1, 2, 9]] - torch.tensor([[2.0], [1.0], [0.0]]))


def test_the_learning_rate_can_be_scheduled() -> None:
    with make() as bag:
        before = bag.rows(ids_of(1))
        bag.optimizer.param_groups[0]["lr"] = 0.5
        bag(ids_of(1).unsqueeze(1)).sum().backward()
        assert torch.equal(bag.rows(ids_of(1)), before - 0.5)


def test_adam_counts_its_steps_over_restarts(tmp_path: object) -> None:
    def run(restart: bool) -> torch.Tensor:
        tiers = TierConfig(0, "1MiB", f"{tmp_path}/{restart}")
        bag = TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=Adam(0.1), seed=1)
        for step in range(6):
            bag(ids_of(1, step).unsqueeze(1)).square().sum().backward()
            if restart and step == 2:
                bag.close()
                bag = TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=Adam(0.1), seed=1)
        with bag:
            return bag.rows(torch.arange(6))

    assert torch.equal(run(True), run(False))


def test_modules_of_one_path_share_a_store_and_a_budget(tmp_path: object) -> None:
    tiers = TierConfig(0, "1MiB", f"{tmp_path}/rows")
    with (
        TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=1, name="one") as one,
        TieredEmbeddingBag(None, 8, mode="sum", tiers=tiers, optimizer=RowwiseAdagrad(1.0), seed=1, name="two") as two,
    ):
        for _ in range(3):
            (one(torch.arange(500).unsqueeze(1)).sum() + two(torch.arange(500).unsqueeze(1)).sum()).backward()
        (tier,) = one.stats().tiers
        assert one.stats() == two.stats()
        assert tier.peak_bytes <= tier.capacity_bytes == 1 << 20
        assert set(tier.by_table) == {"one", "two"}
        with pytest.raises(ConfigError, match="table 'one' is already used"):
            TieredEmbeddingBag(None, 4, tiers=tiers, name="one")
        with pytest.raises(ConfigError, match="share its budgets"):
            TieredEmbeddingBag(None, 4, tiers=TierConfig(0, "2MiB", f"{tmp_path}/rows"), name="three")
        rows = one.rows(torch.arange(500))
        one.close()
        with pytest.raises(ModuleClosedError):
            one.rows(ids_of(1))
        with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=1, name="one") as again:
            assert torch.equal(again.rows(torch.arange(500)), rows)
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=1, name="one") as again:
        assert torch.equal(again.rows(torch.arange(500)), rows)


def test_gradients_with_a_negative_bit_are_what_they_say() -> None:
    """torch negates a conjugate's imaginary part when it is read, not before."""
    with make() as bag:
        before = bag.rows(ids_of(1, 2))
        out = bag(ids_of(1, 2), ids_of(0, 1))
        torch.complex(torch.zeros_like(out), out).conj().imag.sum().backward()
        assert torch.equal(bag.rows(ids_of(1, 2)), before + 1)


def test_gradients_kept_until_step_are_not_the_callers_memory() -> None:
    with make(update="step") as bag:
        before, grad = bag.rows(ids_of(1)), torch.ones(1, 4)
        for factor in (1.0, 2.0):
            grad.fill_(factor)
            bag(ids_of(1), ids_of(0)).backward(grad)
        bag.optimizer.step()
        assert torch.equal(bag.rows(ids_of(1)), before - 3)


def test_a_pass_within_a_pass_over_the_same_forward_is_refused() -> None:
    """The inner one updates and releases its rows, and other batches may have what it was planned with."""
    with make() as bag:
        before = bag.rows(torch.arange(60))
        out = bag(ids_of(1, 2), ids_of(0, 1))

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):  # type: ignore[no-untyped-def]
                return x.clone()

            @staticmethod
            def backward(ctx, grad):  # type: ignore[no-untyped-def]
                with torch.enable_grad():
                    out.sum().backward(retain_graph=True)
                    for first in (50, 40):
                        bag(ids_of(first, first + 1), ids_of(0, 1))
                return grad

        leaf = torch.zeros(1, requires_grad=True)
        with pytest.raises(PlanReleasedError):
            (out.sum() + Inner.apply(leaf).sum()).backward()
        changed = (bag.rows(torch.arange(60)) != before).any(1).nonzero().flatten().tolist()
        assert changed == [1, 2]

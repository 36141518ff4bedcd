"""The modules beside torch.nn's own, and in the corners of autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiered_emb import (
    SGD,
    Adam,
    JaggedIds,
    ModuleClosedError,
    RowwiseAdagrad,
    TableConfig,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
)

TIERS = [TierConfig(0, "128KiB"), TierConfig(200 * 4 * 3, "128KiB"), TierConfig(60 * 4 * 3, 0)]
D = 3


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def make(**options: Any) -> TieredEmbeddingBag:
    settings = {"mode": "sum", "tiers": TIERS[0], "optimizer": SGD(1.0), "seed": 1} | options
    return TieredEmbeddingBag(None, 4, **settings)


def pinned(bag: TieredEmbeddingBag) -> int:
    bag._lookup.group.release_dropped()
    return bag._lookup.group.top.directory.pinned_rows


def bags_of(rng: np.random.Generator, rows: int, last: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids and offsets as EmbeddingBag takes them: of one dimension or two, int32 or int64, contiguous or not."""
    dtype = torch.int64 if rng.random() < 0.5 else torch.int32
    if rng.random() < 0.4:
        size, length = int(rng.integers(0, 6)), int(rng.integers(1, 5))
        return torch.from_numpy(rng.integers(0, rows, (length, size))).to(dtype).t(), None
    total, size = int(rng.integers(0, 20)), int(rng.integers(1, 7))
    offsets = np.sort(rng.integers(0, total + 1, size))
    offsets[0] = 0
    ids = torch.from_numpy(rng.integers(0, rows, 2 * total)).to(dtype)[::2]
    return ids, torch.from_numpy(np.append(offsets, total) if last else offsets).to(dtype)


def weights_of(rng: np.random.Generator, like: torch.Tensor) -> torch.Tensor:
    """Per-sample weights whose memory does not lie in their order."""
    weights = torch.from_numpy(rng.standard_normal(like.shape[::-1]).astype(np.float32))
    return weights.t() if like.ndim == 2 else weights


@pytest.mark.parametrize("seed", range(40))
def test_bags_beside_torch(seed: int) -> None:
    """Outputs, gradients of weights and rows after a step, of two forwards summed in one loss."""
    rng = np.random.default_rng(seed)
    rows, mode, last = int(rng.integers(1, 30)), ["sum", "mean", "max"][seed % 3], bool(rng.random() < 0.4)
    padding = None if rng.random() < 0.5 else int(rng.integers(-rows, rows))
    start = torch.from_numpy(rng.standard_normal((rows, D)).astype(np.float32))
    same: dict[str, Any] = {"mode": mode, "include_last_offset": last, "padding_idx": padding}
    theirs = nn.EmbeddingBag(rows, D, _weight=start.clone(), **same)
    update = ["backward", "step"][seed % 2]
    ours = TieredEmbeddingBag(
        rows,
        D,
        _weight=start,
        tiers=TIERS[seed % 3],
        optimizer=SGD(0.5),
        update=update,  # type: ignore[arg-type]
        **same,
    )
    loss: list[Any] = [0.0, 0.0]
    for _ in range(2):
        ids, offsets = bags_of(rng, rows, last)
        weights = weights_of(rng, ids) if mode == "sum" and rng.random() < 0.5 else None
        pair = [None if weights is None else weights.clone().requires_grad_() for _ in range(2)]
        outs = [bag(ids, offsets, weight) for bag, weight in zip((theirs, ours), pair, strict=True)]
        torch.testing.assert_close(outs[1], outs[0])
        grad = torch.from_numpy(rng.standard_normal(outs[0].shape).astype(np.float32))
        loss = [sum_ + (torch.relu_(out) * grad).sum() for sum_, out in zip(loss, outs, strict=True)]
    for part in loss:
        part.backward()
    torch.optim.SGD(theirs.parameters(), lr=0.5).step()
    if update == "step":
        ours.optimizer.step()
    if pair[0] is not None and pair[1] is not None:
        torch.testing.assert_close(pair[1].grad, pair[0].grad)
    torch.testing.assert_close(ours.rows(torch.arange(rows)), theirs.weight.detach())
    del loss, part, outs
    assert pinned(ours) == 0
    ours.close()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (0, 3), (2, 0), (2, 3, 2)])
@pytest.mark.parametrize("padding", [None, -2])
def test_embedding_beside_torch(shape: tuple[int, ...], padding: int | None) -> None:
    start = torch.randn(9, D)
    if padding is not None:
        start[padding] = 0
    theirs = nn.Embedding(9, D, padding, _weight=start.clone())
    ids = torch.from_numpy(np.array(np.random.default_rng(1).integers(0, 9, shape)))
    with TieredEmbedding(9, D, padding, _weight=start, tiers=TIERS[1], optimizer=SGD(0.5)) as ours:
        outs = [theirs(ids), ours(ids)]
        assert torch.equal(outs[0], outs[1])
        for out in outs:
            out.square().sum().backward()
        torch.optim.SGD(theirs.parameters(), lr=0.5).step()
        torch.testing.assert_close(ours.rows(torch.arange(9)), theirs.weight.detach())


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_a_pass_that_asks_for_other_gradients_trains_no_row(way: str) -> None:
    with make() as bag:
        before, weights = bag.rows(ids_of(1, 2)), torch.ones(2, requires_grad=True)
        out = bag(ids_of(1, 2), ids_of(0), weights).sum()
        if way == "grad":
            (grad,) = torch.autograd.grad(out, [weights])
            torch.testing.assert_close(grad, before.sum(1))
        else:
            out.backward(inputs=[weights])
        assert torch.equal(bag.rows(ids_of(1, 2)), before)
        del out
        assert pinned(bag) == 0


def test_a_graph_of_the_gradients_may_be_made() -> None:
    with make() as bag:
        before, weights = bag.rows(ids_of(1)), torch.ones(1, requires_grad=True)
        out = bag(ids_of(1), ids_of(0), weights)
        (grad,) = torch.autograd.grad((out * weights).sum(), [weights], create_graph=True)
        torch.testing.assert_close(grad.detach(), 2 * before.sum(1))
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_backward_passes_may_be_nested() -> None:
    """What the outer pass recorded before a checkpointed part ran its own is not lost."""
    with make() as bag:
        before = bag.rows(ids_of(1, 2, 3))
        first, one = bag(ids_of(1), ids_of(0)), torch.ones(1, 4, requires_grad=True)
        inner = checkpoint(lambda x: bag(ids_of(2), ids_of(0)) * x, one, use_reentrant=True)
        last = bag(ids_of(3), ids_of(0))
        (first + inner + last).sum().backward()
        assert torch.equal(bag.rows(ids_of(1, 2, 3)), before - 1)
        assert pinned(bag) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_backward_after_close_is_refused(tmp_path: object, shared: bool) -> None:
    tiers = TierConfig(0, "1MiB", f"{tmp_path}/rows")
    other = make(tiers=tiers, name="other") if shared else None
    bag = make(tiers=tiers, name="t")
    before, out = bag.rows(ids_of(1)), bag(ids_of(1), ids_of(0)).sum()
    bag.close()
    with pytest.raises(ModuleClosedError, match="t: a backward pass reached a forward of a module that was closed"):
        out.backward()
    if other is not None:
        other.close()
    with make(tiers=tiers, name="t") as bag:
        assert torch.equal(bag.rows(ids_of(1)), before)


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.usefixtures("double")
def test_rows_are_float32_whatever_the_default(mode: str) -> None:
    with make(mode=mode, optimizer=Adam(0.1)) as bag:
        before = bag.rows(ids_of(1, 2))
        weights = torch.ones(2, dtype=torch.float32, requires_grad=True) if mode == "sum" else None
        (bag(ids_of(1, 2), ids_of(0), weights).sum() + bag(ids_of(1, 2), ids_of(0)).sum()).backward()
        after = bag.rows(ids_of(1, 2))
        assert before.dtype == after.dtype == torch.float32
        assert (after <= before).all() and (after < before).any()


def test_rows_are_on_the_host_whatever_the_default() -> None:
    ids, ends = ids_of(1, 2), ids_of(0, 1)
    with torch.device("meta"), make(optimizer=RowwiseAdagrad(0.1)) as bag:
        before = bag.rows(ids)
        bag(ids, ends).sum().backward()
        assert bag.rows(ids).device.type == "cpu"
        assert not torch.equal(bag.rows(ids), before)


def test_failed_passes_do_not_keep_rows_from_later_forwards() -> None:
    """Autograd keeps what a failed pass had still to do, with the rows it pins, until the next pass; the next forward
    must fit all the same."""
    tables = [TableConfig("a", None, 4), TableConfig("b", None, 4, mode="mean")]
    hbm = TierConfig(30 * 4 * 4, 0)  # room for the rows of one step
    with TieredEmbeddingBagCollection(tables, tiers=hbm, optimizer=SGD(1.0), seed=1) as bags:
        for step in range(20):
            part = (torch.arange(step * 10, step * 10 + 10), ids_of(10))
            outs = bags(JaggedIds.from_dict({"a": part, "b": part}))
            if step % 3 == 1:
                outs["ab"[step % 2]].register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    (outs["a"].sum() + outs["b"].sum()).backward()
            else:
                (outs["a"].sum() + outs["b"].sum()).backward()
            del outs

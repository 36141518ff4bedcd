from __future__ import annotations

import itertools

import torch

from tiered_emb.reference.dlrm import DLRM, Shape

SHAPE = Shape(features=("a", "b", "c"), dense_width=5, dim=4, bottom=(7,), top=(6,))


def test_forward_is_the_papers() -> None:
    model = DLRM(SHAPE, seed=1)
    dense, pooled = torch.randn(2, 5), {name: torch.randn(2, 4) for name in "cab"}
    logits = model(dense, pooled)
    for sample in range(2):
        number = model.bottom(dense[sample])
        vectors = [number, *(pooled[name][sample] for name in "abc")]
        products = [vectors[i] @ vectors[j] for i, j in itertools.product(range(4), repeat=2) if j < i]
        expected = model.top(torch.cat([number, torch.stack(products)]))[0]
        torch.testing.assert_close(logits[sample], expected)


def test_numbers_follow_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    one, other = DLRM(SHAPE, seed=3), DLRM(SHAPE, seed=4)
    torch.manual_seed(2)
    again = DLRM(SHAPE, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_every_pooled_row_gets_a_gradient() -> None:
    pooled = {name: torch.randn(8, 4, requires_grad=True) for name in "abc"}
    DLRM(SHAPE, seed=0)(torch.randn(8, 5), pooled).sum().backward()
    assert all(bool(rows.grad.abs().sum() > 0) for rows in pooled.values())

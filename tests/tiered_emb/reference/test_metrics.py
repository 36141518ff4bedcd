from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered_emb.reference.metrics import auc, log_loss

SCORED = st.lists(st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), st.booleans()), min_size=1, max_size=40)


@given(SCORED)
def test_auc_is_the_share_of_pairs_in_order_ties_counting_half(scored: list[tuple[float, bool]]) -> None:
    scores, labels = np.array([s for s, _ in scored]), np.array([float(y) for _, y in scored])
    pairs = [(s > t) + 0.5 * (s == t) for s, y in scored for t, z in scored if y and not z]
    if pairs:
        assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    else:
        assert math.isnan(auc(scores, labels))


def test_log_loss_is_torchs() -> None:
    logits = torch.tensor([-3.0, 0.0, 0.5, 80.0, -80.0])
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert log_loss(logits.numpy(), labels.numpy()) == pytest.approx(float(expected))
    assert math.isnan(log_loss(np.empty(0), np.empty(0)))

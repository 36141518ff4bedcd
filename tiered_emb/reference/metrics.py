"""How well predicted clicks fit the clicks that came: area under the ROC curve and log loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def auc(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """Probability that a click scores above a non-click, ties counting half; NaN where one of the two is missing.

    ``scores`` and ``labels`` are (N,). By the rank sum of Mann and Whitney (1947), ties taking their mean rank.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(counts) - (counts - 1) / 2
    clicks = labels == 1
    num_clicks, num_others = int(clicks.sum()), int((~clicks).sum())
    if num_clicks == 0 or num_others == 0:
        return float("nan")
    rank_sum = float(mean_ranks[inverse[clicks]].sum())
    return (rank_sum - num_clicks * (num_clicks + 1) / 2) / (num_clicks * num_others)


def log_loss(logits: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """Mean of -log(probability given to what happened), in nats, from logits (N,) in float64; NaN without samples."""
    if len(logits) == 0:
        return float("nan")
    signed = np.where(labels == 1, logits, -logits).astype(np.float64)
    return float(np.logaddexp(0.0, -signed).mean())

"""One step of training, and the pass over what was held out.

The rows update themselves at the end of the backward pass (their rule is the bags'); the MLPs have an Adam of their
own. Samples come in time order and are not shuffled, as clicks would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

from tiered_emb.errors import GradientError, TieredEmbError
from tiered_emb.reference.dlrm import DLRM, Bags, Pooled, Shape
from tiered_emb.reference.metrics import auc, log_loss
from tiered_emb.reference.stream import ClickBatch

DENSE_LR = 3e-3


class DivergedError(TieredEmbError):
    """A loss is no finite number any more; nothing that follows would be one."""


def check_finite(loss: float, what: str, lr: float) -> float:
    """``loss``. Raises DivergedError, which says ``what`` it is, where it is infinite or NaN."""
    if not math.isfinite(loss):
        raise DivergedError(f"training diverged: {what} is {loss}; a smaller --lr than {lr:g} may help")
    return loss


def learn(learner: Learner, loss: torch.Tensor, step: str, lr: float) -> None:
    """`Learner.learn`. Raises DivergedError, with no row changed, where the gradient of a row is no finite number."""
    try:
        learner.learn(loss)
    except GradientError as error:
        raise DivergedError(
            f"training diverged: a gradient of {step} is not finite; a smaller --lr than {lr:g} may help"
        ) from error


class Learner:
    """The dense part of the model and its optimizer; both follow from ``seed``."""

    def __init__(self, shape: Shape, seed: int, device: torch.device) -> None:
        self.device = device
        self.model = DLRM(shape, seed).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), DENSE_LR)

    def logits(self, batch: ClickBatch, pooled: Pooled) -> torch.Tensor:
        """(B,) log odds of a click."""
        return self.model(batch.dense.to(self.device), pooled)  # type: ignore[no-any-return]

    def loss(self, batch: ClickBatch, pooled: Pooled) -> torch.Tensor:
        """Mean binary cross entropy of a batch."""
        return binary_cross_entropy_with_logits(self.logits(batch, pooled), batch.labels.to(self.device))

    def learn(self, loss: torch.Tensor) -> None:
        """Backward pass, in which the rows are updated, then the step of the MLPs."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


@dataclass(frozen=True)
class Evaluation:
    """Quality on held-out samples; ``planted_auc`` is that of the true probabilities, where they are known."""

    auc: float
    log_loss: float
    planted_auc: float | None


def evaluate(learner: Learner, bags: Bags, batches: Iterable[ClickBatch]) -> Evaluation:
    """Predict ``batches`` without a trace in the rows. One float a sample is kept."""
    logits, labels, planted = [], [], []
    with torch.no_grad():
        for batch in batches:
            logits.append(learner.logits(batch, bags(batch.sparse)).cpu().numpy())
            labels.append(batch.labels.numpy())
            if batch.planted is not None:
                planted.append(batch.planted)
    clicks = np.concatenate(labels)
    scores = np.concatenate(logits)
    best = auc(np.concatenate(planted), clicks) if planted else None
    return Evaluation(auc(scores, clicks), log_loss(scores, clicks), best)


def fingerprints(pooled: Pooled, features: tuple[str, ...]) -> NDArray[np.uint32]:
    """32 bits (C, B) of every pooled row: enough to say where two runs first differ, without keeping the rows."""
    rows = torch.stack([pooled[name] for name in features]).detach().cpu().numpy()
    factors = np.arange(1, 2 * rows.shape[2], 2, dtype=np.uint32) * np.uint32(0x9E3779B1)
    bits: NDArray[np.uint32] = (rows.view(np.uint32) * factors).sum(axis=2, dtype=np.uint32)
    return bits

"""What a data set offers to the training loop: batches of clicks in time order, the last tenth held out.

A stream knows its length before the first batch, is read front to back as often as asked, and holds a bounded part of
itself in memory. Readers of one id a column fill :class:`Columns` in blocks of whatever size suits them;
:func:`rebatch` cuts those into batches, so that the size of a block never shows in a batch.

Shapes: B samples of a batch, I dense numbers, C columns of ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_emb.config import Mode
from tiered_emb.errors import DataError
from tiered_emb.plan import JaggedIds
from tiered_emb.reference.words import counted


class Part(Enum):
    """Which samples: the first nine tenths to train on, or the last tenth, held out."""

    TRAIN = "train"
    HELD_OUT = "held out"


@dataclass(frozen=True)
class Feature:
    """A feature with a table of its own name.

    Attributes:
        name: of the feature and of its table.
        num_embeddings: ids are 0 .. num_embeddings-1; None = any 64-bit integer.
        mode: how a bag's rows become one.
    """

    name: str
    num_embeddings: int | None = None
    mode: Mode = "sum"


@dataclass(frozen=True, eq=False)
class ClickBatch:
    """B samples.

    Attributes:
        labels: (B,) float32, 1 = click.
        dense: (B, I) float32.
        sparse: ids of every feature.
        planted: (B,) float64 true click probabilities where the data is made up, else None.
    """

    labels: torch.Tensor
    dense: torch.Tensor
    sparse: JaggedIds
    planted: NDArray[np.float64] | None = None


class ClickStream(Protocol):
    """A data set, read as often as asked, always in the same order."""

    @property
    def name(self) -> str:
        """For messages and reports."""

    @property
    def features(self) -> tuple[Feature, ...]:
        """In the order of the model's interactions."""

    @property
    def dense_width(self) -> int:
        """I, 1 or more."""

    def samples(self, part: Part) -> int:
        """How many samples a part has."""

    def batches(self, part: Part, batch_size: int) -> Iterator[ClickBatch]:
        """A part in time order; only the last batch may be smaller. DataError where data is not as expected."""


def held_out_samples(samples: int, source: str) -> int:
    """A tenth of ``samples``, one at least. Raises DataError where nothing would be left to train on."""
    if samples < 2:
        raise DataError(f"{source} has {counted(samples, 'sample')}; training needs at least 2, one of them to test on")
    return max(1, samples // 10)


@dataclass(frozen=True, eq=False)
class Columns:
    """Samples with at most one id a column.

    Attributes:
        labels: (B,) float32.
        dense: (B, I) float32.
        ids: (B, C) int64; what stands where nothing is present plays no part.
        present: (B, C) bool; False = an empty bag.
        planted: (B,) float64 or None, as in :class:`ClickBatch`.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    present: NDArray[np.bool_]
    planted: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, first: int, stop: int) -> Columns:
        """Samples first .. stop-1."""
        planted = None if self.planted is None else self.planted[first:stop]
        rows = slice(first, stop)
        return Columns(self.labels[rows], self.dense[rows], self.ids[rows], self.present[rows], planted)

    def followed_by(self, other: Columns) -> Columns:
        """Both, one after the other."""
        planted = None
        if self.planted is not None and other.planted is not None:
            planted = np.concatenate([self.planted, other.planted])
        return Columns(
            np.concatenate([self.labels, other.labels]),
            np.concatenate([self.dense, other.dense]),
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.present, other.present]),
            planted,
        )

    def batch(self, features: tuple[str, ...]) -> ClickBatch:
        """The same samples as the model takes them: ids feature by feature."""
        present = np.ascontiguousarray(self.present.T)
        ids = np.ascontiguousarray(self.ids.T)[present]
        offsets = np.zeros(present.size + 1, np.int64)
        np.cumsum(present.reshape(-1), out=offsets[1:])
        sparse = JaggedIds(features, torch.from_numpy(ids), torch.from_numpy(offsets))
        labels = torch.from_numpy(np.ascontiguousarray(self.labels))
        return ClickBatch(labels, torch.from_numpy(np.ascontiguousarray(self.dense)), sparse, self.planted)


def rebatch(blocks: Iterable[Columns], batch_size: int) -> Iterator[Columns]:
    """The samples of ``blocks`` in pieces of ``batch_size``; the last may be smaller."""
    rest: Columns | None = None
    for block in blocks:
        held = block if rest is None else rest.followed_by(block)
        whole = len(held) - len(held) % batch_size
        for first in range(0, whole, batch_size):
            yield held.part(first, first + batch_size)
        rest = held.part(whole, len(held)) if whole < len(held) else None
    if rest is not None:
        yield rest

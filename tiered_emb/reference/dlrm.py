"""DLRM: the click model of Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems" (2019).

A bottom MLP turns the dense numbers of a sample into a vector of dimension D. It and the C pooled embeddings meet in
dot products of every pair; those and the dense vector go through a top MLP, whose one output is the logit of a click.
The embeddings come from any `bags` object that is called as `TieredEmbeddingBagCollection` is; it keeps and updates
its rows itself, so they are not among the parameters here.

Shapes: B samples, I dense numbers, C features, D dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn

from tiered_emb.plan import JaggedIds

Pooled = dict[str, torch.Tensor]


class Bags(Protocol):
    """Embedding tables of all features."""

    def __call__(self, batch: JaggedIds, /) -> Pooled:
        """Feature -> pooled rows (B, D), with a backward pass that updates the rows."""


@dataclass(frozen=True)
class Shape:
    """What fixes the size of a DLRM.

    Attributes:
        features: C names, in the order of the interactions.
        dense_width: I.
        dim: D.
        bottom: widths of the bottom MLP between I and D.
        top: widths of the top MLP before its one output.
    """

    features: tuple[str, ...]
    dense_width: int
    dim: int
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)


class DLRM(nn.Module):
    """The model over the pooled rows of `bags`; the numbers of the MLPs follow from `seed` alone."""

    pairs: torch.Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.features = shape.features
        vectors = len(shape.features) + 1
        first, second = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        self.bottom = _mlp((shape.dense_width, *shape.bottom, shape.dim), generator, ends_linear=False)
        self.top = _mlp((shape.dim + len(first), *shape.top, 1), generator, ends_linear=True)

    def forward(self, dense: torch.Tensor, pooled: Pooled) -> torch.Tensor:
        """Logits (B,) of a click from dense (B, I) and pooled rows, C times (B, D)."""
        number = self.bottom(dense)
        vectors = torch.stack([number, *(pooled[name] for name in self.features)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        met = torch.index_select(products, 1, self.pairs)
        return self.top(torch.cat([number, met], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def _mlp(widths: Sequence[int], generator: torch.Generator, ends_linear: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last unless it `ends_linear`; weights as in the paper's code:
    normal with variance 2 / (in + out), biases normal with variance 1 / out."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.normal_(0.0, math.sqrt(2 / (inputs + outputs)), generator=generator)
            layer.bias.normal_(0.0, math.sqrt(1 / outputs), generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if ends_linear else layers))

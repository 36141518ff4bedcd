"""Tiered embeddings: embedding tables that do not fit in memory, behind modules that PyTorch trainers know.

Rows live in GPU memory (HBM), host memory (DDR) and on SSD; a software-managed cache moves them. See ``docs/tour.md``.
"""

from __future__ import annotations

from tiered_emb.config import TableConfig, TierConfig
from tiered_emb.errors import (
    ConfigError,
    DataError,
    IdRangeError,
    InvalidBatchError,
    ModuleClosedError,
    PlanReleasedError,
    TierCapacityError,
    TieredEmbError,
)
from tiered_emb.init import Constant, Normal, Uniform
from tiered_emb.metrics import EngineStats, TierStats
from tiered_emb.module import TieredEmbedding, TieredEmbeddingBag, TieredEmbeddingBagCollection
from tiered_emb.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from tiered_emb.plan import JaggedIds

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "ConfigError",
    "Constant",
    "DataError",
    "EngineStats",
    "IdRangeError",
    "InvalidBatchError",
    "JaggedIds",
    "ModuleClosedError",
    "Normal",
    "PlanReleasedError",
    "RowwiseAdagrad",
    "TableConfig",
    "TierCapacityError",
    "TierConfig",
    "TierStats",
    "TieredEmbError",
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "TieredEmbeddingBagCollection",
    "Uniform",
]

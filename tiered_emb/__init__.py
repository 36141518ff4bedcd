"""Tiered embeddings: embedding tables that do not fit in memory, behind modules that PyTorch trainers know.

Rows live in GPU memory (HBM), host memory (DDR) and on SSD; a software-managed cache moves them. See ``docs/tour.md``.

The names are imported when they are first asked for: `tiered-emb --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered_emb.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
    from tiered_emb.config import TableConfig, TierConfig
    from tiered_emb.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        GradientError,
        IdRangeError,
        InvalidBatchError,
        ModuleClosedError,
        PlanReleasedError,
        TierCapacityError,
        TieredEmbError,
        TraceError,
        TraceWriteError,
    )
    from tiered_emb.init import Constant, Normal, Uniform
    from tiered_emb.metrics import EngineStats, TierStats
    from tiered_emb.module import TieredEmbedding, TieredEmbeddingBag, TieredEmbeddingBagCollection
    from tiered_emb.optim import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, RowwiseAdagrad, RowwiseAdam
    from tiered_emb.pipeline import Prefetch, prefetch
    from tiered_emb.plan import JaggedIds
    from tiered_emb.prepared import PrefetchStats

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Constant",
    "DataError",
    "EngineStats",
    "GradientError",
    "IdRangeError",
    "InvalidBatchError",
    "JaggedIds",
    "ModuleClosedError",
    "Normal",
    "PlanReleasedError",
    "Prefetch",
    "PrefetchStats",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "TableConfig",
    "TierCapacityError",
    "TierConfig",
    "TierStats",
    "TieredEmbError",
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "TieredEmbeddingBagCollection",
    "TraceError",
    "TraceWriteError",
    "Uniform",
    "list_checkpoints",
    "load_checkpoint",
    "prefetch",
    "save_checkpoint",
]

_HOMES = (
    "errors",
    "plan",
    "config",
    "init",
    "metrics",
    "optim",
    "module",
    "pipeline",
    "checkpoint",
)  # cheap ones first

if not TYPE_CHECKING:  # a type checker knows the names, and takes no other

    def __getattr__(name: str) -> object:
        """A public name, from the first module that has it."""
        if name in __all__:
            for home in _HOMES:
                module = importlib.import_module(f"{__name__}.{home}")
                if hasattr(module, name):
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

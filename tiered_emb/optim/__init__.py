"""Row rules: optimizers whose state lives in the row, one file a rule."""

from __future__ import annotations

from tiered_emb.optim._rule import RowRule, rounded_sqrt, runs_in_triton
from tiered_emb.optim.adagrad import Adagrad
from tiered_emb.optim.adam import Adam
from tiered_emb.optim.adamw import AdamW
from tiered_emb.optim.ftrl import FTRL
from tiered_emb.optim.lamb import LAMB
from tiered_emb.optim.rowwise_adagrad import RowwiseAdagrad
from tiered_emb.optim.rowwise_adam import RowwiseAdam
from tiered_emb.optim.sgd import SGD

RULES = {rule.name: rule for rule in (SGD, Adagrad, RowwiseAdagrad, Adam, RowwiseAdam, AdamW, LAMB, FTRL)}
"""Every rule by its name; each is constructed as `RULES[name](lr=...)`."""

__all__ = [
    "FTRL",
    "LAMB",
    "RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RowRule",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "rounded_sqrt",
    "runs_in_triton",
]

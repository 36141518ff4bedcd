"""Row rules: optimizers whose state lives in the row, one file a rule."""

from __future__ import annotations

from tiered_emb.optim._rule import RowRule
from tiered_emb.optim.adagrad import Adagrad
from tiered_emb.optim.adam import Adam
from tiered_emb.optim.rowwise_adagrad import RowwiseAdagrad
from tiered_emb.optim.sgd import SGD

RULES = {rule.name: rule for rule in (SGD, Adagrad, RowwiseAdagrad, Adam)}
"""Every rule by its name; each is constructed as `RULES[name](lr=...)`."""

__all__ = ["RULES", "SGD", "Adagrad", "Adam", "RowRule", "RowwiseAdagrad"]

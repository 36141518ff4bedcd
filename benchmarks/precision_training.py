"""The main job's model on its synthetic stream, rows at rest in one precision, for `benchmarks.precision`.

A run is the command's (`tiered_emb.reference`): the same stream, model, row rule and held-out tenth, but its rows rest
in host memory. The fp32 side has room for all of its rows in the tier that they are worked on in, which is its table
whole in memory: that changes no bit of what a cache over fp32 rows would come to. The others have a cache of fp32 rows
over packed ones. All sides of one seed have the same clicks, initial rows and initial MLPs.

Memory is what the engine and its store account for themselves when every row was trained. With a cache: the tier with
its bookkeeping and buffers, and the store with its index, in which all rows rest after the last flush. Without: a tier
of exactly so many slots and its bookkeeping, no buffers, and no store.

Run as ``python -m benchmarks.precision_training '{"precision": ...}'``: prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tiered_emb.config import TierConfig
from tiered_emb.engine import row_schema
from tiered_emb.module import TieredEmbeddingBagCollection
from tiered_emb.reference.dlrm import Shape
from tiered_emb.reference.job import tables_of
from tiered_emb.reference.settings import Settings, TrainOptions, decide
from tiered_emb.reference.stream import ClickBatch, Part
from tiered_emb.reference.synthetic import SyntheticStream
from tiered_emb.reference.training import Learner, evaluate
from tiered_emb.row_form import RowForm, form_of
from tiered_emb.tier import Bookkeeping

# Of a budget, so that about the wanted share of the rows fits; what fits, and what is charged, is measured.
_SLOT_BYTES, _BESIDE_BYTES = 43, 1 << 20
_MOVED_BYTES, _MOVED_ROOM = 32, 1.75  # of a row that a batch brings in; what is kept free for moves, by what they take


@dataclass(frozen=True)
class Side:
    """What is trained.

    Attributes:
        precision: of rows at rest; rounding is stochastic.
        seed: of clicks, rows and MLPs.
        samples: of the stream, the held-out tenth included.
        dim: D, floats a row.
        cache_share: rows that the tier has room for, as a share of those that exist; 1 = all of them.
        lr: learning rate of the row rule; None = the command's default.
    """

    precision: str
    seed: int
    samples: int
    dim: int
    cache_share: float
    lr: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        auc: on the held-out tenth.
        planted_auc: that of the true probabilities.
        rows: that exist.
        cache_rows: that the tier has room for at the end.
        tier_bytes: host memory of the tier, its bookkeeping and, with a cache, its buffers.
        rest_bytes: host memory of the store, with its index; 0 where the tier has all rows.
        moved_bytes: of rows that the store took and gave.
    """

    auc: float
    planted_auc: float
    rows: int
    cache_rows: int
    tier_bytes: int
    rest_bytes: int
    moved_bytes: int


def in_new_process(side: Side) -> Outcome:
    """`train` in a fresh interpreter, so that sides may run beside each other."""
    command = [sys.executable, "-m", "benchmarks.precision_training", json.dumps(asdict(side))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def train(side: Side) -> Outcome:
    """Train and test one side in this process, with one thread of torch."""
    torch.set_num_threads(1)
    stream = SyntheticStream(side.samples, side.seed)
    settings = decide(
        TrainOptions(dim=side.dim, seed=side.seed, precision=side.precision, hbm_bytes="0", lookahead=0, lr=side.lr)
    )
    batches = list(stream.batches(Part.TRAIN, settings.batch_size))
    tiers = TierConfig(ddr_bytes=_budget(side, settings, batches), store=None)
    with TieredEmbeddingBagCollection(
        tables_of(settings, stream), tiers=tiers, optimizer=settings.rule(), seed=side.seed
    ) as bags:
        shape = Shape(tuple(feature.name for feature in stream.features), stream.dense_width, side.dim)
        learner = Learner(shape, side.seed, torch.device("cpu"))
        for batch in batches:
            learner.learn(learner.loss(batch, bags(batch.sparse)))
        bags.eval()
        found = evaluate(learner, bags, stream.batches(Part.HELD_OUT, settings.batch_size))
        (tier,) = bags.stats().tiers
        resident = side.cache_share >= 1
        if resident and tier.evictions:
            raise RuntimeError(f"{tier.evictions} rows were evicted from a tier that was to hold all rows")
        if not resident:
            bags.flush()
        store = bags.stats().store
        rows = tier.rows if resident else store.rows
        return Outcome(
            auc=found.auc,
            planted_auc=found.planted_auc or float("nan"),
            rows=rows,
            cache_rows=tier.capacity_rows,
            tier_bytes=_whole_bytes(side, settings, rows) if resident else tier.bytes,
            rest_bytes=0 if resident else store.memory_bytes,
            moved_bytes=store.bytes_read + store.bytes_written,
        )


def _budget(side: Side, settings: Settings, batches: Sequence[ClickBatch]) -> int:
    """Bytes in which a tier of about the share of all rows fits beside what a batch moves."""
    form = _form(side, settings)
    rows, most = _distinct(batches)
    moved = int(most * (form.worked_bytes + form.rest_bytes + _MOVED_BYTES) * _MOVED_ROOM)
    tier = int(min(side.cache_share, 1) * rows) * (form.worked_bytes + _SLOT_BYTES)
    return (tier + moved + _BESIDE_BYTES) * 32 // 31  # the engine keeps a part back


def _whole_bytes(side: Side, settings: Settings, rows: int) -> int:
    """What the engine charges for a tier with a slot for each of so many rows."""
    return rows * _form(side, settings).worked_bytes + Bookkeeping(settings.policy).bytes_for(rows)


def _form(side: Side, settings: Settings) -> RowForm:
    return form_of(row_schema(side.dim, settings.rule(), side.precision))


def _distinct(batches: Sequence[ClickBatch]) -> tuple[int, int]:
    """Different (column, id) pairs of all batches, and the most of one batch."""
    columns = [np.stack(np.split(batch.sparse.ids.numpy(), len(batch.sparse.features)), 1) for batch in batches]
    most = max(sum(len(np.unique(column)) for column in ids.T) for ids in columns)
    return sum(len(np.unique(column)) for column in np.concatenate(columns).T), most


if __name__ == "__main__":
    print(json.dumps(asdict(train(Side(**json.loads(sys.argv[1]))))))

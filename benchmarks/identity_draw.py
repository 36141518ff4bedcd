"""What a run of `identity` does, drawn at random: tables, tiers, batches, and what the loop's body makes of each.

A `Run` is a function of (seed, number) alone: everything is drawn before anything is opened, so that what threads do
when cannot change it. Nothing here imports what it will be played on but its configuration.

Shapes: N ids of a feature, B bags, F features, D dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tiered_emb import Constant, Normal, TableConfig, Uniform
from tiered_emb.cache import POLICIES
from tiered_emb.config import MODES
from tiered_emb.lookup import UpdateTime
from tiered_emb.optim import RULES, RowRule

Kind = Literal["bag", "embedding", "collection"]
Random = np.random.Generator
DIMS = (1, 3, 5, 8, 16, 64)
SPANS = (7, 40, 300)  # rows of a bounded table
EDGES = np.array([-(2**63), -(2**31) - 1, -1, 0, 2**31, 2**40, 2**63 - 1], np.int64)
STORES = (
    "own",
    "heap",
    "memory",
    "lmdb",
    "lmdb-tiny",
)  # our own in memory, one of each kind given, a path, tiny buffers
STREAMS = ("zipf", "few", "cold", "mixed")
_ADMISSION = ("always", "tinylfu", "tinylfu:3", "probability", "probability:0.2")
_INITS = (Normal(), Normal(0.5, 0.1), Uniform(-1, 1), Constant(0.25))
_KINDS: tuple[tuple[Kind, ...], ...] = (("bag",), ("embedding",), ("collection",), ("bag", "collection"))
_UPDATES: tuple[UpdateTime, UpdateTime] = ("backward", "step")
_ODD = np.uint64(0x9E3779B97F4A7C15)

# What the body does with a batch, and how often. `late` and `early` go through the batches out of order.
_BODIES = {
    "train": 0.62,
    "skip": 0.05,
    "renamed": 0.06,
    "late": 0.04,
    "early": 0.04,
    "twice": 0.05,
    "again": 0.04,
    "dropped": 0.05,
    "failed": 0.05,
}
_ASIDES = {"": 0.66, "eval": 0.1, "rows": 0.06, "set_rows": 0.07, "flush": 0.05, "lr": 0.06}
_ENDS = {"": 0.9, "raise": 0.04, "break": 0.02, "reopen": 0.04}


@dataclass(frozen=True)
class Spec:
    """One module: its tables, the id that counts as absent, whether its batches have per-sample weights."""

    name: str
    kind: Kind
    tables: tuple[TableConfig, ...]
    padding: int | None
    weighted: bool

    @property
    def features(self) -> dict[str, TableConfig]:
        """The table of each feature."""
        return {name: table for table in self.tables for name in table.feature_names}


@dataclass(frozen=True)
class Tiers:
    """What modules are opened with; drawn anew for each life.

    Attributes:
        hbm, ddr: room of the tier: 0 = what the largest step holds (nothing, for a DDR tier below an HBM tier),
            1 = every row of the run; None = no such tier.
        floors, quotas: as `TierConfig.min_rows` and, in rows beyond what the largest step holds, `max_rows`.
        threads: torch's, which are also the engine's workers.
    """

    hbm: float | None
    ddr: float | None
    policy: str
    admission: str
    threads: int
    floors: Mapping[str, int]
    quotas: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Bags:
    """What one module looks up in one forward: of each feature ids (N,), lengths (B,) and weights (N,) or None."""

    features: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]]


@dataclass(frozen=True)
class Step:
    """One batch, and what the body does when it comes.

    Attributes:
        batch: of each module, by name.
        renamed: what the body makes of it, where it renames ids or weighs them anew.
        body: one of `_BODIES`.
        aside: done first; one of `_ASIDES`.
        end: how the loop ends with this step, if it does; one of `_ENDS`.
        update: whether the optimizer's step follows (update="step").
        seed: of the gradients, and of what else the step draws.
    """

    batch: Mapping[str, Bags] = field(repr=False)
    renamed: Mapping[str, Bags] = field(repr=False)
    body: str
    aside: str
    end: str
    update: bool
    seed: int


@dataclass(frozen=True)
class Run:
    """See the module's essay. `lives` is what modules are opened with, one after the other."""

    number: int
    specs: tuple[Spec, ...]
    rule: RowRule
    update: UpdateTime
    store: str
    stream: str
    lives: tuple[Tiers, ...]
    lookaheads: tuple[int, ...]
    seed: int
    steps: tuple[Step, ...] = field(repr=False)

    def lookahead(self, loop: int) -> int:
        """Of the loop of this number."""
        return self.lookaheads[loop % len(self.lookaheads)]

    def life(self, number: int) -> Tiers:
        """Of the modules opened for the `number`-th time."""
        return self.lives[number % len(self.lives)]


def draw(seed: int, number: int) -> Run:
    """The run of this number."""
    random = np.random.default_rng([seed, number])
    specs, stream = _specs(random), str(random.choice(STREAMS))
    rule, update = _rule(random), _UPDATES[int(random.random() < 0.3)]
    return Run(
        number=number,
        specs=specs,
        rule=rule,
        update=update,
        store=str(random.choice(STORES)),
        stream=stream,
        lives=tuple(_tiers(random, specs) for _ in range(3)),
        lookaheads=tuple(int(one) for one in random.integers(0, 9, 4)),
        seed=int(random.integers(1 << 62)),
        steps=_steps(random, specs, stream, accumulate=update == "step"),
    )


def _specs(random: Random) -> tuple[Spec, ...]:
    kinds = _KINDS[random.choice(len(_KINDS), p=[0.35, 0.15, 0.35, 0.15])]
    dims = random.choice(DIMS, 2).tolist()  # tables of one dimension share a group, those of two modules too
    return tuple(_spec(random, f"module{number}", one, dims) for number, one in enumerate(kinds))


def _spec(random: Random, name: str, kind: Kind, dims: Sequence[int]) -> Spec:
    weighted = bool(kind != "embedding" and random.random() < 0.3)
    count = int(random.integers(2, 6)) if kind == "collection" else 1
    tables = []
    for number in range(count):
        mode = "sum" if weighted or kind == "embedding" else MODES[random.integers(len(MODES))]
        rows = None if random.random() < 0.6 else int(random.choice(SPANS))
        title = f"{name}.table{number}"
        features = [title, f"{title}b"] if kind == "collection" and random.random() < 0.25 else [title]
        tables.append(TableConfig(title, rows, random.choice(dims), features, mode, _INITS[random.integers(4)]))
    padding = int(random.integers(3)) if kind != "collection" and random.random() < 0.2 else None
    return Spec(name, kind, tuple(tables), padding, weighted)


def _rule(random: Random) -> RowRule:
    rule: RowRule = list(RULES.values())[random.integers(len(RULES))](lr=float(10 ** random.uniform(-3, 0)))
    return rule


def _tiers(random: Random, specs: Sequence[Spec]) -> Tiers:
    hbm, ddr = _room(random), _room(random)
    which = random.choice(["ddr", "hbm", "both"], p=[0.4, 0.15, 0.45])
    names = [table.name for spec in specs for table in spec.tables]
    floors = {str(random.choice(names)): int(random.integers(1, 12))} if random.random() < 0.15 else {}
    quotas = {str(random.choice(names)): int(random.integers(12, 40))} if random.random() < 0.15 else {}
    return Tiers(
        hbm=None if which == "ddr" else hbm,
        ddr=None if which == "hbm" else ddr,
        policy=str(random.choice(list(POLICIES))),
        admission=str(random.choice(_ADMISSION)) if which == "both" else "always",
        threads=int(random.integers(1, 5)),
        floors=floors,
        quotas=quotas,
    )


def _room(random: Random) -> float:
    return float(random.choice([0.0, 0.05, 0.2, 0.5, 1.0], p=[0.25, 0.25, 0.2, 0.15, 0.15]))


# ---------------------------------------------------------------------------------------------------------- batches


def _steps(random: Random, specs: Sequence[Spec], stream: str, *, accumulate: bool) -> tuple[Step, ...]:
    wide = random.random() < 0.15  # enough ids for the workers to share one batch
    count = int(random.integers(6, 10) if wide else random.integers(10, 41))
    ids = _Ids(random, stream, few=wide)
    steps: list[Step] = []
    for number in range(count):
        size = _size(random, wide)
        batch = {spec.name: _bags(random, spec, size, ids, 80 if wide else 4) for spec in specs}
        if steps and random.random() < 0.06:
            batch = dict(steps[-1].batch)  # equal by value: either's rows will do for the other
        renamed = {spec.name: _renamed(random, spec, batch[spec.name]) for spec in specs}
        body, aside, end = (_one_of(random, among) for among in (_BODIES, _ASIDES, _ENDS))
        if number == 0 and body == "late":
            body = "train"
        update = not accumulate or random.random() < 0.7
        steps.append(Step(batch, renamed, body, aside, end, update, int(random.integers(1 << 62))))
        ids.now += 1
    last = replace(steps[-1], body="train", update=True)
    return (*steps[:-1], last)


def _size(random: Random, wide: bool) -> int:
    """Bags of a batch: none at times."""
    if wide:
        return int(random.integers(150, 400))
    return 0 if random.random() < 0.04 else int(random.integers(1, 33))


def _one_of(random: Random, among: Mapping[str, float]) -> str:
    return str(random.choice(list(among), p=np.array(list(among.values())) / sum(among.values())))


@dataclass
class _Ids:
    """Draws ids; `now` counts batches, `few` keeps them few however many are asked for."""

    random: Random
    stream: str
    few: bool
    now: int = 0
    before: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def draw(self, table: TableConfig, count: int) -> NDArray[np.int64]:
        """(count,) ids of the table, some of which the batch before had."""
        kind = str(self.random.choice(STREAMS[:3])) if self.stream == "mixed" else self.stream
        if kind == "few":
            ranks = self.random.integers(0, 12, count)
        elif kind == "cold":  # never seen before, but a few of the batch's own
            ranks = (self.now + 1) * 10_000 + self.random.integers(0, 40 if self.few else max(1, count), count)
        else:
            ranks = self.random.zipf(1.2, count) % (200 if self.few else 3_000)
        ids = self._named(table, ranks)
        before = self.before.get(table.name)
        if before is not None and len(before):
            ids = np.where(self.random.random(count) < 0.3, self.random.choice(before, count), ids)
        self.before[table.name] = ids
        return ids

    def _named(self, table: TableConfig, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranks as ids: within bounds, or all over the 64 bits."""
        if table.num_embeddings is not None:
            return ranks % table.num_embeddings
        ids = (ranks.astype(np.uint64) * _ODD).view(np.int64)
        return np.where(self.random.random(len(ids)) < 0.03, self.random.choice(EDGES, len(ids)), ids)


def _bags(random: Random, spec: Spec, size: int, ids: _Ids, longest: int) -> Bags:
    """A batch of `size` bags a feature, features in any order."""
    features, names = {}, list(spec.features)
    for name in random.permutation(names).tolist():
        lengths = random.integers(0, longest + 1, size) * (random.random(size) < 0.85)
        if spec.kind == "embedding":
            lengths = np.ones(size * (40 if longest > 4 else 1), np.int64)
        count = int(lengths.sum())
        features[name] = (ids.draw(spec.features[name], count), lengths, _weights(random, spec, count))
    return Bags(features)


def _weights(random: Random, spec: Spec, count: int) -> NDArray[np.float32] | None:
    return random.standard_normal(count).astype(np.float32) if spec.weighted else None


def _renamed(random: Random, spec: Spec, bags: Bags) -> Bags:
    """Other ids of the batch's own in another order, or other weights."""
    weights_only = spec.weighted and random.random() < 0.5
    return Bags(
        {
            name: (ids if weights_only else random.permutation(ids), lengths, _weights(random, spec, len(ids)))
            for name, (ids, lengths, _) in bags.features.items()
        }
    )

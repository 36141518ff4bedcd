"""Plays a run of `identity` on the engine and, beside it, on `DenseOracle`; every output and row is compared as bits.

Shapes: N ids of a feature, B bags, F features, D dimension, K state width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.identity_draw import Bags, Run, Spec, Step
from benchmarks.identity_tiers import Place, tier_config
from tiered_emb import JaggedIds, TieredEmbedding, TieredEmbeddingBag, TieredEmbeddingBagCollection, prefetch
from tiered_emb.tables import TieredTables
from tiered_emb.testing import DenseOracle

Rows = NDArray[np.float32]


class Difference(Exception):
    """What the engine gave is not what the oracle gives; says where."""


class BodyFailed(Exception):
    """Raised by the body of a loop, or in its backward pass, as a user's may be."""


@dataclass
class Forward:
    """One forward of all modules on one side.

    Attributes:
        outs: (B, D) a feature, in the order of features; those of the loss have a gradient in `grads`.
        weights: (N,) a module that has per-sample weights.
    """

    outs: list[torch.Tensor] = field(default_factory=list)
    used: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class Player:
    """One run: modules and the oracles beside them. `counts` are of what happened."""

    def __init__(self, run: Run, directory: Path, grown: float) -> None:
        self.run = run
        self.counts: Counter[str] = Counter()
        self._grown = grown
        self._place = Place(run.store, directory)
        self._rule = run.rule
        self._lives = self._loops = 0
        self._pending: list[tuple[Forward, Forward]] = []  # went backward on the engine's side, and not on the oracle's
        self._model = torch.nn.ModuleDict()
        self._oracles = {spec.name: DenseOracle(spec.tables, optimizer=run.rule, seed=run.seed) for spec in run.specs}

    def play(self) -> None:
        """The whole run. Raises Difference, TierCapacityError, and what the engine raises."""
        threads = torch.get_num_threads()
        try:
            self._open()
            at = 0
            while at < len(self.run.steps):
                at = self._loop(at)
            self._compare_rows()
            self._close()
        finally:
            self._abandon()
            torch.set_num_threads(threads)

    # ---- the modules' lives

    def _open(self) -> None:
        tiers = self.run.life(self._lives)
        self._lives += 1
        torch.set_num_threads(tiers.threads)
        config = tier_config(self.run, tiers, self._place.open(), self._grown)
        for spec in self.run.specs:
            options: dict[str, Any] = {"tiers": config, "optimizer": self._rule, "seed": self.run.seed}
            self._model[spec.name] = _module(spec, {**options, "update": self.run.update, "device": "cpu"})

    def _close(self) -> None:
        """Close the modules and what they gave no count of yet."""
        stats = next(iter(self._model.values())).stats()  # type: ignore[operator]
        for tier in stats.tiers:
            self.counts["evictions"] += tier.evictions
            self.counts["write_backs"] += tier.write_backs
        self.counts["rows_read"] += stats.store.rows_read
        self.counts["rows_moved"] += stats.store.rows_moved
        for name in list(self._model):
            self._model.pop(name).close()  # type: ignore[operator]
        self._place.close()
        self._pending.clear()  # closing forgets what no step was made of

    def _abandon(self) -> None:
        """After a difference: nothing is worth keeping, and nothing must stay open for the next run."""
        for module in self._model.values():
            module.__exit__(KeyboardInterrupt, None, None)  # type: ignore[operator]
        self._place.close()

    # ---- loops

    def _loop(self, first: int) -> int:
        """One loop over what `prefetch` gives, from a step on to the one that ends it; the step after that."""
        steps = self.run.steps[first:]
        model = self._model if len(self.run.specs) > 1 else self._model[self.run.specs[0].name]
        ahead = prefetch(steps, model, self._asked, self.run.lookahead(self._loops))
        self._loops += 1
        at = first - 1
        try:
            with ahead if self._loops % 2 else nullcontext():
                for step in ahead:
                    at += 1
                    self._step(at, step)
                    if step.end == "raise":
                        raise BodyFailed
                    if step.end == "break" or (step.end == "reopen" and self.run.store != "own"):
                        break
        except BodyFailed:
            self.counts["raised"] += 1
        for name in ("prepared", "unprepared", "refused", "stalls"):
            self.counts[name] += getattr(ahead.stats, name)
        self.counts["prepare_failed"] += ahead.stats.failed
        if self.run.steps[at].end == "reopen" and self.run.store != "own":
            self._close()  # beside what is prepared, unless the loop has closed its iterator
            self._open()
            self.counts["reopened"] += 1
        return at + 1

    def _asked(self, step: Step) -> Any:
        """What the modules will be asked, if the body does with the batch what it was read for."""
        asked = {spec.name: _arguments(spec, step.batch[spec.name], None) for spec in self.run.specs}
        return asked if len(asked) > 1 else next(iter(asked.values()))

    def _step(self, at: int, step: Step) -> None:
        random = np.random.default_rng(step.seed)
        self.counts["steps"] += 1
        self._aside(step, random)
        steps = self.run.steps
        bodies: dict[str, list[Mapping[str, Bags]]] = {
            "skip": [],
            "renamed": [step.renamed],
            "late": [steps[at - 1].batch, step.batch],
            "early": [*(one.batch for one in steps[at + 1 : at + 2]), step.batch],
            "twice": [step.batch, step.batch],
            "again": [step.batch, step.batch],
        }
        batches = bodies.get(step.body, [step.batch])
        self.counts[step.body] += 1
        passes = [batches] if step.body == "twice" else [[batch] for batch in batches]
        for together in passes:
            self._train([self._forward(batch, random, step.body) for batch in together], step, random)
        if step.update and self.run.update == "step":
            self._update()

    def _train(self, both: Sequence[tuple[Forward, Forward]], step: Step, random: np.random.Generator) -> None:
        """One backward pass over these forwards, which may fail or be left out."""
        if step.body == "dropped":
            return
        if step.body == "failed":
            self._fail([ours for ours, _ in both], int(random.integers(1 << 30)))
            return
        _backward([ours for ours, _ in both])
        self._pending += both
        if self.run.update == "backward":
            self._catch_up()

    def _catch_up(self) -> None:
        """The oracle's backward pass over all that the engine's side has gone back over, and what it gives."""
        both, self._pending = self._pending, []
        _backward([theirs for _, theirs in both])
        for ours, theirs in both:
            for name, weights in ours.weights.items():
                _compare(weights.grad, theirs.weights[name].grad, f"gradient of {name}'s weights")

    def _update(self) -> None:
        for module in self._model.values():
            module.optimizer.step()  # type: ignore[operator, union-attr]
        if self._pending:
            self._catch_up()

    def _fail(self, forwards: Sequence[Forward], which: int) -> None:
        """A backward pass that fails, at one of its outputs, before or after others; what was recorded is forgotten."""
        used = [out for forward in forwards for out in forward.used]
        if not used:
            return

        def fail(grad: torch.Tensor) -> torch.Tensor:
            raise BodyFailed

        used[which % len(used)].register_hook(fail)  # type: ignore[no-untyped-call]
        try:
            _backward(forwards)
        except BodyFailed:
            self.counts["failed_backwards"] += 1
        if self.run.update == "step":
            for module in self._model.values():
                module.optimizer.zero_grad()  # type: ignore[union-attr]
            self._pending.clear()

    # ---- forwards

    def _forward(self, batch: Mapping[str, Bags], random: np.random.Generator, body: str) -> tuple[Forward, Forward]:
        """All modules' outputs for a batch, on both sides, compared; and gradients for some of them."""
        ours, theirs = Forward(), Forward()
        for spec in self.run.specs:
            bags = batch[spec.name]
            for side, name in ((ours, "ours"), (theirs, "theirs")):
                weights = _joined_weights(bags, train=True)
                if weights is not None:
                    side.weights[spec.name] = weights
                outs = self._ours(spec, bags, weights) if name == "ours" else self._theirs(spec, bags, weights)
                side.outs += [outs[feature] for feature in spec.features]
            self._compare_outputs(spec, bags, ours.outs, theirs.outs, body)
        for one, other in zip(ours.outs, theirs.outs, strict=True):
            if random.random() < 0.9:  # others play no part in the loss
                grad = torch.from_numpy(random.standard_normal(one.shape).astype(np.float32))
                for side, out in ((ours, one), (theirs, other)):
                    side.used.append(out)
                    side.grads.append(grad)
        self.counts["forwards"] += 1
        return ours, theirs

    def _ours(self, spec: Spec, bags: Bags, weights: torch.Tensor | None) -> dict[str, torch.Tensor]:
        outs = self._model[spec.name](*_arguments(spec, bags, weights))
        return outs if spec.kind == "collection" else {spec.tables[0].name: outs}

    def _theirs(self, spec: Spec, bags: Bags, weights: torch.Tensor | None) -> dict[str, torch.Tensor]:
        outs: dict[str, torch.Tensor] = self._oracles[spec.name](_jagged(bags, weights, spec.padding))
        return outs

    def _compare_outputs(
        self, spec: Spec, bags: Bags, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], what: str
    ) -> None:
        """The last outputs of both sides, which are this module's."""
        features = list(spec.features)
        for feature, one, other in zip(features, ours[-len(features) :], theirs[-len(features) :], strict=True):
            self.counts["outputs"] += one.numel()
            ids, lengths, _ = bags.features[feature]
            asked = np.split(ids, np.cumsum(lengths))
            _compare(one, other, f"output of feature {feature}, batch {what!r}", asked)

    # ---- what is done beside training

    def _aside(self, step: Step, random: np.random.Generator) -> None:
        verbs = {"eval": self._eval, "rows": self._rows, "set_rows": self._set_rows, "lr": self._change_lr}
        if step.aside == "flush":
            next(iter(self._model.values())).flush()  # type: ignore[operator]
        elif step.aside:
            verbs[step.aside](step, random)
        self.counts[step.aside] += bool(step.aside)

    def _eval(self, step: Step, random: np.random.Generator) -> None:
        """A forward that leaves no trace: in eval mode or under no_grad."""
        evaluates = bool(random.integers(2))
        self._model.train(not evaluates)
        with nullcontext() if evaluates else torch.no_grad():
            for spec in self.run.specs:
                bags = step.renamed[spec.name]
                weights = _joined_weights(bags, train=False)
                ours, theirs = (side(spec, bags, weights) for side in (self._ours, self._theirs))
                names = list(spec.features)
                self._compare_outputs(
                    spec, bags, [ours[name] for name in names], [theirs[name] for name in names], "looked at"
                )
        self._model.train()

    def _rows(self, step: Step, random: np.random.Generator) -> None:
        for spec in self.run.specs:
            for feature, table in spec.features.items():
                ids = torch.from_numpy(step.batch[spec.name].features[feature][0])
                module = self._model[spec.name]
                ours = module.rows(table.name, ids) if spec.kind == "collection" else module.rows(ids)  # type: ignore[operator]
                theirs = self._oracles[spec.name].rows(table.name, ids)
                _compare(ours, theirs, f"rows of {table.name}", ids.numpy())

    def _set_rows(self, step: Step, random: np.random.Generator) -> None:
        """Overwrite a few rows that the batch asks for, and so perhaps rows that are prepared for it."""
        if self._pending and any(spec.weighted for spec in self.run.specs):
            return  # the oracle has yet to see the rows as they were, for the weights' gradients
        for spec in self.run.specs:
            for feature, table in spec.features.items():
                ids = torch.from_numpy(step.batch[spec.name].features[feature][0][:5])
                values = torch.from_numpy(random.standard_normal((len(ids), table.embedding_dim)).astype(np.float32))
                module = self._model[spec.name]
                module.set_rows(*([table.name] if spec.kind == "collection" else []), ids, values)  # type: ignore[operator]
                self._oracles[spec.name].set_rows(table.name, ids, values)

    def _change_lr(self, step: Step, random: np.random.Generator) -> None:
        self._rule = replace(self._rule, lr=float(10 ** random.uniform(-3, 0)))  # type: ignore[type-var]
        for name, module in self._model.items():
            module.optimizer.param_groups[0]["lr"] = self._rule.lr  # type: ignore[union-attr, index]
            self._oracles[name].rule = self._rule

    def _compare_rows(self) -> None:
        """Every row that was ever changed, with its optimizer state."""
        for spec in self.run.specs:
            found = _scanned(self._model[spec.name])  # type: ignore[arg-type]
            for name, (ids, rows) in self._oracles[spec.name].touched().items():
                ours, mine = found.get(name, (ids[:0], rows[:0]))
                if odd := np.setxor1d(ours, ids).tolist():
                    raise Difference(f"{len(odd)} rows of {name} are on one side only, id {odd[0]} among them")
                _compare(torch.from_numpy(mine), torch.from_numpy(rows), f"row at the end of {name}", ids)
                self.counts["rows"] += len(ids)


def _module(spec: Spec, options: dict[str, Any]) -> TieredTables:
    if spec.kind == "collection":
        return TieredEmbeddingBagCollection(spec.tables, **options)
    (table,) = spec.tables
    options |= {"name": table.name, "init": table.init, "padding_idx": spec.padding}
    if spec.kind == "embedding":
        return TieredEmbedding(table.num_embeddings, table.embedding_dim, **options)
    return TieredEmbeddingBag(table.num_embeddings, table.embedding_dim, mode=table.mode, **options)


def _joined_weights(bags: Bags, *, train: bool) -> torch.Tensor | None:
    """(N,) over all features, a leaf of its own if it is to get a gradient; None = the module takes none."""
    parts = [weights for _, _, weights in bags.features.values() if weights is not None]
    return torch.from_numpy(np.concatenate(parts)).requires_grad_(train) if parts else None


def _arguments(spec: Spec, bags: Bags, weights: torch.Tensor | None) -> tuple[Any, ...]:
    """What the module's forward takes; `weights` as autograd should know them, or None = the batch's own."""
    weights = _joined_weights(bags, train=False) if weights is None else weights
    if spec.kind == "collection":
        return (_jagged(bags, weights, None),)
    ((ids, lengths, _),) = bags.features.values()
    if spec.kind == "embedding":
        return (torch.from_numpy(ids),)
    return torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths), weights


def _jagged(bags: Bags, weights: torch.Tensor | None, padding: int | None) -> JaggedIds:
    """The batch without its padding; its weights are part of the graph of `weights`."""
    ids = np.concatenate([one for one, _, _ in bags.features.values()])
    lengths = np.concatenate([one for _, one, _ in bags.features.values()])
    kept = np.ones(len(ids), np.bool_) if padding is None else ids != padding
    before = np.concatenate([[0], np.cumsum(kept)])
    offsets = before[np.concatenate([[0], np.cumsum(lengths)])]
    mine = weights if weights is None or kept.all() else weights[torch.from_numpy(kept)]
    return JaggedIds(tuple(bags.features), torch.from_numpy(ids[kept]), torch.from_numpy(offsets), mine)


def _backward(forwards: Sequence[Forward]) -> None:
    outs = [out for forward in forwards for out in forward.used]
    if outs:
        torch.autograd.backward(outs, [grad for forward in forwards for grad in forward.grads])


def _scanned(module: TieredTables) -> dict[str, tuple[NDArray[np.int64], Rows]]:
    """Of each table: ids (n,), ascending, and rows (n, D + K)."""
    parts: dict[str, list[tuple[NDArray[np.int64], Rows]]] = {}
    for name, ids, rows in module.scan():
        parts.setdefault(name, []).append((ids.copy(), rows.copy()))
    found = {}
    for name, blocks in parts.items():
        ids, rows = (np.concatenate(column) for column in zip(*blocks, strict=True))
        order = np.argsort(ids)
        found[name] = (ids[order], rows[order])
    return found


def _compare(ours: Any, theirs: Any, what: str, ids: Sequence[Any] | NDArray[np.int64] | None = None) -> None:
    """Raise Difference unless two float32 tensors have the same bits; `ids` are those of each row."""
    if (ours is None) != (theirs is None):
        raise Difference(f"{what}: {'no' if ours is None else 'a'} tensor, the oracle has the other")
    if ours is None:
        return
    mine, right = (side.detach().numpy().reshape(len(side), -1 if side.numel() else 0) for side in (ours, theirs))
    if mine.shape != right.shape:
        raise Difference(f"{what}: shape {mine.shape}, the oracle's is {right.shape}")
    wrong = np.argwhere(np.ascontiguousarray(mine).view(np.uint32) != np.ascontiguousarray(right).view(np.uint32))
    if len(wrong):
        row, column = wrong[0].tolist()
        asked = "" if ids is None else f", ids {np.atleast_1d(ids[row]).tolist()[:8]}"
        raise Difference(
            f"{what}: {len(wrong)} of {mine.size} numbers differ, the first at row {row}{asked}, column {column}: "
            f"{mine[row, column]!r} instead of {right[row, column]!r}"
        )

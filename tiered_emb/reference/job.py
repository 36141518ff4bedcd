"""One run of the main job: from options to a report.

A run starts from untrained rows, because those that are stored go with a dense part that they were trained with; or it
resumes at a checkpoint, which has both (`tiered_emb.reference.resuming`). Without ``--store`` the rows rest in a
temporary directory that the run removes. However the run ends - done, Ctrl-C, a bad line of data, a full disk - the
bags are closed, so that what was trained rests in the store.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console

from tiered_emb.config import TableConfig
from tiered_emb.engine import row_schema
from tiered_emb.errors import ConfigError, DataError
from tiered_emb.init import Uniform
from tiered_emb.module import TieredEmbeddingBagCollection
from tiered_emb.pipeline import prefetch
from tiered_emb.reference.at_rest import RowsAtRest
from tiered_emb.reference.criteo import CriteoStream
from tiered_emb.reference.dlrm import Shape
from tiered_emb.reference.interrupt import Interrupted, StopSignal
from tiered_emb.reference.movielens import MovieLensStream, cache_folder, fetch
from tiered_emb.reference.progress import meter
from tiered_emb.reference.report import Report
from tiered_emb.reference.resuming import Resuming, Trained
from tiered_emb.reference.settings import INIT_RANGE, SYNTHETIC_SAMPLES, Settings
from tiered_emb.reference.stream import ClickBatch, ClickStream, Part
from tiered_emb.reference.synthetic import SyntheticStream
from tiered_emb.reference.training import (
    DivergedError,
    Evaluation,
    Learner,
    check_finite,
    evaluate,
    fingerprints,
    learn,
)
from tiered_emb.reference.words import counted


def run_job(settings: Settings, console: Console, *, hashes: bool = False, check: bool = False) -> Report:
    """Train, test, report; progress goes to ``console``. ``hashes`` and ``check`` add what the report then holds.

    Raises Interrupted after Ctrl-C, and the errors of ``tiered_emb.errors`` and ``storage.errors``.
    """
    torch.set_num_threads(settings.threads)
    stream = open_stream(settings, console)
    if settings.hbm_bytes and _device(settings).type == "cpu":
        console.print("no GPU here: the HBM tier stands in host memory", highlight=False)
    with StopSignal() as stop, _store_path(settings) as path:
        job = Job(settings, stream, console, stop)
        with job.open_bags(path) as bags, Resuming(settings, job.stream, bags, console) as saves:
            saves.refuse_rows(path)
            trained = Trained()
            try:
                return job.run(bags, trained, saves, hashes=hashes, check=check)
            except Interrupted:
                saves.save_last(trained)
                step = len(trained.losses)
                raise Interrupted(f"interrupted after step {step:,}{_left(settings, bags, saves)}") from None
            except (DataError, DivergedError) as error:
                raise type(error)(f"{error}{_left(settings, bags, saves)}") from error


class Job:
    """The parts of a run: a stream of clicks, a model, and the bags it is trained over."""

    def __init__(self, settings: Settings, stream: ClickStream, console: Console, stop: StopSignal) -> None:
        self.settings = settings
        self.stream = stream
        self.tables = tables_of(settings, stream)
        _check_shares(settings, [table.name for table in self.tables])
        self._console = console
        self._stop = stop

    def open_bags(self, path: Path) -> TieredEmbeddingBagCollection:
        """The tables over the store at ``path``."""
        settings = self.settings
        return TieredEmbeddingBagCollection(
            self.tables,
            tiers=settings.tiers(path),
            optimizer=settings.rule(),
            seed=settings.seed,
            device=_device(settings),
        )

    def learner(self) -> Learner:
        """A new dense part; always the same one."""
        features = tuple(feature.name for feature in self.stream.features)
        shape = Shape(features, self.stream.dense_width, self.settings.dim)
        return Learner(shape, self.settings.seed, _device(self.settings))

    def run(
        self, bags: TieredEmbeddingBagCollection, trained: Trained, saves: Resuming, *, hashes: bool, check: bool
    ) -> Report:
        """The whole run, or what is left of it; ``trained`` is filled as it goes."""
        learner = self.learner()
        saves.resume(learner, trained)
        self.train(learner, bags, trained, saves, check)
        evaluation = self.test(learner, bags)
        check_finite(evaluation.log_loss, "the loss on what was held out", self.settings.lr)
        bags.flush()
        stats = bags.stats()
        found = {"losses_sha256": hashlib.sha256(trained.losses.tobytes()).hexdigest()}
        verdict = None
        if hashes or check:
            with RowsAtRest(bags.scan()) as rows:
                found["rows_sha256"] = rows.sha256()
                verdict = self.check(trained, rows) if check else None
        return Report(
            settings=self.settings.to_json(),
            evaluation=evaluation,
            stats=stats,
            samples=trained.samples,
            steps=len(trained.losses),
            seconds=trained.seconds,
            row_bytes=row_schema(self.settings.dim, self.settings.rule(), self.settings.precision).row_bytes,
            hashes=found,
            dense_check=verdict,
        )

    def train(
        self, learner: Learner, bags: TieredEmbeddingBagCollection, trained: Trained, saves: Resuming, keep: bool
    ) -> None:
        """All epochs, from where ``trained`` is; ``keep`` fingerprints for a check."""
        bags.train()
        before, ahead = trained.seconds, self._train_batches(len(trained.losses))
        with (
            meter(self._console, "train", self._train_samples(), "compiling kernels, once") as shown,
            prefetch(ahead, bags, lambda batch: batch.sparse, self.settings.lookahead) as batches,
        ):
            shown.skip(trained.samples)
            for batch in self._stop.watch(batches):
                pooled = bags(batch.sparse)
                if keep:
                    trained.fingerprints.append(fingerprints(pooled, learner.model.features))
                loss = learner.loss(batch, pooled)
                number = f"step {len(trained.losses) + 1:,}"
                found = check_finite(loss.item(), f"the loss of {number}", self.settings.lr)
                learn(learner, loss, number, self.settings.lr)
                trained.losses.append(found)
                trained.samples += len(batch.labels)
                trained.seconds = before + shown.seconds
                shown.add(len(batch.labels), trained.losses[-1], bags.stats)
                saves.save_if_due(trained)
        saves.save_last(trained)

    def test(self, learner: Learner, bags: TieredEmbeddingBagCollection) -> Evaluation:
        """Predict what was held out; the rows, tiers and counters stay as they are."""
        bags.eval()
        with meter(self._console, "test", self.stream.samples(Part.HELD_OUT)) as shown:

            def batches() -> Iterator[ClickBatch]:
                for batch in self._stop.watch(self.stream.batches(Part.HELD_OUT, self.settings.batch_size)):
                    yield batch
                    shown.add(len(batch.labels))

            return evaluate(learner, bags, batches())

    def check(self, trained: Trained, rows: RowsAtRest) -> str:
        """The verdict of the same run on whole tables."""
        from tiered_emb.reference.check import Model, Trail, check_dense

        model = Model(self.tables, self.settings.rule(), self.settings.seed, self.learner)
        with meter(self._console, "check", self._train_samples()) as shown:

            def batches() -> Iterator[ClickBatch]:
                for batch in self._stop.watch(self._train_batches()):
                    yield batch
                    shown.add(len(batch.labels))

            return check_dense(model, batches(), Trail(trained.losses, trained.fingerprints), rows)

    def _train_samples(self) -> int:
        return self.settings.epochs * self.stream.samples(Part.TRAIN)

    def _train_batches(self, skipped: int = 0) -> Iterator[ClickBatch]:
        """All there is to train on, less the first ``skipped`` batches; whole epochs of those are not read."""
        size = self.settings.batch_size
        epochs, batches = divmod(skipped, -(-self.stream.samples(Part.TRAIN) // size))
        for _ in range(epochs, self.settings.epochs):
            yield from islice(self.stream.batches(Part.TRAIN, size), batches, None)
            batches = 0


def open_stream(settings: Settings, console: Console) -> ClickStream:
    """The data set that ``--data`` names."""
    if settings.data == "synthetic":
        return SyntheticStream(SYNTHETIC_SAMPLES, settings.seed)
    if settings.data == "movielens":
        return MovieLensStream(fetch(cache_folder(), say=lambda line: console.print(line, highlight=False)))
    with meter(console, "count lines", 1) as shown:
        return CriteoStream(Path(settings.data), shown.to)


def tables_of(settings: Settings, stream: ClickStream) -> list[TableConfig]:
    """One table a feature, of its name."""
    init = Uniform(-INIT_RANGE, INIT_RANGE)
    return [
        TableConfig(
            feature.name,
            feature.num_embeddings,
            settings.dim,
            mode=feature.mode,
            init=init,
            precision=settings.precision,
            rounding=settings.rounding,
        )
        for feature in stream.features
    ]


def _device(settings: Settings) -> torch.device:
    return torch.device("cuda" if settings.hbm_bytes and torch.cuda.is_available() else "cpu")


@contextmanager
def _store_path(settings: Settings) -> Iterator[Path]:
    if settings.store is not None:
        yield Path(settings.store)
        return
    with tempfile.TemporaryDirectory(prefix="tiered-emb-") as folder:
        yield Path(folder) / "rows"


def _left(settings: Settings, bags: TieredEmbeddingBagCollection, saves: Resuming) -> str:
    """What a run that stopped leaves in ``--store``, made durable; empty where that is nothing."""
    bags.flush()
    if (step := saves.newest_step()) is not None:
        return f"; --resume goes on from step {step:,}"
    rows = bags.stats().store.rows
    if settings.store is None or rows == 0:
        return ""
    holds = f"{settings.store} holds {counted(rows, 'row')} of the stopped run"
    return f"; {holds}, which can be opened but not trained on: remove it to start again"


def _check_shares(settings: Settings, tables: Sequence[str]) -> None:
    """Raise ConfigError for a floor or a quota of a table that the data does not have."""
    for option, rows in (("--min-rows", settings.min_rows), ("--max-rows", settings.max_rows)):
        if unknown := sorted(rows.keys() - set(tables)):
            raise ConfigError(f"{option} names table {unknown[0]!r}; expected one of {', '.join(tables)}")

"""Checkpoints of the main job: when one is made, what is in it beside the model, and how a run goes on from one.

A checkpoint is made before the first step, every so many steps, beside the steps that follow, and at the last one, and
where Ctrl-C stops a run. `KEPT` of them stay. A run that resumes goes back to the newest: rows that were evicted, and
steps that were taken since, are gone. It must have the options that decide the numbers; budgets, policies, lookahead
and more epochs are free.

While a run goes on its directory of checkpoints holds a file `running`, locked. One that is there when a run resumes
tells that the last one was killed.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from tiered_emb.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from tiered_emb.checkpoint_pending import PendingCheckpoint
from tiered_emb.errors import ConfigError
from tiered_emb.module import TieredEmbeddingBagCollection
from tiered_emb.reference.settings import Settings
from tiered_emb.reference.stream import ClickStream, Part
from tiered_emb.reference.training import Learner
from tiered_emb.reference.words import counted

KEPT = 2
_RUNNING = "running"
_DECIDING = ("dim", "batch_size", "optimizer", "lr", "seed", "threads", "precision", "rounding")  # change numbers


@dataclass
class Trained:
    """What training leaves behind beside the rows.

    Attributes:
        losses: float32, one a step, from the first on, also where the run resumed.
        fingerprints: (C, B) uint32 of the pooled rows of every step, where a check is to follow.
        samples: trained on.
        seconds: it took.
    """

    losses: array[float] = field(default_factory=lambda: array("f"))
    fingerprints: list[NDArray[np.uint32]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0


class Resuming:
    """The checkpoints of one run; see the module's docstring. Use it in a ``with`` statement inside that of bags."""

    def __init__(
        self, settings: Settings, stream: ClickStream, bags: TieredEmbeddingBagCollection, console: Console
    ) -> None:
        self._settings = settings
        self._path = None if settings.checkpoints is None else Path(settings.checkpoints)
        self._bags = bags
        self._console = console
        self._model: nn.ModuleDict | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._saved_at = -1  # step of the newest checkpoint of this run
        self._was_killed = False
        self._lock: int | None = None  # on the file `running`
        self._pending: PendingCheckpoint[Checkpoint] | None = None
        self._data = settings.data if settings.data in ("synthetic", "movielens") else "a file"
        self._samples = stream.samples(Part.TRAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cut_short = kind is not None and issubclass(kind, KeyboardInterrupt)
        if self._lock is not None:
            began = self._model is not None or not self._was_killed
            if began and self._path is not None and not cut_short:
                (self._path / _RUNNING).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    # ---- at the start

    def refuse_rows(self, store: Path) -> None:
        """Raise ConfigError for a store with rows, or a directory with checkpoints, that a run does not go on with."""
        rows, step = self._bags.stats().store.rows, self.newest_step()
        if self._settings.resume and (step is not None or not rows):
            return
        if step is not None:
            raise ConfigError(
                f"{store} already holds {counted(rows, 'row')}, and {self._path} a checkpoint of step {step:,} of that "
                f"run: go on with --resume, or remove both to start again"
            )
        if rows and self._settings.resume:
            raise ConfigError(
                f"{store} holds {counted(rows, 'row')}, but {self._path} no checkpoint of the run that left them: name "
                f"the directory that has it with --checkpoints"
            )
        if rows:
            raise ConfigError(
                f"{store} already holds {counted(rows, 'row')}; a run starts from untrained rows, because the MLPs "
                f"that go with stored ones were not kept: name a new or empty directory with --store, or remove this "
                f"one"
            )

    def resume(self, learner: Learner, trained: Trained) -> None:
        """Begin, at the newest checkpoint if that is wanted and there is one.

        Raises ConfigError for options that would lead elsewhere, and as `load_checkpoint`.
        """
        model = nn.ModuleDict({"mlps": learner.model, "bags": self._bags})
        self._optimizer = learner.optimizer
        saves = self._path is not None and (self._settings.resume or self._settings.checkpoint_every is not None)
        if saves:
            self._take_directory()
        if self._settings.resume:
            self._go_on(model, trained)
        if saves:
            self._model = model
            if self._settings.checkpoint_every is not None and self.newest_step() is None:
                self._save(trained, background=False)  # or a kill in the middle of the first one leaves rows without it

    def _take_directory(self) -> None:
        """Have the directory of checkpoints for this run alone, as long as it goes on. Raises ConfigError."""
        assert self._path is not None
        running = self._path / _RUNNING
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._was_killed = running.exists()
            self._lock = os.open(running, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"process {running.read_text().strip() or 'of another run'} is running and saves its checkpoints to "
                f"{self._path}: wait for its end, or name another directory with --checkpoints"
            ) from None
        except OSError as error:
            raise ConfigError(f"--checkpoints {self._path} can be no directory of checkpoints: {error}") from error
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())

    def _go_on(self, model: nn.ModuleDict, trained: Trained) -> None:
        assert self._path is not None
        if self.newest_step() is None:
            self._say(f"nothing to resume in {self._path}: starting at step 0")
            return
        taken = self._bags.steps
        found = load_checkpoint(self._path, model, self._optimizer, check=self._check_options)
        trained.losses = array("f", found.extra["losses"].tolist())
        trained.samples, trained.seconds = found.extra["samples"], found.extra["seconds"]
        self._saved_at = len(trained.losses)
        self._say(_resumed(len(trained.losses), taken, self._was_killed))

    def _check_options(self, extra: Mapping[str, Any]) -> None:
        """Raise ConfigError unless this run goes on where that one would have."""
        now, then = self._options(), extra["options"]
        for name, value in then.items():
            if now[name] != value:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {now[name]}, but the run of the checkpoint had {value}, and would "
                    f"have come to other numbers: resume with that, or start anew with another --store"
                )

    def _options(self) -> dict[str, Any]:
        deciding = {name: getattr(self._settings, name) for name in _DECIDING}
        return {**deciding, "data": f"{self._data} of {counted(self._samples, 'sample')}"}

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    # ---- as it goes

    def newest_step(self) -> int | None:
        """Of the checkpoint that ``--resume`` would go on from; None if there is none."""
        there = [] if self._path is None else list_checkpoints(self._path)
        return there[-1].step if there else None

    def save_if_due(self, trained: Trained) -> None:
        """Save a checkpoint behind every so many steps."""
        every = self._settings.checkpoint_every
        if every is not None and len(trained.losses) % every == 0:
            self._save(trained, background=True)

    def save_last(self, trained: Trained) -> None:
        """Save a checkpoint of where the run ends, if there is none yet."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._settings.checkpoint_every is not None and len(trained.losses) > max(0, self._saved_at):
            self._save(trained, background=False)

    def _save(self, trained: Trained, *, background: bool) -> None:
        if self._model is None or self._path is None:  # it was stopped before it began
            return
        extra = {
            "losses": torch.tensor(trained.losses, dtype=torch.float32),
            "samples": trained.samples,
            "seconds": trained.seconds,
            "options": self._options(),
        }
        if background:  # beside the steps that follow; the next one waits for it, and tells if it failed
            self._pending = save_checkpoint(
                self._path, self._model, self._optimizer, extra=extra, keep_last=KEPT, background=True
            )
        else:
            save_checkpoint(self._path, self._model, self._optimizer, extra=extra, keep_last=KEPT)
        self._saved_at = len(trained.losses)


def _resumed(step: int, taken: int, was_killed: bool) -> str:
    """One line of where a run goes on, and what of the last one is lost."""
    lost = f"; {counted(taken - step, 'step')} after it {'is' if taken - step == 1 else 'are'} discarded"
    line = f"resuming at step {step:,}{lost if taken > step else ''}"
    return f"the last run was killed, and what it did after its last checkpoint is lost: {line}" if was_killed else line

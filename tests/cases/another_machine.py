"""A tier's bookkeeping saved by one process and gone on with by another, whose clocks are a day ahead.

As a program: `another_machine.py FOLDER` loads every FOLDER/*.npz, goes on, and writes what came of it to FOLDER/*.npy.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache import Directory
from tiered_emb.cache.admission import ADMISSIONS, AdmissionRule

DAY_S = 86_400
STEPS, CAPACITY = 100, 150
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_ADMISSION = "admission-"
Batch = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int32]]


def request(
    directory: Directory, tables: NDArray[np.uint32], ids: NDArray[np.int64], counts: NDArray[np.int32]
) -> tuple[int, list[int]]:
    """A batch of distinct rows as training plans it; how many were there, and the ids that leave for the others."""
    slots = np.empty(len(ids), np.int32)
    found = directory.find(tables, ids, slots)
    here, new = slots >= 0, slots < 0
    directory.touch(slots[here], counts[here])
    directory.pin(slots[here])
    admission = directory.admit(tables[new], ids[new], counts[new], np.empty(len(ids) - found, np.int32))
    directory.unpin(slots[here])
    return found, admission.victim_ids.tolist()


def batches(seed: int) -> Iterator[Batch]:
    """Rows of two tables, popular ones more often, with how often each is asked for."""
    random = np.random.default_rng(seed)
    for _ in range(STEPS):
        ids, counts = np.unique(random.zipf(1.1, 80) % 2000, return_counts=True)
        yield (ids % 2).astype(np.uint32), ids, counts.astype(np.int32)


def trained(policy: str) -> Directory:
    """A Directory with a floor and a quota, as it is at step s."""
    directory = _empty(policy)
    for batch in batches(1):
        request(directory, *batch)
    return directory


def _empty(policy: str) -> Directory:
    return Directory(CAPACITY, policy, min_rows={0: 30}, max_rows={1: 100})


def victims(directory: Directory) -> list[int]:
    """Who leaves from then on."""
    return [id for batch in batches(2) for id in request(directory, *batch)[1]]


def asked(name: str) -> AdmissionRule:
    """A rule of admission as it is at step s."""
    rule = ADMISSIONS[name](CAPACITY)
    for batch in batches(1):
        _ask(rule, batch)
    return rule


def answers(rule: AdmissionRule) -> list[bool]:
    """Who may come in from then on."""
    return [answer for batch in batches(2) for answer in _ask(rule, batch)]


def _ask(rule: AdmissionRule, batch: Batch) -> list[bool]:
    out = np.empty(len(batch[0]), np.bool_)
    rule.admits(*batch, out)
    return out.tolist()


def save(file: Path, what: Directory | AdmissionRule) -> None:
    np.savez(file, **what.save())  # type: ignore[arg-type]


def environment() -> dict[str, str]:
    """Of the other process: it finds the sources, and hashes strings otherwise."""
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "7"}


def set_clocks() -> None:
    """Let every clock of this process be a day ahead."""
    for name in _CLOCKS:
        for clock, ahead in ((name, DAY_S), (f"{name}_ns", DAY_S * 10**9)):
            now = getattr(time, clock)
            setattr(time, clock, lambda now=now, ahead=ahead: now() + ahead)


def go_on(folder: Path) -> None:
    """Load all that was saved, and write what comes of it beside."""
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as opened:
            saved = dict(opened)
        if file.stem.startswith(_ADMISSION):
            rule = ADMISSIONS[file.stem.removeprefix(_ADMISSION)](CAPACITY)
            rule.load(saved)
            np.save(file.with_suffix(".npy"), answers(rule))
        else:
            directory = _empty(file.stem)
            directory.load(saved)
            np.save(file.with_suffix(".npy"), victims(directory))


if __name__ == "__main__":
    set_clocks()
    go_on(Path(sys.argv[1]))

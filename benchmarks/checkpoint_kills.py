"""Runs of `tiered-emb train` that are killed and resumed, for `benchmarks.checkpoint`.

Each run is killed by SIGKILL at a random moment of its training, once, and started again with `--resume`. It must end
with the losses and rows of a run that nobody disturbed, to the bit.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_COLUMNS, _NUMBERS = 26, 13
_MOST_TOLD = 2000  # characters of what a run that failed has said
_HASHES = ("losses_sha256", "rows_sha256")


@dataclass
class Kills:
    """What came of it: runs that were killed, that could be resumed, and whose hashes were those of the other one."""

    kills: int = 0
    resumed: int = 0
    identical: int = 0


def write_clicks(path: Path, samples: int) -> None:
    """A file in Criteo's format: popular and rare ids in all columns, labels that depend on some of them."""
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.2, (samples, _COLUMNS)) % 20_000
    numbers = rng.integers(0, 100, (samples, _NUMBERS))
    labels = (ids[:, :3].sum(axis=1) + rng.integers(0, 40, samples)) % 4 == 0
    with open(path, "w", encoding="ascii") as file:
        for label, dense, sparse in zip(labels, numbers, ids, strict=True):
            fields = [str(int(label)), *map(str, dense), *(f"{id:08x}" for id in sparse)]
            file.write("\t".join(fields) + "\n")


def killed_runs(directory: Path, runs: int, samples: int, every: int) -> Kills:
    """Kill and resume so many runs of training on so many samples, with a checkpoint every few steps."""
    data, found, moment = directory / "clicks.tsv", Kills(), random.Random(0)
    write_clicks(data, samples)
    start = time.perf_counter()
    expected = _finished(_started(data, directory / "whole", every))
    whole_s = time.perf_counter() - start
    while found.kills < runs:
        store = directory / f"run-{found.kills}"
        process = _started(data, store, every)
        _kill_after(process, moment.uniform(0.2, 1.0) * whole_s)
        if process.returncode >= 0:  # it was done before; its time is what the next moments are drawn from
            whole_s *= 0.95
            _remove(directory, store)
            continue
        found.kills += 1
        report = _finished(_started(data, store, every))
        found.resumed += bool(report)
        found.identical += report == expected and all(expected.values())
        _remove(directory, store)
        print(f"  {found.identical} of {found.kills} identical", end="\r", file=sys.stderr)
    return found


def _remove(directory: Path, store: Path) -> None:
    for left in directory.glob(f"{store.name}*"):
        shutil.rmtree(left)


def _started(data: Path, store: Path, every: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tiered_emb", "train", "--data", str(data), "--store", str(store)]
    command += ["--batch-size", "128", "--ddr-bytes", "4MiB", "--optimizer", "adam", "--json", "-"]
    command += ["--checkpoint-every", str(every), "--resume"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _kill_after(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()


def _finished(process: subprocess.Popen[str]) -> dict[str, str]:
    """Hashes of a run, once it has ended; nothing if it has failed, which is told."""
    out, said = process.communicate()
    if process.returncode:
        print(f"\n  a run failed with exit code {process.returncode}: {said[-_MOST_TOLD:]}", file=sys.stderr)
        return {}
    report = json.loads(out.splitlines()[-1])
    return {name: str(report.get(name, "")) for name in _HASHES}

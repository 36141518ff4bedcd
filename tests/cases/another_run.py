"""A run that is saved by one process and gone on with by another, whose clocks are a day ahead.

As a program: `another_run.py FOLDER POLICY HBM_BYTES` loads FOLDER/saves, goes on, and prints what was in which slot
after every step.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch

from tests.cases.another_machine import set_clocks
from tiered_emb import Adam, TierConfig, TieredEmbeddingBag, load_checkpoint

STEPS = 25


def make(folder: Path, policy: str, hbm_bytes: int) -> TieredEmbeddingBag:
    admission = "tinylfu" if hbm_bytes else "always"
    tiers = TierConfig(hbm_bytes, "1MiB", folder / "rows", policy, max_rows={"t": 300}, admission=admission)
    return TieredEmbeddingBag(None, 8, mode="sum", tiers=tiers, optimizer=Adam(0.1), seed=1, name="t")


def steps(bag: TieredEmbeddingBag, seed: int) -> list[str]:
    """Train; after each step, which row each slot of each tier has, as a digest."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(STEPS):
        bag(torch.from_numpy(rng.zipf(1.15, (60, 2)) % 3000)).sin().sum().backward()
        digest = hashlib.sha256()
        for tier in bag._lookup.group.tiers:
            slots = tier.directory.occupied()
            digest.update(slots.tobytes() + tier.directory.slot_ids[slots].tobytes())
        found.append(digest.hexdigest())
    return found


if __name__ == "__main__":
    set_clocks()
    with make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])) as module:
        assert load_checkpoint(Path(sys.argv[1]) / "saves", module).cold == ()
        print("\n".join(steps(module, 2)))

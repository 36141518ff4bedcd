"""Time and anonymous memory that constructing a table takes, in a process that does nothing else.

Run as ``python -m benchmarks.memory ROWS DIM``: prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def anonymous_mb() -> float:
    """Anonymous resident memory of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1000
    raise RuntimeError("/proc/self/status has no RssAnon line: this figure needs Linux")


def construct(rows: int, dim: int) -> dict[str, float]:
    """Seconds and MB of constructing a bag of ``rows`` x ``dim``, above the imported interpreter."""
    import tiered_emb

    tiers = tiered_emb.TierConfig(hbm_bytes=0, ddr_bytes="1GiB", store=None)
    rule = tiered_emb.RowwiseAdagrad(lr=0.01)
    before, start = anonymous_mb(), time.perf_counter()
    bag = tiered_emb.TieredEmbeddingBag(rows, dim, mode="sum", tiers=tiers, optimizer=rule, seed=0)
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "mb": anonymous_mb() - before}
    del bag
    return figures


def construct_in_new_process(rows: int, dim: int) -> dict[str, float]:
    """``construct`` in a fresh interpreter."""
    command = [sys.executable, "-m", "benchmarks.memory", str(rows), str(dim)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    print(json.dumps(construct(int(sys.argv[1]), int(sys.argv[2]))))

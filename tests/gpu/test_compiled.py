"""Every kernel compiled for a GPU, which takes none: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    *("_pool", "_pool_max", "_gather", "_dots", "_sum_gradients", "_sum_gradients_max", "_copy_rows"),
    *("_sgd", "_adagrad", "_rowwise_adagrad", "_adam", "_rowwise_adam", "_lamb", "_ftrl"),
    *("_pack_halves", "_unpack_halves", "_pack_int8", "_unpack_int8"),
}


def test_every_kernel_compiles_to_arithmetic_that_rounds_as_the_hosts(tmp_path: Path) -> None:
    """No fused multiply-add, no approximate division or root, no number flushed to zero."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_gpu.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = [line.split() for line in result.stdout.splitlines()]
    assert {name for name, *_ in found} == KERNELS
    assert [line for line in found if len(line) > 1] == []

"""The benchmark of the GPU: all of its cases, with sizes that the interpreter can do."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu as benchmark
from benchmarks.gpu_kernels import batch_of, row_cases, same_bits
from benchmarks.report import Report

pytest.importorskip("triton")
from tiered_emb.kernels import gpu

# The interpreter computes what is masked, with numpy, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_every_kernel_is_checked_and_timed(tmp_path: Path, device: torch.device) -> None:
    parser = argparse.ArgumentParser()
    benchmark.add_options(parser)
    sizes = "--rows 1000 --dim 4 --ids 32 --samples 8 --features 2 --warm-up 1 --steps 1 --rounds 2"
    report = Report("gpu", ("kernel", "", "", ""), figures={"gpu": "a device"})
    benchmark.measure_on(device, parser.parse_args([*sizes.split(), "--directory", str(tmp_path)]), report)
    assert report.figures["different"] == []
    assert not report.failed
    kernels = report.figures["kernels"]
    assert isinstance(kernels, dict)
    assert len(kernels) == len(report.lines) == 9 + 8 + 6
    assert all(isinstance(one, dict) and None not in one.values() for one in kernels.values())


def test_other_bits_are_seen(device: torch.device) -> None:
    batch = batch_of(torch.arange(6).numpy(), 10, 4, 2, device)
    case = next(row_cases(gpu, batch))
    assert same_bits(case)
    assert not same_bits(replace(case, theirs=lambda: [one + 1e-6 for one in case.theirs()]))

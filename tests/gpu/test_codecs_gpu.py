"""Rows packed and unpacked in Triton and by the host's codecs, byte by byte; see `conftest` for where."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage.codecs import CODECS, Draws
from storage.schema import RowSchema

pytest.importorskip("triton")
from tiered_emb.kernels import gpu_codecs

# The interpreter computes what is masked, with numpy, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAME = pytest.mark.parametrize("name", gpu_codecs.NAMES)
DIM = pytest.mark.parametrize("dim", [1, 3, 8, 33, 64, 200])
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 3e-42, 6e-8, 2.0**-25, 65504.0, 65519.0, 65520.0, 3.4e38, -3.4e38, 1e-5]


def rows_of(n: int, width: int) -> np.ndarray:
    """Rows of many sizes; some hold special numbers, some one number only, some zeros of both signs."""
    rng = np.random.default_rng(width)
    rows = (rng.standard_normal((n, width)) * 10.0 ** rng.integers(-8, 6, (n, 1))).astype(np.float32)
    special = rng.random((n, width)) < 0.1 * (rng.random((n, 1)) < 0.5)
    rows[special] = rng.choice(SPECIAL, special.sum()).astype(np.float32)
    rows[0], rows[1] = 0.1, np.where(rng.random(width) < 0.5, 0.0, -0.0)
    rows[2] = np.abs(rows[2]) * np.where(rng.random(width) < 0.5, 0.0, 1.0)
    rows[3, ::2] = -0.0
    return rows


def draws_of(n: int, stochastic: bool) -> Draws:
    rng = np.random.default_rng(n)
    steps = rng.integers(1, 1 << 32, n, dtype=np.uint32) * np.uint32(stochastic)
    steps[::5] = 0  # among others, rows rounded to nearest
    return Draws(
        rng.integers(0, 1 << 64, n, dtype=np.uint64),
        rng.integers(0, 1 << 32, n, dtype=np.uint32),
        rng.integers(-(1 << 63), 1 << 63, n, dtype=np.int64),
        steps,
    )


def bytes_of(name: str, dim: int) -> int:
    return RowSchema(CODECS[name].columns(dim)).row_bytes


@NAME
@DIM
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_packed_bytes_are_the_hosts(name: str, dim: int, stochastic: bool, device: torch.device) -> None:
    n, state = 40, 2
    rows, draws = rows_of(n, dim + state), draws_of(n, stochastic)
    expected = np.full((n, bytes_of(name, dim) + 4 * state), 0xAB, np.uint8)
    got = torch.from_numpy(expected.copy()).to(device)
    CODECS[name].pack(rows, dim, expected, draws)
    told = gpu_codecs.DeviceDraws.of(draws, device)
    gpu_codecs.pack(name, torch.from_numpy(rows).to(device), dim, got, told)
    assert np.array_equal(got.cpu().numpy(), expected)


@NAME
@DIM
def test_unpacked_numbers_are_the_hosts(name: str, dim: int, device: torch.device) -> None:
    n, state = 40, 2
    packed = np.random.default_rng(dim).integers(0, 256, (n, bytes_of(name, dim) + 4 * state), dtype=np.uint8)
    packed[: n // 2] = 0  # those below are numbers that a codec gives, the others any bytes
    CODECS[name].pack(rows_of(n, dim)[: n // 2], dim, packed[: n // 2], Draws.none(n // 2))
    expected = np.full((n, dim + state), 7, np.float32)
    got = torch.from_numpy(expected.copy()).to(device)
    CODECS[name].unpack(packed, dim, expected)
    gpu_codecs.unpack(name, torch.from_numpy(packed).to(device), dim, got)
    same = got.cpu().numpy().view(np.uint32) == expected.view(np.uint32)
    arithmetic = name == "int8"  # whose NaN is that of a sum, of which the bits are the processor's
    assert (same | (arithmetic & np.isnan(expected) & np.isnan(got.cpu().numpy()))).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_half_comes_back(name: str, device: torch.device) -> None:
    packed = np.arange(1 << 16, dtype=np.uint16).reshape(1024, 64).view(np.uint8)
    numbers = torch.empty(1024, 64, device=device)
    gpu_codecs.unpack(name, torch.from_numpy(packed).to(device), 64, numbers)
    again = torch.empty(1024, 128, dtype=torch.uint8, device=device)
    gpu_codecs.pack(name, numbers, 64, again, gpu_codecs.DeviceDraws.of(Draws.none(1024), device))
    numeric = ~numbers.isnan().cpu().numpy()
    assert numeric.sum() > 60_000
    assert np.array_equal(again.cpu().numpy().view(np.uint16)[numeric], packed.view(np.uint16)[numeric])


@NAME
def test_no_rows_are_no_work(name: str, device: torch.device) -> None:
    rows, packed = torch.empty(0, 3, device=device), torch.empty(0, 16, dtype=torch.uint8, device=device)
    gpu_codecs.pack(name, rows, 3, packed, gpu_codecs.DeviceDraws.of(Draws.none(0), device))
    gpu_codecs.unpack(name, packed, 3, rows)
    assert len(packed) == len(rows) == 0


def test_all_lossy_codecs_have_a_twin() -> None:
    assert set(gpu_codecs.NAMES) == {name for name, codec in CODECS.items() if codec.lossy}

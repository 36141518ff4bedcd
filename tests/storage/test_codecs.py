"""Every codec: rounding against independent formulas, what comes back, draws that are pure and fair, odd numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from storage.codecs import CODECS, Codec, Draws
from storage.schema import RowSchema

Rows = npt.NDArray[np.float32]


def bf16(rows: Rows, scale_of: Rows) -> npt.NDArray[np.float64]:
    return torch.from_numpy(rows).bfloat16().double().numpy()


def fp16(rows: Rows, scale_of: Rows) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return np.clip(rows.astype(np.float16).astype(np.float64), -65504, 65504)


def int8(rows: Rows, scale_of: Rows) -> npt.NDArray[np.float64]:
    low, high = scale_of.min(1, keepdims=True).astype(np.float64), scale_of.max(1, keepdims=True)
    scale = ((high - low) / 255).astype(np.float32).astype(np.float64)
    steps = np.rint((rows - low) / np.where(scale > 0, scale, 1)).clip(0, 255)
    return low + steps * scale


# Name, what nearest rounding comes to, and a gap (N, D): more than half of the distance from a number to the next one
# that the codec has, and less than two.
CASES = [
    ("fp32", lambda rows, scale_of: rows.astype(np.float64), lambda rows: 0 * rows),
    ("bf16", bf16, lambda rows: np.abs(rows) * np.float32(0.9 / 128)),
    ("fp16", fp16, lambda rows: np.maximum(np.abs(rows) * np.float32(0.9 / 1024), np.float32(5.5e-8))),
    ("int8", int8, lambda rows: np.broadcast_to(np.ptp(rows, 1, keepdims=True) * np.float32(0.9 / 255), rows.shape)),
]
CODEC = pytest.mark.parametrize(
    ("codec", "nearest", "gap"), [(CODECS[name], *functions) for name, *functions in CASES], ids=[c[0] for c in CASES]
)
DIM = pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 9, 64, 1000])
ROOM = 5  # bytes of other columns in a packed row


def packed_bytes(codec: Codec, dim: int) -> int:
    return RowSchema(codec.columns(dim)).row_bytes


def there_and_back(codec: Codec, rows: Rows, draws: Draws | None = None) -> Rows:
    n, dim = rows.shape
    wide = np.concatenate([rows, np.full((n, 2), 7, np.float32)], 1)  # state, which is no concern of a codec
    packed = np.full((n, packed_bytes(codec, dim) + ROOM), 0xEE, np.uint8)
    codec.pack(wide, dim, packed, Draws.none(n) if draws is None else draws)
    assert (packed[:, -ROOM:] == 0xEE).all()
    out = np.full((n, dim + 2), 9, np.float32)
    codec.unpack(packed, dim, out)
    assert (out[:, dim:] == 9).all()
    return np.ascontiguousarray(out[:, :dim])


def draws(n: int, *, seed: int = 5, step: int = 3, first: int = 0, table: int = 1) -> Draws:
    ids = np.arange(first, first + n)
    return Draws(np.full(n, seed, np.uint64), np.full(n, table, np.uint32), ids, np.full(n, step, np.uint32))


def some_rows(dim: int, n: int = 500) -> Rows:
    rng = np.random.default_rng(dim)
    sizes = 10.0 ** rng.integers(-9, 5, (n, 1))
    return np.asarray(rng.standard_normal((n, dim)) * sizes, np.float32)


def test_every_codec_is_tested() -> None:
    assert [name for name, *_ in CASES] == list(CODECS) == [codec.name for codec in CODECS.values()]


@CODEC
@DIM
def test_nearest(codec: Codec, nearest: Any, gap: Any, dim: int) -> None:
    rows = some_rows(dim)
    np.testing.assert_allclose(there_and_back(codec, rows), nearest(rows, rows), rtol=3e-7, atol=0)
    assert codec.lossy or (there_and_back(codec, rows) == rows).all()


@CODEC
@DIM
def test_stochastic_goes_to_one_of_the_two_neighbours(codec: Codec, nearest: Any, gap: Any, dim: int) -> None:
    rows = some_rows(dim)
    step = np.maximum(*(np.abs(nearest(rows, rows) - nearest(rows + sign * gap(rows), rows)) for sign in (-1, 1)))
    found = there_and_back(codec, rows, draws(len(rows)))
    assert (np.abs(found - rows.astype(np.float64)) <= step * (1 + 1e-6)).all()
    if codec.lossy and dim >= 64:
        assert (found != there_and_back(codec, rows)).mean() > 0.1


@CODEC
@DIM
def test_what_was_packed_before_stays(codec: Codec, nearest: Any, gap: Any, dim: int) -> None:
    """Also by draws: a row that moves up and down and is not changed does not wander."""
    once = there_and_back(codec, some_rows(dim), draws(500))
    for step in (0, 1, 2):
        again = there_and_back(codec, once, draws(500, step=step))
        if len(codec.columns(dim)) > 1:  # a scale is a rounded number
            np.testing.assert_allclose(again, once, rtol=1e-6, atol=1e-6 * float(np.abs(once).max()))
        else:
            assert (again == once).all()


@CODEC
def test_draws_are_a_function_of_the_row_alone(codec: Codec, nearest: Any, gap: Any) -> None:
    rows = some_rows(24)
    whole = there_and_back(codec, rows, draws(500))
    parts = [there_and_back(codec, rows[i : i + 50], draws(50, first=i)) for i in range(0, 500, 50)]
    assert (np.concatenate(parts) == whole).all()
    if codec.lossy:
        for other in (draws(500, seed=6), draws(500, step=4), draws(500, first=1), draws(500, table=2)):
            assert (there_and_back(codec, rows, other) != whole).mean() > 0.1


@CODEC
def test_draws_are_fair(codec: Codec, nearest: Any, gap: Any) -> None:
    """The mean of many roundings of a number is the number, wherever it lies between two steps."""
    rows = np.empty((20_000, 16), np.float32)
    rows[:] = np.linspace(1, 1.04, 16) * np.array([1, -1] * 8)
    found = there_and_back(codec, rows, draws(len(rows)))
    step = float(gap(rows[:1]).max()) / 0.9
    assert (np.abs(found.mean(0, dtype=np.float64) - rows[0]) < 5 * step * 0.5 / np.sqrt(len(rows)) + 1e-7).all()


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_small_halves_are_fair_too(name: str) -> None:
    rows = np.full((20_000, 3), 1e-5 / 3, np.float32)  # subnormal in fp16
    rows[:, 0], rows[:, 2] = -2e-8, 3.01e-5
    found = there_and_back(CODECS[name], rows, draws(len(rows)))
    step = {"fp16": 6e-8, "bf16": 2.4e-7, "int8": 1.2e-7}[name]
    assert (np.abs(found.mean(0, dtype=np.float64) - rows[0]) < 5 * step * 0.5 / np.sqrt(len(rows))).all()


def test_case_12_small_updates_are_not_lost() -> None:
    """2^-13 added to 10,000 fp16 rows of 1.0, whose neighbours are 2^-10 above: to nearest nothing would come of it."""
    rows = np.full((10_000, 8), 1 + 2.0**-13, np.float32)
    assert (there_and_back(CODECS["fp16"], rows) == 1).all()
    found = there_and_back(CODECS["fp16"], rows, draws(len(rows)))
    assert set(np.unique(found)) == {1.0, 1 + 2.0**-10}
    assert abs(found.mean(dtype=np.float64) - 1 - 2.0**-13) < 5 * 2.0**-10 * np.sqrt(7 / 64 / rows.size)
    assert (there_and_back(CODECS["fp16"], rows, draws(len(rows))) == found).all()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("step", [0, 3])
def test_odd_numbers(name: str, step: int) -> None:
    largest = np.finfo(np.float32).max
    odd = np.array(
        [[np.nan, np.inf, -np.inf, 0.0, -0.0, largest, -largest, 1e-45, -1e-45, 65519.0, 65520.0]], np.float32
    )
    found = there_and_back(CODECS[name], odd, draws(1, step=step))[0]
    assert np.isnan(found[0]) and found[1] == np.inf and found[2] == -np.inf
    assert found[3] == 0 and not np.signbit(found[3]) and found[4] == 0 and np.signbit(found[4])
    assert np.isfinite(found[3:]).all()  # what is finite stays so
    assert found[5] > 6e4 and found[6] < -6e4


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_an_int8_row_of_odd_numbers_is_known_by_it(odd: float) -> None:
    rows = np.ones((3, 5), np.float32)
    rows[1, 3] = odd
    found = there_and_back(CODECS["int8"], rows, draws(3))
    assert np.isnan(found[1]).all() and (found[[0, 2]] == 1).all()


def test_int8_rows_of_one_number_and_of_the_largest() -> None:
    largest = np.finfo(np.float32).max
    rows = np.array([[3.5] * 4, [largest, -largest, 0, 1]], np.float32)
    found = there_and_back(CODECS["int8"], rows)
    assert (found[0] == 3.5).all()
    np.testing.assert_allclose(found[1], rows[1], rtol=1e-6, atol=float(largest) / 200)

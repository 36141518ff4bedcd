from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from storage.philox import philox as product_philox
from tiered_emb.init import Constant, Initializer, Normal, Uniform

IDS = np.array([-(2**63), -5, -1, 0, 1, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1], np.int64)


def philox(counter: list[int], seed: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in plain Python, written from the paper."""
    c, k = list(counter), list(seed)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def words(seed: int, table: int, row_id: int, block: int) -> list[int]:
    bits, number = seed % (1 << 64), row_id % (1 << 64)
    return philox([number % (1 << 32), number >> 32, table, block], (bits % (1 << 32), bits >> 32))


def fill(
    init: Initializer, seed: int, tables: list[int], ids: npt.NDArray[np.int64], dim: int
) -> npt.NDArray[np.float32]:
    out = np.full((len(ids), dim), np.nan, np.float32)
    init.fill(seed, np.array(tables, np.uint32), ids, out)
    return out


# From kat_vectors of Random123 1.14: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], seed: list[int], expected: list[int]) -> None:
    for function in (product_philox, product_philox.py_func):
        assert [int(word) for word in function(*map(np.uint64, counter), *map(np.uint64, seed))] == expected
    assert philox(counter, (seed[0], seed[1])) == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, 2**64 - 1])
def test_uniform_is_philox_over_seed_table_id_column(seed: int) -> None:
    got = fill(Uniform(-2.0, 3.0), seed, [7] * len(IDS), IDS, 6)
    for row, row_id in zip(got, IDS.tolist(), strict=True):
        units = [(word >> 8) * 2.0**-24 for block in range(2) for word in words(seed, 7, row_id, block)]
        assert row.tolist() == [float(np.float32(-2.0 + unit * 5.0)) for unit in units[:6]]


def test_normal_is_box_muller_on_pairs_of_words() -> None:
    got = fill(Normal(0.5, 2.0), 11, [2**32 - 1] * len(IDS), IDS, 7)
    for row, row_id in zip(got, IDS.tolist(), strict=True):
        expected = []
        for block in range(2):
            w = words(11, 2**32 - 1, row_id, block)
            for a, b in ((w[0], w[1]), (w[2], w[3])):
                radius, angle = math.sqrt(-2 * math.log((a + 1) * 2.0**-32)), 2 * math.pi * b * 2.0**-32
                expected += [0.5 + 2 * radius * math.cos(angle), 0.5 + 2 * radius * math.sin(angle)]
        np.testing.assert_allclose(row, expected[:7], rtol=1e-6, atol=1e-7)


def test_constant() -> None:
    assert fill(Constant(-0.25), 3, [1, 1], IDS[:2], 3).tolist() == [[-0.25] * 3] * 2


@pytest.mark.parametrize("init", [Uniform(-1, 1), Normal()])
class TestPurity:
    def test_order_and_company_do_not_matter(self, init: Initializer) -> None:
        whole = fill(init, 5, [3] * len(IDS), IDS, 9)
        backwards = fill(init, 5, [3] * len(IDS), IDS[::-1].copy(), 9)[::-1]
        alone = np.concatenate([fill(init, 5, [3], IDS[i : i + 1], 9) for i in range(len(IDS))])
        assert whole.tobytes() == backwards.tobytes() == alone.tobytes()

    @pytest.mark.parametrize("dim", [1, 2, 3, 7, 64])
    def test_a_smaller_dimension_is_a_prefix(self, init: Initializer, dim: int) -> None:
        assert np.array_equal(fill(init, 5, [3] * len(IDS), IDS, dim), fill(init, 5, [3] * len(IDS), IDS, 64)[:, :dim])

    def test_seed_table_and_id_each_matter(self, init: Initializer) -> None:
        rows = [fill(init, seed, [table] * len(IDS), IDS, 4) for seed in (0, 1, 1 << 32) for table in (0, 1)]
        assert len(np.unique(np.concatenate(rows), axis=0)) == 6 * len(IDS)

    def test_a_view_of_wider_rows(self, init: Initializer) -> None:
        rows = np.zeros((len(IDS), 12), np.float32)
        init.fill(5, np.full(len(IDS), 3, np.uint32), IDS, rows[:, 2:9])
        assert np.array_equal(rows[:, 2:9], fill(init, 5, [3] * len(IDS), IDS, 7))
        assert not rows[:, :2].any()
        assert not rows[:, 9:].any()

    def test_no_rows(self, init: Initializer) -> None:
        assert fill(init, 5, [], IDS[:0], 4).shape == (0, 4)


def test_moments() -> None:
    ids = np.arange(100_000)
    tables = [0] * len(ids)
    uniform = fill(Uniform(-1.0, 1.0), 0, tables, ids, 4)
    assert abs(uniform.mean()) < 0.005
    assert abs(uniform.var() - 1 / 3) < 0.005
    assert uniform.min() >= -1
    assert uniform.max() <= 1
    normal = fill(Normal(1.0, 3.0), 0, tables, ids, 4)
    assert abs(normal.mean() - 1) < 0.02
    assert abs(normal.std() - 3) < 0.02
    assert abs(np.corrcoef(normal.T) - np.eye(4)).max() < 0.02


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1.0, -1.0), "low must not be above high"),
        (lambda: Normal(0.0, -1.0), "std must not be negative"),
        (lambda: Constant(float("nan")), "value is nan"),
        (lambda: Uniform(0.0, float("inf")), "high is inf"),
    ],
)
def test_numbers_that_make_no_sense(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]

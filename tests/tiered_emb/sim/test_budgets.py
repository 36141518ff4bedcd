from __future__ import annotations

import pytest

from tiered_emb.cache import Directory
from tiered_emb.errors import ConfigError
from tiered_emb.sim import Curve, gains, rows_for
from tiered_emb.sim.laboratory import steps_around


def test_a_budget_covers_rows_and_bookkeeping() -> None:
    rows = rows_for([100_000, 1 << 30], 64, ["lru", "lfu", "belady"])
    for policy in ("lru", "lfu"):
        for budget, held in zip((100_000, 1 << 30), rows[policy], strict=True):
            assert held * 64 + Directory.bytes_for(held, policy) <= budget
            assert (held + 1) * 64 + Directory.bytes_for(held + 1, policy) > budget
    assert rows["lfu"][1] < rows["lru"][1]
    assert rows["belady"] == rows["lru"]
    assert rows_for([100_000], 64, ["belady"])["belady"] == rows["lru"][:1]


def test_what_a_step_saves() -> None:
    curve = Curve("lru", (10, 20, 40), (1000, 600, 600), 4000, 0.1)
    first, second = gains(curve, [1 << 20, 3 << 20, 7 << 20])
    assert (first.budget_bytes, first.more_bytes, first.misses, first.saved) == (1 << 20, 2 << 20, 1000, 400)
    assert (first.saved_per(1 << 20), first.relative) == (200.0, 0.4)
    assert (second.saved, second.saved_per(1 << 30), second.relative) == (0, 0.0, 0.0)


def test_nothing_is_left_to_save() -> None:
    (gain,) = gains(Curve("lru", (1, 2), (0, 0), 5, 0.1), [10, 20])
    assert gain.relative == 0.0


def test_one_budget_is_compared_with_others() -> None:
    assert steps_around(4 << 30) == tuple(n << 30 for n in (1, 2, 4, 6, 8, 16))
    assert steps_around(1) == (1, 2, 4)


@pytest.mark.parametrize(
    ("budget", "row_bytes", "message"),
    [
        (100, 64, r"a budget of 100 bytes holds no row of 64 bytes and its bookkeeping under lru; expected \d+ bytes"),
        (1 << 30, 0, "a row has 0 bytes; expected 1 or more"),
    ],
)
def test_budgets_that_hold_nothing_are_refused(budget: int, row_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_for([budget], row_bytes, ["lru"])


def test_the_least_budget_in_the_error_does() -> None:
    with pytest.raises(ConfigError) as refused:
        rows_for([1], 64, ["lru"])
    least = int(str(refused.value).split("expected ")[1].split()[0])
    assert rows_for([least], 64, ["lru"])["lru"] == [1]

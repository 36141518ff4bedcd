from __future__ import annotations

import numpy as np
import pytest

from tiered_emb.sim import Requests, rows_for
from tiered_emb.sim.laboratory import Question, study

IDS = (np.random.default_rng(0).zipf(1.2, 2000) % 300).astype(np.int64)
REQUESTS = Requests.of(np.zeros(len(IDS), np.uint32), IDS)


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize(("rate", "exact"), [(None, True), (0.5, True), (0.5, False)])
def test_as_many_steps_are_told_as_were_announced(rate: float | None, control: bool, exact: bool) -> None:
    question = Question(("lru", "fifo"), sizes=(5, 50), rate=rate, exact=exact, control=control)
    steps: list[int] = []
    study("shop", REQUESTS, question, lambda: steps.append(1))
    assert len(steps) == question.replays() > 0


def test_a_budget_over_a_recorded_sample_is_its_share_of_the_rows() -> None:
    budgets = (16 << 10, 32 << 10)
    (rows,) = rows_for(budgets, 64, ["lru"]).values()
    whole, tenth = (
        study("shop", REQUESTS, Question(("lru",), budgets=budgets, row_bytes=64), kept=k) for k in (1, 0.1)
    )
    assert list(whole.curves["lru"].sizes) == rows
    assert list(tenth.curves["lru"].sizes) == [held // 10 for held in rows]

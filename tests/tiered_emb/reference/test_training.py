from __future__ import annotations

import hashlib
import signal
import struct
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from storage.lmdb_store import LmdbStore
from tiered_emb.config import TableConfig
from tiered_emb.errors import ConfigError, DataError
from tiered_emb.init import Uniform
from tiered_emb.optim import RULES
from tiered_emb.plan import JaggedIds
from tiered_emb.reference import job
from tiered_emb.reference.at_rest import RowsAtRest
from tiered_emb.reference.check import IDENTICAL, Model, Trail, check_dense
from tiered_emb.reference.dlrm import Shape
from tiered_emb.reference.interrupt import Interrupted, StopSignal
from tiered_emb.reference.job import run_job
from tiered_emb.reference.report import Report
from tiered_emb.reference.settings import Settings, TrainOptions, decide
from tiered_emb.reference.stream import ClickBatch, Columns, Feature, Part, rebatch
from tiered_emb.reference.training import DivergedError, Learner, evaluate, fingerprints
from tiered_emb.testing import DenseOracle

NAMES = ("user", "item")


class Clicks:
    """640 made-up samples of two features, user ids with gaps (empty bags); `on_batch` is called before each batch."""

    name = "clicks"
    features = (Feature("user"), Feature("item", 400, "mean"))
    dense_width = 3

    def __init__(self, on_batch: Callable[[int], None] = lambda number: None) -> None:
        rng = np.random.default_rng(0)
        ids = np.stack([rng.zipf(1.15, 640) % (1 << 40), rng.zipf(1.3, 640) % 400], axis=1).astype(np.int64)
        dense = rng.standard_normal((640, 3)).astype(np.float32)
        labels = (rng.random(640) < 0.2 + 0.6 * (ids[:, 1] % 2)).astype(np.float32)
        self.columns = Columns(labels, dense, ids, rng.random((640, 2)) < 0.9)
        self._on_batch = on_batch

    def samples(self, part: Part) -> int:
        return 576 if part is Part.TRAIN else 64

    def batches(self, part: Part, batch_size: int) -> Iterator[ClickBatch]:
        first, stop = (0, 576) if part is Part.TRAIN else (576, 640)
        for number, columns in enumerate(rebatch([self.columns.part(first, stop)], batch_size)):
            self._on_batch(number)
            yield columns.batch(NAMES)


@pytest.fixture
def clicks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "open_stream", lambda settings, console: Clicks())


def settings(store: Path | None, **options: object) -> Settings:
    given = {
        "data": "clicks",
        "dim": 8,
        "batch_size": 32,
        "ddr_bytes": "1MiB",
        "store": None if store is None else str(store),
    } | options
    return decide(TrainOptions(**given))  # type: ignore[arg-type]


def run(chosen: Settings, **what: bool) -> Report:
    return run_job(chosen, Console(stderr=True, quiet=True), **what)


def test_rebatch_keeps_every_sample_in_order() -> None:
    whole = Clicks().columns
    cuts = [0, 1, 1, 70, 300, 640]
    blocks = [whole.part(first, stop) for first, stop in pairwise(cuts)]
    pieces = list(rebatch(blocks, 64))
    assert [len(piece) for piece in pieces] == [64] * 10
    assert np.array_equal(np.concatenate([piece.ids for piece in pieces]), whole.ids)
    assert np.array_equal(np.concatenate([piece.labels for piece in pieces]), whole.labels)


def test_columns_become_bags_feature_by_feature() -> None:
    columns = Columns(
        np.zeros(3, np.float32),
        np.zeros((3, 1), np.float32),
        np.array([[7, 1], [8, 2], [9, 3]], np.int64),
        np.array([[True, False], [False, True], [True, True]]),
    )
    sparse = columns.batch(NAMES).sparse
    expected = JaggedIds.from_dict(
        {
            "user": (torch.tensor([7, 9]), torch.tensor([1, 0, 1])),
            "item": (torch.tensor([2, 3]), torch.tensor([0, 1, 1])),
        }
    )
    assert torch.equal(sparse.ids, expected.ids)
    assert torch.equal(sparse.offsets, expected.offsets)


def test_a_run_learns_and_reports(tmp_path: Path, clicks: None) -> None:
    report = run(settings(tmp_path / "rows", epochs=3), hashes=True)
    found = report.to_json()
    assert found["auc"] > 0.6
    assert (found["samples"], found["steps"]) == (3 * 576, 54)
    assert found["store"]["rows"] > 150
    assert {"name", "capacity_bytes", "bytes", "peak_bytes", "hits", "misses", "evictions", "write_backs"} <= set(
        found["tiers"][0]
    )
    assert "dense_check" not in found


@pytest.mark.parametrize("optimizer", sorted(RULES))
def test_tiers_policies_and_rules_are_identical_to_whole_tables(tmp_path: Path, clicks: None, optimizer: str) -> None:
    found = set()
    row_bytes = 4 * (32 + RULES[optimizer](lr=0.1).state_width(32))
    ddr = str(55_000 + 250 * row_bytes)  # bookkeeping, and fewer rows than the clicks touch
    for number, (hbm, policy) in enumerate([("0", "lru"), ("28KiB", "lru"), ("28KiB", "lfu")]):
        tiers = {"hbm_bytes": hbm, "ddr_bytes": ddr, "policy": policy}
        chosen = settings(tmp_path / str(number), dim=32, optimizer=optimizer, epochs=2, **tiers)
        report = run(chosen, check=True)
        assert report.dense_check == IDENTICAL
        assert all(tier.evictions > 0 for tier in report.stats.tiers)
        found.add((report.hashes["losses_sha256"], report.hashes["rows_sha256"]))
    assert len(found) == 1
    other_seed = run(settings(tmp_path / "other", dim=32, optimizer=optimizer, seed=1, epochs=2), hashes=True)
    assert other_seed.hashes["losses_sha256"] not in {losses for losses, _ in found}


# In memory that the store's index does not take from the tier: when it does, a moment's need decides by how much.
QUOTAS = {"ddr_bytes": "1MiB", "max_rows": ("user=80", "item=80")}


@pytest.mark.parametrize("tiers", [QUOTAS, {"ddr_bytes": "80KB", "hbm_bytes": "28KiB"}], ids=["ddr", "hbm"])
def test_rows_of_a_precision_are_reported_as_they_rest(tmp_path: Path, clicks: None, tiers: dict[str, object]) -> None:
    found = {}
    for precision, row_bytes in (("fp32", 132), ("bf16", 68), ("fp16", 68), ("int8", 44)):  # state: 4 bytes of a row
        chosen = settings(tmp_path / precision, dim=32, epochs=2, precision=precision, **tiers)
        found[precision] = report = run(chosen, hashes=True)
        assert report.to_json()["store"]["row_bytes"] == row_bytes
        assert report.settings["precision"] == precision and report.evaluation.auc > 0.6
        with LmdbStore(tmp_path / precision, read_only=True) as store:
            assert {ref.schema.row_bytes for ref in store.tables()} == {row_bytes}
    again = run(settings(tmp_path / "again", dim=32, epochs=2, precision="int8", **tiers), hashes=True)
    assert again.hashes == found["int8"].hashes
    assert len({report.hashes["rows_sha256"] for report in found.values()}) == 4


def test_without_a_store_nothing_is_left(clicks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(settings(None)).stats.store.rows > 0
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_rows_is_refused_and_left_as_it_is(tmp_path: Path, clicks: None) -> None:
    rows = run(settings(tmp_path / "rows")).stats.store.rows
    with pytest.raises(ConfigError, match=rf"rows already holds {rows} rows; a run starts from untrained rows"):
        run(settings(tmp_path / "rows"))
    with LmdbStore(tmp_path / "rows") as store:
        assert store.stats().rows == rows


def interrupt_at(step: int) -> Callable[[int], None]:
    return lambda number: signal.raise_signal(signal.SIGINT) if number == step else None


def test_ctrl_c_ends_the_run_between_steps_and_leaves_a_store_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "open_stream", lambda chosen, console: Clicks(interrupt_at(5)))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        Interrupted, match=r"interrupted after step 3; .*rows holds \d+ rows of the stopped run, .*: remove it"
    ):
        run(settings(tmp_path / "rows"))
    assert signal.getsignal(signal.SIGINT) is before
    with LmdbStore(tmp_path / "rows") as store:
        assert store.stats().rows > 50


def test_a_row_gradient_that_is_not_finite_ends_a_run_as_diverged(
    tmp_path: Path, clicks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(self: Learner, loss: torch.Tensor) -> None:
        (loss * 1e38 * 1e38).backward()  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Learner, "learn", overflow)
    with pytest.raises(DivergedError, match=r"a gradient of step 1 is not finite; a smaller --lr than 0.05 may help"):
        run(settings(tmp_path / "rows"))


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_bad_data_in_mid_run_leaves_a_store_that_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        if number == 7:
            raise DataError("clicks.tsv, line 225: field 2 (I1) is 'x'")

    monkeypatch.setattr(job, "open_stream", lambda chosen, console: Clicks(fail))
    with pytest.raises(
        DataError, match=r"line 225: .*'x'; .*rows holds \d+ rows of the stopped run, .*: remove it to start again"
    ):
        run(settings(tmp_path / "rows"))
    with LmdbStore(tmp_path / "rows") as store:
        assert store.stats().rows > 50


class TestCheck:
    """The check sees what it is there for; the tiered run's part is played by a DenseOracle of its own."""

    TABLES = (
        TableConfig("user", None, 8, init=Uniform(-0.05, 0.05)),
        TableConfig("item", 400, 8, mode="mean", init=Uniform(-0.05, 0.05)),
    )
    MODEL = Model(
        TABLES,
        RULES["rowwise_adagrad"](lr=0.05),
        0,
        lambda: Learner(Shape(NAMES, 3, 8), 0, torch.device("cpu")),
    )

    def batches(self) -> list[ClickBatch]:
        return list(Clicks().batches(Part.TRAIN, 32))

    def trained(
        self, disturb: Callable[[int, DenseOracle], None] = lambda step, bags: None
    ) -> tuple[Trail, DenseOracle]:
        bags = DenseOracle(self.TABLES, optimizer=self.MODEL.rule, seed=0)
        learner, losses, prints = self.MODEL.learner(), array("f"), []
        for step, batch in enumerate(self.batches()):
            disturb(step, bags)
            pooled = bags(batch.sparse)
            prints.append(fingerprints(pooled, NAMES))
            loss = learner.loss(batch, pooled)
            learner.learn(loss)
            losses.append(loss.item())
        return Trail(losses, prints), bags

    def verdict(self, trail: Trail, bags: DenseOracle) -> str:
        blocks = ((name, ids[::-1], rows[::-1]) for name, (ids, rows) in bags.touched().items())
        with RowsAtRest(blocks) as rows:
            return check_dense(self.MODEL, self.batches(), trail, rows)

    def test_equal_runs(self) -> None:
        assert self.verdict(*self.trained()) == IDENTICAL

    def test_one_bit_of_one_row(self) -> None:
        bit = torch.tensor([1], dtype=torch.int32)

        def disturb(step: int, bags: DenseOracle) -> None:
            if step == 9:
                ids = torch.tensor([1])
                row = bags.rows("item", ids)
                row.view(torch.int32)[0, 3:4] ^= bit
                bags._tables["item"].weight[bags._tables["item"].find(ids.numpy())] = row

        verdict = self.verdict(*self.trained(disturb))
        assert verdict.startswith("step 10: table 'item', id 1 (sample ")
        assert "the pooled row is not the dense table's" in verdict

    def test_optimizer_state_and_missing_rows_at_the_end(self) -> None:
        trail, bags = self.trained()
        user = bags._tables["user"]
        ordinal = int(user.find(np.array([3]))[0])
        user.state[ordinal] *= 1 + 1e-6
        assert self.verdict(trail, bags) == "after the last step: table 'user', id 3: the row is not the dense table's"
        user.changed[ordinal] = False
        expected = "after the last step: table 'user', id 3: only the dense table has such a row"
        assert self.verdict(trail, bags) == expected

    def test_a_loss(self) -> None:
        trail, bags = self.trained()
        losses = array("f", trail.losses)
        losses[4] += 1e-6
        assert self.verdict(Trail(losses, trail.fingerprints), bags).startswith("step 5: the loss is ")

    def test_a_rule_that_plain_torch_does_not_follow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trail, bags = self.trained()

        def other(rule: object, weight: torch.Tensor, state: torch.Tensor, grad: torch.Tensor, step: int) -> None:
            state.add_(grad.square().sum(1, keepdim=True))
            weight.addcdiv_(grad, state.sqrt(), value=-0.05)

        monkeypatch.setitem(__import__("tiered_emb.testing").testing._FORMULAS, "rowwise_adagrad", other)
        assert "in plain torch" in self.verdict(trail, bags)


def test_evaluation_knows_the_planted_auc() -> None:
    learner, batches = TestCheck.MODEL.learner(), TestCheck().batches()[:2]
    planted = [ClickBatch(b.labels, b.dense, b.sparse, b.labels.double().numpy()) for b in batches]
    bags = DenseOracle(TestCheck.TABLES, optimizer=TestCheck.MODEL.rule, seed=0)
    assert evaluate(learner, bags, planted).planted_auc == 1.0
    assert evaluate(learner, bags, batches).planted_auc is None
    assert all(len(ids) == 0 for ids, _ in bags.touched().values())


def test_rows_at_rest_are_hashed_in_order_of_table_and_id() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    ids = np.array([5, -3, 2**62, 0, 9, 7], np.int64)
    one = [("b", ids[:4], rows[:4]), ("a", ids[4:], rows[4:])]
    other = [("a", ids[5:], rows[5:]), ("b", ids[[3, 0]], rows[[3, 0]]), ("a", ids[4:5], rows[4:5])]
    other.append(("b", ids[[2, 1]], rows[[2, 1]]))
    with RowsAtRest(one) as first, RowsAtRest(other) as second, RowsAtRest(one[:1]) as part, RowsAtRest([]) as none:
        assert first.sha256() == second.sha256()
        assert len({first.sha256(), part.sha256(), none.sha256()}) == 3
        assert first.tables() == ["a", "b"]
        by_hand = b"a\0" + b"".join(struct.pack("<q2f", i, *rows[n]) for n, i in ((5, 7), (4, 9)))
        by_hand += b"b\0" + b"".join(struct.pack("<q2f", i, *rows[n]) for n, i in ((1, -3), (3, 0), (0, 5), (2, 2**62)))
        assert first.sha256() == hashlib.sha256(by_hand).hexdigest()
        got_ids, got_rows = next(first.blocks("b"))
        assert got_ids.tolist() == [-3, 0, 5, 2**62]
        assert got_rows.tolist() == [[2, 3], [6, 7], [0, 1], [4, 5]]
        assert first.rows == 6

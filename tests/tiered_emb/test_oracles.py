"""The oracles against each other, against torch.nn.EmbeddingBag with torch.optim, and against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage.schema import table_number
from tiered_emb.config import Mode, TableConfig
from tiered_emb.errors import ConfigError, IdRangeError, InvalidBatchError, PlanReleasedError
from tiered_emb.init import Constant, Normal, Uniform
from tiered_emb.optim import SGD, Adagrad, Adam, RowRule, RowwiseAdagrad
from tiered_emb.plan import JaggedIds
from tiered_emb.testing import DenseOracle, TorchOracle

Oracle = DenseOracle | TorchOracle
BOTH = pytest.mark.parametrize("kind", [DenseOracle, TorchOracle])
RULES: list[RowRule] = [SGD(0.1), Adagrad(0.1), RowwiseAdagrad(0.1), Adam(0.1)]


def jagged(features: dict[str, tuple[list[int], list[int]]], weights: list[float] | None = None) -> JaggedIds:
    def whole(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    batch = JaggedIds.from_dict({name: (whole(ids), whole(lengths)) for name, (ids, lengths) in features.items()})
    if weights is None:
        return batch
    return JaggedIds(batch.features, batch.ids, batch.offsets, torch.tensor(weights))


def random_batch(rng: np.random.Generator, features: list[str], weighted: bool = False) -> JaggedIds:
    parts = {}
    for name in features:
        lengths = rng.integers(0, 5, 8)
        parts[name] = rng.zipf(1.5, lengths.sum()).clip(max=50).tolist(), lengths.tolist()
    n = sum(len(ids) for ids, _ in parts.values())
    return jagged(parts, rng.standard_normal(n).tolist() if weighted else None)


def tables(mode: Mode) -> list[TableConfig]:
    return [
        TableConfig("a", None, 8, ["a1", "a2"], mode=mode, init=Normal()),
        TableConfig("b", 1000, 3, ["b"], mode=mode, init=Uniform(-1, 1)),
    ]


def train(oracle: Oracle, batches: list[JaggedIds]) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        pooled = oracle(batch)
        loss = sum((out.sin() * (1 + i)).sum() for i, out in enumerate(pooled.values()))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_the_two_oracles_agree(rule: RowRule, mode: Mode, weighted: bool) -> None:
    rng = np.random.default_rng(0)
    batches = [random_batch(rng, ["a1", "b", "a2"], weighted) for _ in range(12)]
    dense, plain = (kind(tables(mode), optimizer=rule, seed=3) for kind in (DenseOracle, TorchOracle))
    torch.testing.assert_close(train(dense, batches), train(plain, batches), rtol=1e-4, atol=1e-4)
    got, expected = dense.touched(), plain.touched()
    assert list(got) == list(expected) == ["a", "b"]
    for name in got:
        assert np.array_equal(got[name][0], expected[name][0])
        np.testing.assert_allclose(got[name][1], expected[name][1], rtol=1e-3, atol=1e-4)
        assert got[name][1].shape == (
            len(got[name][0]),
            {"a": 8, "b": 3}[name] + rule.state_width({"a": 8, "b": 3}[name]),
        )


@BOTH
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_with_sgd(kind: type[Oracle], mode: Mode) -> None:
    oracle = kind([TableConfig("t", 60, 8, mode=mode)], optimizer=SGD(0.1), seed=1)
    bag = torch.nn.EmbeddingBag(60, 8, mode=mode, include_last_offset=True, _weight=oracle.rows("t", torch.arange(60)))
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    rng = np.random.default_rng(1)
    for _ in range(10):
        batch = random_batch(rng, ["t"])
        out, expected = oracle(batch)["t"], bag(batch.ids, batch.offsets)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        out.sin().sum().backward()
        optimizer.zero_grad()
        expected.sin().sum().backward()
        optimizer.step()
    torch.testing.assert_close(oracle.rows("t", torch.arange(60)), bag.weight.detach(), rtol=1e-4, atol=1e-5)


@BOTH
def test_gradients_of_a_row_are_summed(kind: type[Oracle]) -> None:
    """Case 8: ids [7, 7, 9] with gradients g1, g2, g3, lr 1: row 7 falls by g1 + g2, row 9 by g3."""
    oracle = kind([TableConfig("t", None, 2, init=Constant(1.0))], optimizer=SGD(1.0), seed=0)
    out = oracle(jagged({"t": ([7, 7, 9], [1, 1, 1])}))["t"]
    out.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert oracle.rows("t", torch.tensor([7, 9])).tolist() == [[-3.0, -5.0], [-4.0, -5.0]]


@BOTH
def test_two_forwards_are_one_update_with_rows_as_before(kind: type[Oracle]) -> None:
    oracle = kind([TableConfig("t", None, 1, init=Constant(3.0))], optimizer=Adagrad(1.0, eps=0.0), seed=0)
    first, second = (oracle(jagged({"t": ([5], [1])}))["t"] for _ in range(2))
    (first * 3 + second * 4).sum().backward()
    assert oracle.steps == 1
    assert oracle.touched()["t"][1].tolist() == [[2.0, 49.0]]  # 3 - 7 / sqrt(49); two updates would leave 9 + 16


def test_order_of_the_sum() -> None:
    """Forwards in call order, features in the batch's order, whatever autograd does first: float32 sums tell."""
    big, rest = 2.0**24, [1.0, 1.0, -(2.0**24)]
    grads = [big, *rest]  # in this order the ones vanish: 2^24 + 1 = 2^24
    sums = set()
    for swap in (False, True):
        oracle = DenseOracle([TableConfig("t", None, 1, ["x", "y"], init=Constant(0.0))], optimizer=SGD(1.0), seed=0)
        names = ["y", "x"] if swap else ["x", "y"]
        outs = [oracle(jagged({name: ([5], [1]) for name in names})) for _ in range(2)]
        factors = torch.tensor(grads)
        parts = [outs[call][name].sum() * factors[2 * call + f] for call in range(2) for f, name in enumerate(names)]
        (parts[3] + parts[1] + parts[2] + parts[0]).backward()
        sums.add(oracle.rows("t", torch.tensor([5])).item())
    assert sums == {0.0}
    assert np.float32(sum(sorted(grads))) == 2.0  # another order gives another sum


@BOTH
def test_weights_get_the_gradient_of_the_rows_before_the_update(kind: type[Oracle]) -> None:
    oracle = kind([TableConfig("t", None, 2, init=Constant(2.0))], optimizer=SGD(1.0), seed=0)
    batch = jagged({"t": ([7, 7, 9], [2, 1])}, [1.0, 10.0, 100.0])
    assert batch.weights is not None
    batch.weights.requires_grad_()
    out = oracle(batch)["t"]
    assert out.tolist() == [[22.0, 22.0], [200.0, 200.0]]
    out.backward(torch.tensor([[1.0, 0.0], [1.0, 3.0]]))
    assert batch.weights.grad is not None
    assert batch.weights.grad.tolist() == [2.0, 2.0, 8.0]
    assert oracle.rows("t", torch.tensor([7, 9])).tolist() == [[2.0 - 11.0, 2.0], [2.0 - 100.0, 2.0 - 300.0]]


@BOTH
def test_a_feature_without_a_part_in_the_loss_is_left_alone(kind: type[Oracle]) -> None:
    oracle = kind(tables("sum"), optimizer=Adam(0.1), seed=0)
    oracle(jagged({"a1": ([1], [1]), "a2": ([2], [1]), "b": ([3], [1])}))["a2"].sum().backward()
    assert {name: ids.tolist() for name, (ids, _) in oracle.touched().items()} == {"a": [2], "b": []}


@BOTH
def test_eval_and_no_grad_change_nothing(kind: type[Oracle]) -> None:
    oracle, batch = (
        kind(tables("mean"), optimizer=SGD(1.0), seed=0),
        random_batch(np.random.default_rng(2), ["a1", "b"]),
    )
    trained = oracle(batch)
    with torch.no_grad():
        quiet = oracle(batch)
    oracle.eval()
    for outs in (quiet, oracle(batch)):
        assert not any(out.requires_grad for out in outs.values())
        assert all(torch.equal(outs[name], trained[name]) for name in outs)
    assert all(len(ids) == 0 for ids, _ in oracle.touched().values())


@BOTH
def test_new_rows_are_those_of_init_under_the_tables_number(kind: type[Oracle]) -> None:
    oracle = kind(tables("sum"), optimizer=SGD(1.0), seed=9)
    ids = np.array([-(2**63), -5, -1, 0, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1])
    expected = np.empty((9, 8), np.float32)
    Normal().fill(9, np.full(9, table_number("a"), np.uint32), ids, expected)
    assert oracle.rows("a", torch.from_numpy(ids)).numpy().tobytes() == expected.tobytes()


@BOTH
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_batches_of_nothing(kind: type[Oracle], mode: Mode) -> None:
    """Case 4: no bags, all bags empty, one feature empty."""
    oracle = kind(tables(mode), optimizer=Adam(0.1), seed=0)
    for lengths, ids in (([], []), ([0, 0], []), ([2, 0], [1, 2])):
        outs = oracle(jagged({"a1": ([], [0] * len(lengths)), "b": (ids, lengths)}))
        assert outs["a1"].shape == (len(lengths), 8)
        assert not outs["a1"].any()
        assert not outs["b"][1:].any()
        sum(out.sum() for out in outs.values()).backward()  # type: ignore[union-attr]
    assert oracle.touched()["b"][0].tolist() == [1, 2]


@BOTH
def test_set_rows(kind: type[Oracle]) -> None:
    """Case 7: assigned rows are bit-exact, with zero optimizer state."""
    oracle = kind([TableConfig("t", None, 2)], optimizer=RowwiseAdagrad(0.1), seed=0)
    oracle(jagged({"t": ([4], [1])}))["t"].sum().backward()
    oracle.set_rows("t", torch.tensor([4, 8, 4]), torch.tensor([[1.0, 2.0], [-0.0, 3.0], [5.0, 6.0]]))
    ids, rows = oracle.touched()["t"]
    assert ids.tolist() == [4, 8]
    assert rows.tobytes() == np.array([[5, 6, 0], [-0.0, 3, 0]], np.float32).tobytes()


@BOTH
def test_a_failed_backward_pass_leaves_no_gradient_behind(kind: type[Oracle]) -> None:
    oracle = kind([TableConfig("t", None, 1, init=Constant(0.0))], optimizer=SGD(1.0), seed=0)

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("no")

    leaf = torch.ones(1, requires_grad=True)
    poisoned = leaf * 1
    poisoned.register_hook(fail)
    with pytest.raises(ArithmeticError, match="no"):
        (poisoned * oracle(jagged({"t": ([1], [1])}))["t"]).sum().backward()
    oracle(jagged({"t": ([2], [1])}))["t"].sum().backward()
    assert oracle.rows("t", torch.tensor([1, 2])).tolist() == [[0.0], [-1.0]]
    assert oracle.steps == 1


def test_a_second_backward_over_an_updated_forward_is_an_error() -> None:
    oracle = DenseOracle([TableConfig("t", None, 1)], optimizer=SGD(1.0), seed=0)
    loss = oracle(jagged({"t": ([1], [1])}))["t"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PlanReleasedError, match="table t"):
        loss.backward()


@BOTH
def test_bad_input(kind: type[Oracle]) -> None:
    oracle = kind(tables("mean"), optimizer=SGD(1.0), seed=0)
    with pytest.raises(IdRangeError, match=r"table 'b', feature 'b', position 1: id 1000 is not in 0 \.\. 999"):
        oracle(jagged({"b": ([5, 1000], [2])}))
    with pytest.raises(InvalidBatchError, match=r"features \('c',\)"):
        oracle(jagged({"c": ([5], [1])}))
    with pytest.raises(InvalidBatchError, match="weights go with mode 'sum'"):
        oracle(jagged({"b": ([5], [1])}, [1.0]))
    with pytest.raises(InvalidBatchError, match=r"offsets\[2\] is 2"):
        oracle(JaggedIds(("b",), torch.tensor([1, 2]), torch.tensor([0, 5, 2])))
    with pytest.raises(ConfigError, match="unique"):
        kind([TableConfig("t", None, 2), TableConfig("u", None, 2, ["t"])], optimizer=SGD(1.0), seed=0)

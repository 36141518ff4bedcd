"""What makes no sense is refused in words of ours, and nothing is changed or left open by it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from storage import HeapStore
from storage.errors import StoreClosedError
from tiered_emb import (
    SGD,
    ConfigError,
    IdRangeError,
    InvalidBatchError,
    JaggedIds,
    Normal,
    TableConfig,
    TierCapacityError,
    TierConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
)
from tiered_emb.config import parse_bytes

HOST = TierConfig(0, "128KiB")


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def make(num_embeddings: Any = None, dim: Any = 4, **options: Any) -> TieredEmbeddingBag:
    settings = {"mode": "sum", "tiers": HOST, "optimizer": SGD(1.0), "seed": 1} | options
    return TieredEmbeddingBag(num_embeddings, dim, **settings)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616"),
    ({"seed": True}, "seed is True"),
    ({"num_embeddings": 2**63}, "num_embeddings is 9223372036854775808"),
    ({"num_embeddings": 1.5}, "num_embeddings is 1.5"),
    ({"dim": 65537}, "embedding_dim is 65537"),
    ({"padding_idx": "a"}, "padding_idx is 'a'"),
    ({"padding_idx": 1.5}, "padding_idx is 1.5"),
    ({"padding_idx": True, "num_embeddings": 10}, "padding_idx is True"),
    ({"padding_idx": 10, "num_embeddings": 10}, "padding_idx is 10"),
    ({"name": "\ud800"}, "table name is '\\\\ud800'"),
    ({"name": "a\nb"}, "table name is"),
    ({"optimizer": "adam"}, "optimizer is 'adam'; expected a row rule"),
    ({"optimizer": SGD}, "optimizer is .*SGD.*; expected a row rule"),
    ({"tiers": "1MiB"}, "tiers is '1MiB'; expected a TierConfig"),
    ({"init": "normal"}, "init is 'normal'; expected an initializer"),
    ({"init": Normal}, "init is .*Normal.*; expected an initializer"),
    ({"update": "STEP"}, "update is 'STEP'"),
    ({"mode": "SUM"}, "mode is 'SUM'"),
    ({"_weight": torch.zeros(3, 3)}, "_weight has shape"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_make_no_sense(tmp_path: object, options: dict[str, Any], message: str) -> None:
    """The store of the module that was not made is free again."""
    tiers = TierConfig(0, "1MiB", f"{tmp_path}/rows")
    with pytest.raises(ConfigError, match=message):
        make(**({"tiers": tiers} | options))
    make(tiers=tiers).close()


@pytest.mark.parametrize(
    "size", ["1.5.GiB", -1, True, "abc", 1.5, None, "", "-1", "1e6", "0x10", "1EiB", "1_000", "٣", b"1", float("nan")]
)
def test_sizes_that_make_no_sense(size: Any) -> None:
    with pytest.raises(ConfigError, match="ddr_bytes is "):
        TierConfig(0, size)


def test_sizes_are_exact() -> None:
    assert parse_bytes("9007199254740993.0") == 9007199254740993
    assert parse_bytes("1.5 GiB") == 3 << 29


@pytest.mark.parametrize("options", [{"store": 3}, {"store": []}, {"store": b"x"}, {"store": ""}, {"policy": []}])
def test_tiers_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(store|policy) is "):
        TierConfig(0, "1MiB", **options)


@pytest.mark.parametrize(("hbm", "ddr"), [(0, 1 << 61), (1 << 61, 0)])
def test_more_memory_than_there_is(hbm: int, ddr: int) -> None:
    with pytest.raises(TierCapacityError, match=r"_bytes asks for \d+ rows of 786432 bytes .* does not grant"):
        make(dim=1 << 16, tiers=TierConfig(hbm, ddr), optimizer=SGDWithState(1.0))


class SGDWithState(SGD):
    """Rows as wide as rows get."""

    def state_columns(self, dim: int) -> Any:
        from storage.schema import Column

        return (Column("one", "float32", dim), Column("two", "float32", dim))

    def state_width(self, dim: int) -> int:
        return 2 * dim


def test_numpy_integers_are_integers() -> None:
    with make(np.int64(7), np.int32(4), seed=np.int64(1), padding_idx=np.int64(-1)) as bag:
        assert (bag.num_embeddings, bag.embedding_dim, bag.padding_idx) == (7, 4, 6)
        assert bag(ids_of(1), ids_of(0)).shape == (1, 4)


INPUTS: list[Callable[[TieredEmbeddingBag], Any]] = [
    lambda bag: bag([1, 2]),
    lambda bag: bag(np.array([1, 2]), ids_of(0)),
    lambda bag: bag(torch.tensor([1.0]), ids_of(0)),
    lambda bag: bag(torch.tensor([True]), ids_of(0)),
    lambda bag: bag(ids_of(1), [0]),
    lambda bag: bag(ids_of(1), ids_of(0), [1.0]),
    lambda bag: bag(ids_of(1), ids_of(0), torch.ones(1, dtype=torch.float64)),
    lambda bag: bag.rows([1]),
    lambda bag: bag.set_rows(ids_of(1), [[1.0, 2.0, 3.0, 4.0]]),  # type: ignore[arg-type]
    lambda bag: bag.set_rows(ids_of(1), torch.ones(4)),
    lambda bag: bag.set_rows(ids_of(1), torch.ones(1, 4, dtype=torch.complex64)),
]


@pytest.mark.parametrize("call", INPUTS)
def test_inputs_that_make_no_sense(call: Callable[[TieredEmbeddingBag], Any]) -> None:
    with make() as bag:
        before = bag.stats()
        with pytest.raises(InvalidBatchError, match="; expected "):
            call(bag)
        assert bag.stats() == before


PARTS: list[tuple[dict[str, Any], str]] = [
    ({"a": (torch.tensor([1.5]), ids_of(1))}, "'a': ids are torch.float32"),
    ({"a": (torch.tensor([True]), ids_of(1))}, "'a': ids are torch.bool"),
    ({"a": ([1], ids_of(1))}, "'a': ids are list"),
    ({"a": (ids_of(1), torch.tensor([1.5]))}, "'a': lengths are torch.float32"),
    ({"a": (ids_of(1, 2).view(1, 2), ids_of(1, 1))}, "'a': ids have shape"),
    ({"a": (ids_of(1, 2), ids_of(1, 1).view(1, 2))}, "'a': lengths have shape"),
    (
        {"a": (ids_of(1, 2), ids_of(2), torch.ones(3)), "b": (ids_of(1, 2), ids_of(2), torch.ones(1))},
        "'a' has 2 ids and 3 weights",
    ),
]


@pytest.mark.parametrize(("parts", "message"), PARTS)
def test_features_that_make_no_sense(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidBatchError, match=f"feature {message}"):
        JaggedIds.from_dict(parts)


@pytest.mark.parametrize(
    "batch",
    [
        ids_of(1),
        {"a": (ids_of(1), ids_of(1))},
        JaggedIds(("a", "b"), ids_of(1, 2), ids_of(0, 1, 2), torch.ones(5)),
        JaggedIds(("a", "a"), ids_of(1, 2), ids_of(0, 1, 2)),
    ],
)
def test_batches_that_make_no_sense(batch: Any) -> None:
    tables = [TableConfig("a", 10, 4), TableConfig("b", 10, 8)]
    with TieredEmbeddingBagCollection(tables, tiers=HOST, optimizer=SGD(1.0), seed=1) as bags:
        before = bags.stats()
        with pytest.raises(InvalidBatchError, match="the batch"):
            bags(batch)
        assert bags.stats() == before


def test_case_03_positions_are_those_of_the_input_with_its_padding() -> None:
    with make(10, padding_idx=0) as bag, pytest.raises(IdRangeError, match="id 50 at position 2 "):
        bag(ids_of(0, 0, 50), ids_of(0))
    with TieredEmbedding(10, 4, 0, tiers=HOST) as one, pytest.raises(IdRangeError, match="id 50 at position 2 "):
        one(ids_of(0, 0, 50))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_module_is_not_copied(way: Callable[[Any], Any]) -> None:
    with make(name="ads") as bag, pytest.raises(TypeError, match="module of ads cannot be copied or pickled"):
        way(bag)


def test_a_module_that_does_not_fit_leaves_no_table_behind(tmp_path: object) -> None:
    with pytest.raises(TierCapacityError, match="use at least"):
        make(tiers=TierConfig(0, "1KiB", f"{tmp_path}/rows"), name="t")
    make(dim=8, tiers=TierConfig(0, "1MiB", f"{tmp_path}/rows"), name="t").close()


def test_a_store_that_somebody_closed_is_let_go_of() -> None:
    store = HeapStore()
    bag = make(tiers=TierConfig(0, "128KiB", store))
    bag(ids_of(1), ids_of(0)).sum().backward()
    store.close()
    with pytest.raises(StoreClosedError):
        bag.close()
    bag.close()
    with pytest.raises(StoreClosedError):  # and not that the table is in use
        make(tiers=TierConfig(0, "128KiB", store))

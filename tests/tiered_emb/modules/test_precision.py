"""Rows that rest in fewer bits: what comes back, how it is rounded, and that one configuration repeats itself."""

from __future__ import annotations

import hashlib
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage import HeapStore, LmdbStore
from storage.codecs import CODECS, Draws
from tiered_emb import (
    SGD,
    Adagrad,
    ConfigError,
    Constant,
    JaggedIds,
    TableConfig,
    TierConfig,
    TieredEmbeddingBagCollection,
    load_checkpoint,
    prefetch,
    save_checkpoint,
)

LOSSY = pytest.mark.parametrize("precision", ["bf16", "fp16", "int8"])
DIM = 6


def tables(precision: str, **more: Any) -> list[TableConfig]:
    return [TableConfig("a", None, DIM, precision=precision, **more), TableConfig("b", None, DIM, precision=precision)]


def collection(
    configs: list[TableConfig], store: Any = None, *, rows: int = 60, rule: Any = None, **tiers: Any
) -> TieredEmbeddingBagCollection:
    chosen = TierConfig(**{"ddr_bytes": (1 << 20 if store else 20_000) + rows * 200, "store": store, **tiers})
    return TieredEmbeddingBagCollection(configs, tiers=chosen, optimizer=rule or Adagrad(0.1), seed=3)


def batches(count: int, spread: int = 300) -> list[JaggedIds]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        lengths = torch.from_numpy(rng.integers(0, 4, 8))
        ids = [torch.from_numpy(rng.integers(0, spread, int(lengths.sum()))) for _ in range(2)]
        made.append(JaggedIds.from_dict({name: (one, lengths) for name, one in zip("ab", ids, strict=True)}))
    return made


def step(bags: TieredEmbeddingBagCollection, batch: JaggedIds) -> float:
    out = bags(batch)
    loss = sum((one * torch.arange(1.0, DIM + 1)).sum().square() * 1e-4 + one.square().sum() for one in out.values())
    loss.backward()  # type: ignore[union-attr]
    return loss.item()  # type: ignore[union-attr]


def at_rest(bags: TieredEmbeddingBagCollection) -> dict[str, tuple[Any, Any]]:
    """Ids (N,), ascending, and rows (N, D + K) of each table."""
    blocks = list(bags.scan())
    found = {}
    for name in {name for name, _, _ in blocks}:
        ids, rows = (np.concatenate([block[place] for block in blocks if block[0] == name]) for place in (1, 2))
        found[name] = ids[np.argsort(ids)], rows[np.argsort(ids)]
    return found


def digest(bags: TieredEmbeddingBagCollection) -> str:
    found = hashlib.sha256()
    for name, (ids, rows) in sorted(at_rest(bags).items()):
        found.update(name.encode() + ids.tobytes() + rows.tobytes())
    return found.hexdigest()


def trained(bags: TieredEmbeddingBagCollection, lookahead: int = 2, count: int = 40) -> tuple[list[float], str]:
    """Losses and rows of a loop whose threads dawdle at random."""
    prepare, rng = bags.prepare, np.random.default_rng()

    def late(*arguments: Any) -> None:
        time.sleep(rng.choice([0, 0, 0.001, 0.003]))
        prepare(*arguments)

    bags.prepare = late  # type: ignore[method-assign]
    losses = []
    with bags, prefetch(batches(count), bags, lambda batch: batch, lookahead) as ahead:
        for batch in ahead:
            losses.append(step(bags, batch))
            time.sleep(rng.choice([0, 0, 0.001, 0.003]))
        return losses, digest(bags)


@LOSSY
@pytest.mark.parametrize("tiers", [{"policy": "fifo"}, {"policy": "sieve", "hbm_bytes": 8_000}], ids=["ddr", "hbm"])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_one_configuration_repeats_itself(precision: str, tiers: dict[str, Any], lookahead: int) -> None:
    """Whatever threads do: in tiers from which rows leave that are in use, unless a pin keeps them."""
    runs = [trained(collection(tables(precision), **tiers), lookahead) for _ in range(4)]
    assert all(run == runs[0] for run in runs[1:])
    assert runs[0][1] != trained(collection(tables("fp32"), **tiers), lookahead)[1]


@LOSSY
def test_rows_at_rest_have_the_precision(precision: str, tmp_path: Path) -> None:
    store = HeapStore()
    with collection(tables(precision), store) as bags:
        for batch in batches(20):
            step(bags, batch)
        bags.flush()
        codec = CODECS[precision]
        for _, whole in at_rest(bags).values():
            width = sum(column.bytes for column in codec.columns(DIM))
            weights, back = np.ascontiguousarray(whole[:, :DIM]), np.empty((len(whole), DIM), np.float32)
            packed = np.empty((len(whole), width), np.uint8)
            codec.pack(weights, DIM, packed, Draws.none(len(whole)))
            codec.unpack(packed, DIM, back)
            np.testing.assert_allclose(back, weights, rtol=0 if precision != "int8" else 1e-5, atol=1e-6)
            assert len(np.unique(whole[:, DIM:])) > len(whole)  # optimizer state is as it was


def test_a_bf16_store_moves_half_the_bytes() -> None:
    put = {}
    for precision in ("fp32", "bf16"):
        store = HeapStore()
        with collection(
            [TableConfig("a", None, 64, precision=precision), TableConfig("b", None, 64)][:1], store, rule=SGD(0.1)
        ) as bags:
            ids = torch.arange(50)
            bags(JaggedIds.from_dict({"a": (ids, torch.ones(50, dtype=torch.int64))}))["a"].sum().backward()
            bags.flush()
            put[precision] = next(iter(bags.engine.groups)).row_bytes * store.stats().rows
    assert put["bf16"] * 2 == put["fp32"]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_case_12_small_updates_of_fp16_rows(rounding: str, tmp_path: Path) -> None:
    """2^-13 is added to 10,000 rows of 1.0: on average by stochastic rounding, never to nearest; twice the same."""
    ids, means = torch.arange(10_000), []
    for run in range(2):
        table = TableConfig("a", None, 4, init=Constant(1.0), precision="fp16", rounding=rounding)
        store = tmp_path / f"{run}"
        bags = TieredEmbeddingBagCollection(
            [table], tiers=TierConfig(ddr_bytes="4MiB", store=store), optimizer=SGD(1.0), seed=5
        )
        with bags:
            out = bags(JaggedIds.from_dict({"a": (ids, torch.ones(len(ids), dtype=torch.int64))}))["a"]
            out.backward(torch.full_like(out, -(2.0**-13)))
            assert (bags.rows("a", ids) == 1 + 2.0**-13).all()  # as they are worked on
        bags = TieredEmbeddingBagCollection(
            [table], tiers=TierConfig(ddr_bytes="4MiB", store=store), optimizer=SGD(1.0), seed=5
        )
        with bags:
            rows = bags.rows("a", ids)
        assert set(rows.unique().tolist()) <= {1.0, 1 + 2.0**-10}
        means.append(rows.double().mean().item() - 1)
    assert means[0] == means[1]
    if rounding == "nearest":
        assert means[0] == 0
    else:
        assert abs(means[0] - 2.0**-13) < 5 * 2.0**-10 * (7 / 64 / 40_000) ** 0.5


def test_case_13_the_precision_of_one_table_is_its_own() -> None:
    """Also where both have the same dimension, and their rounding differs in one group."""
    found = []
    for first in ("fp32", "int8", "fp16"):
        store = HeapStore()
        configs = [TableConfig("a", None, DIM, precision=first), TableConfig("b", None, DIM)]
        with collection(configs, store) as bags:
            for batch in batches(30):
                out = bags(batch)
                (out["a"].sum() + out["b"].square().sum()).backward()
            found.append(at_rest(bags)["b"][1].tobytes())
    assert found[0] == found[1] == found[2]


def test_rounding_is_a_tables_own_in_one_group() -> None:
    found = []
    for rounding in ("nearest", "stochastic"):
        configs = [
            TableConfig("a", None, DIM, precision="bf16", rounding=rounding),  # type: ignore[arg-type]
            TableConfig("b", None, DIM, precision="bf16", rounding="nearest"),
        ]
        with collection(configs, HeapStore(), rows=5000) as bags:
            for batch in batches(10):
                step(bags, batch)
            found.append({name: rows.tobytes() for name, (_, rows) in at_rest(bags).items()})
    assert found[0]["a"] != found[1]["a"] and found[0]["b"] == found[1]["b"]


@LOSSY
def test_a_checkpoint_goes_on_from_rounded_rows(precision: str, tmp_path: Path) -> None:
    """And two loads of it go on alike."""
    ahead = batches(20)
    with collection(tables(precision), tmp_path / "s") as bags:
        for batch in ahead[:10]:
            step(bags, batch)
        save_checkpoint(tmp_path / "c", bags)
        ends = []
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert load_checkpoint(tmp_path / "c", bags, tag="step-10").rounded == ()
            ends.append([step(bags, batch) for batch in ahead[10:]])
        assert ends[0] == ends[1]


@pytest.mark.parametrize(("was", "now"), [("fp32", "fp16"), ("int8", "fp32"), ("bf16", "int8")])
def test_a_checkpoint_loads_into_another_precision(was: str, now: str, tmp_path: Path) -> None:
    with collection(tables(was), tmp_path / "s") as bags:
        for batch in batches(10):
            step(bags, batch)
        save_checkpoint(tmp_path / "c", bags)
        before = at_rest(bags)
    with collection(tables(now), tmp_path / "t") as bags:
        with pytest.warns(UserWarning, match="tables a, b were saved in another precision"):
            loaded = load_checkpoint(tmp_path / "c", bags)
        assert loaded.rounded == ("a", "b") and loaded.reset == () and bags.steps == 10
        for name, (ids, rows) in at_rest(bags).items():
            assert (ids == before[name][0]).all()
            np.testing.assert_allclose(rows[:, :DIM], before[name][1][:, :DIM], rtol=0.01, atol=0.02)
            assert (rows[:, DIM:] == before[name][1][:, DIM:]).all()


def test_a_store_has_the_precision_it_was_made_with(tmp_path: Path) -> None:
    with collection(tables("fp16"), tmp_path / "s") as bags:
        step(bags, batches(1)[0])
    with pytest.raises(Exception, match="float16"), collection(tables("fp32"), tmp_path / "s"):
        pass
    with LmdbStore(tmp_path / "s", read_only=True) as store:
        assert {str(ref.schema) for ref in store.tables()} == {"weight float16[6] + sum float32[6]"}


@pytest.mark.parametrize("option", [{"precision": "fp8"}, {"rounding": "up"}, {"precision": None}])
def test_wrong_options(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"table 'a': (precision|rounding) is"):
        TableConfig("a", 5, 4, **option)


@LOSSY
def test_a_row_has_the_same_bits_whoever_writes_it(precision: str, tmp_path: Path) -> None:
    """A checkpoint beside training, one that training waits for, and rows that were evicted before and after it."""
    ahead, found = batches(30), []
    for background in (False, True):
        path = tmp_path / str(background)
        losses = []
        with collection(tables(precision), path / "s", max_rows={"a": 40, "b": 40}) as bags:
            for number, batch in enumerate(ahead):
                losses.append(step(bags, batch))
                if number == 14:
                    saved = save_checkpoint(path / "c", bags, tag="here", background=background)  # type: ignore[call-overload]
            if background:
                saved.wait()
            end = at_rest(bags)
            load_checkpoint(path / "c", bags, tag="here")
            found.append((losses, digest(bags), {name: rows.tobytes() for name, (_, rows) in end.items()}))
            assert bags.stats().tiers[-1].evictions > 100
    assert found[0] == found[1]

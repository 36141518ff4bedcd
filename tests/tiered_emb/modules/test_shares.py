"""Floors, quotas and admission of modules: what a table keeps and may not exceed, what comes down, what is refused."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage import HeapStore
from tiered_emb import (
    SGD,
    ConfigError,
    JaggedIds,
    TableConfig,
    TierCapacityError,
    TierConfig,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
)
from tiered_emb.metrics import TierStats

ROW_BYTES = 16
TABLES = [TableConfig("hot", None, 4), TableConfig("calm", None, 4)]
RULE = SGD(1.0)


def make(tiers: TierConfig, tables: Any = None) -> TieredEmbeddingBagCollection:
    return TieredEmbeddingBagCollection(tables or TABLES, tiers=tiers, optimizer=RULE, seed=1)


def step(bags: TieredEmbeddingBagCollection, **ids: range | list[int]) -> None:
    """Train the rows of each table once."""
    parts = {}
    for table in bags.tables:
        mine = torch.tensor(list(ids.get(table.name, [])), dtype=torch.int64)
        parts[table.name] = (mine, torch.ones(len(mine), dtype=torch.int64))
    # all features have one batch size: bags without an id fill up
    most = max(len(lengths) for _, lengths in parts.values())
    filled = {
        name: (mine, torch.cat([lengths, torch.zeros(most - len(lengths), dtype=torch.int64)]))
        for name, (mine, lengths) in parts.items()
    }
    sum(out.sum() for out in bags(JaggedIds.from_dict(filled)).values()).backward()  # type: ignore[union-attr]


def lowest(bags: Any) -> TierStats:
    tier: TierStats = bags.stats().tiers[-1]
    return tier


def rows_in(bags: Any, table: str) -> int:
    return lowest(bags).by_table[table]["rows"]


@pytest.mark.parametrize("budget", [{"ddr_bytes": "64KiB"}, {"hbm_bytes": 600 * ROW_BYTES, "ddr_bytes": 0}])
@pytest.mark.parametrize("floor", [0, 100])
def test_a_hot_table_leaves_a_calm_one_its_floor(budget: dict[str, Any], floor: int) -> None:
    with make(TierConfig(**budget, min_rows={"calm": floor} if floor else {})) as bags:
        step(bags, calm=range(150))
        for first in range(0, 6_000, 200):
            step(bags, hot=range(first, first + 200))
        assert rows_in(bags, "calm") == floor
        assert lowest(bags).evictions > 1_000
        step(bags, calm=range(50, 150))  # the newest of them are there
        assert lowest(bags).by_table["calm"]["hits"] == floor


@pytest.mark.parametrize("budget", [{"ddr_bytes": "64KiB"}, {"hbm_bytes": 600 * ROW_BYTES, "ddr_bytes": 0}])
def test_a_table_makes_room_itself_at_its_quota(budget: dict[str, Any]) -> None:
    with make(TierConfig(**budget, max_rows={"hot": 120})) as bags:
        step(bags, calm=range(150))
        for first in range(0, 3_000, 100):
            step(bags, hot=range(first, first + 100))
            assert rows_in(bags, "hot") <= 120
        assert (rows_in(bags, "hot"), rows_in(bags, "calm")) == (120, 150)
        expected = bags.rows("hot", torch.arange(3_000))
        bags.flush()
        assert torch.equal(bags.rows("hot", torch.arange(3_000)), expected)


def test_below_an_hbm_tier_rows_beyond_the_quota_go_to_the_store() -> None:
    """More victims at once than the quota lets into the DDR tier."""
    with make(TierConfig(300 * ROW_BYTES, "64KiB", max_rows={"hot": 40})) as bags:
        for first in range(0, 3_000, 250):
            step(bags, hot=range(first, first + 250))
            assert rows_in(bags, "hot") <= 40
        hbm, ddr = bags.stats().tiers
        assert hbm.write_backs > 2_000
        assert ddr.rows == 40
        assert torch.equal(bags.rows("hot", torch.arange(2_000)), make_whole(range(2_000)))


def make_whole(ids: range) -> torch.Tensor:
    """The rows of table "hot" after one step each."""
    with make(TierConfig(0, "8MiB")) as bags:
        step(bags, hot=ids)
        return bags.rows("hot", torch.tensor(list(ids)))


def test_floors_outlast_a_tier_that_is_lowered(tmp_path: Path) -> None:
    """The index of the store grows at the cost of slots; rows that floors keep get other ones."""
    tiers = TierConfig(0, "256KiB", tmp_path / "rows", min_rows={"calm": 700})
    with make(tiers) as bags:
        first = lowest(bags).capacity_rows
        for start in range(0, first - 900, 100):
            step(bags, hot=range(start, start + 100))
        for start in range(0, 800, 100):  # in the highest slots, which go first
            step(bags, calm=range(start, start + 100))
        for start in range(first, 9_000, 100):
            step(bags, hot=range(start, start + 100))
            tier = lowest(bags)
            assert tier.bytes <= tier.peak_bytes <= tier.capacity_bytes
            assert rows_in(bags, "calm") >= 700
        assert lowest(bags).capacity_rows < first
        assert rows_in(bags, "calm") == 700
        counts = lowest(bags)
        assert counts.rows == counts.by_table["hot"]["rows"] + 700
        calm, hot = bags.rows("calm", torch.arange(800)), bags.rows("hot", torch.arange(9_000))
        assert lowest(bags).write_backs == lowest(bags).evictions
    with make(tiers) as bags:
        assert torch.equal(bags.rows("calm", torch.arange(800)), calm)
        assert torch.equal(bags.rows("hot", torch.arange(9_000)), hot)


def test_a_tier_is_never_lowered_below_its_floors(tmp_path: Path) -> None:
    tiers = TierConfig(0, "256KiB", tmp_path / "rows", min_rows={"calm": 1_600})
    with make(tiers) as bags:
        for start in range(0, 1_600, 200):
            step(bags, calm=range(start, start + 200))
        with pytest.raises(TierCapacityError, match=r"for the min_rows of calm, but ddr_bytes is 262144: raise it to"):
            scan(bags, 60_000)
        assert lowest(bags).capacity_rows > 1_600
        step(bags, calm=range(3))  # a smaller batch still fits


def test_pinned_rows_that_a_floor_keeps_are_counted_once(tmp_path: Path) -> None:
    """While they are held, the tier of other rows gives up all that it can spare before a batch is refused."""
    tiers = TierConfig(0, "160KiB", tmp_path / "rows", min_rows={"a": 400})
    with bag(tiers, "a") as a, bag(tiers, "b", 8) as b:
        held = a(torch.arange(400).unsqueeze(1))
        with pytest.raises(TierCapacityError, match="held by"):
            look_up_in_parts(b, range(40_000))
        assert 100 <= next(iter(b._opened.values()))[0].top.capacity_rows < 150
        held.sum().backward()


def scan(bags: TieredEmbeddingBagCollection, rows: int) -> None:
    """Rows of the hot table that come once."""
    for start in range(0, rows, 200):
        step(bags, hot=range(start, start + 200))


@pytest.mark.parametrize("budget", [{"ddr_bytes": "64KiB"}, {"hbm_bytes": "8KiB", "ddr_bytes": 0}])
def test_floors_that_do_not_fit_are_refused_before_the_store_hears_of_them(budget: dict[str, Any]) -> None:
    store = HeapStore()
    with pytest.raises(TierCapacityError, match=r"min_rows of calm") as refused:
        make(TierConfig(store=store, min_rows={"calm": 5_000}, **budget))
    with make(TierConfig(store=store, **budget), [TableConfig("calm", None, 8)]):
        pass
    name = "ddr_bytes" if "hbm_bytes" not in budget else "hbm_bytes"
    enough = int(str(refused.value).split("use at least ")[1].split()[0])
    with make(TierConfig(min_rows={"calm": 5_000}, **{**budget, name: enough})) as bags:
        assert lowest(bags).capacity_rows > 5_000


@pytest.mark.parametrize("hbm", [0, "4KiB"])
def test_every_budget_either_holds_the_floors_or_is_refused(hbm: Any) -> None:
    made = 0
    for size in range(20_000, 150_000, 997):
        tables = [*TABLES, TableConfig("wide", None, 24)]
        try:
            bags = make(TierConfig(hbm, size, min_rows={"calm": 300, "wide": 50}), tables)
        except TierCapacityError:
            assert not made
            continue
        made += 1
        with bags:
            for schema, least in ((4, 300), (24, 50)):
                (group,) = {group for name, (group, _) in bags._opened.items() if group.dim == schema}
                assert group.tiers[-1].capacity_rows > least
    assert 40 < made < 110


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"ddr_bytes": "64KiB"}, "max_rows of table 'hot' is 9999, but ddr_bytes is 65536, which holds 1"),
        (
            {"hbm_bytes": 160, "ddr_bytes": 0},
            "max_rows of table 'hot' is 9999, but hbm_bytes is 160, which holds 10 rows",
        ),
    ],
)
def test_a_quota_above_the_budget_is_refused(budget: dict[str, Any], message: str) -> None:
    store = HeapStore()
    with pytest.raises(ConfigError, match=message):
        make(TierConfig(store=store, max_rows={"hot": 9_999}, **budget))
    make(TierConfig(store=store, **budget), [TableConfig("hot", None, 2)]).close()


def test_a_quota_may_come_to_be_above_a_lowered_tier(tmp_path: Path) -> None:
    with make(TierConfig(0, "256KiB", tmp_path / "rows", max_rows={"hot": 2_500})) as bags:
        for start in range(0, 9_000, 100):
            step(bags, hot=range(start, start + 100))
        assert lowest(bags).capacity_rows < 2_500


@pytest.mark.parametrize("modes", [("sum", "sum"), ("sum", "mean")])
@pytest.mark.parametrize("budget", [{"ddr_bytes": "64KiB"}, {"hbm_bytes": 300 * ROW_BYTES, "ddr_bytes": 0}])
def test_a_batch_above_a_quota_is_refused_and_changes_nothing(budget: dict[str, Any], modes: Any) -> None:
    """In one look-up with other tables, or in one after another."""
    tables = [TableConfig(name, None, 4, mode=mode) for name, mode in zip(("calm", "hot"), modes, strict=True)]
    with make(TierConfig(max_rows={"hot": 30}, **budget), tables) as bags:
        step(bags, hot=range(10), calm=range(10))
        before = bags.stats()
        with pytest.raises(TierCapacityError, match=r"need 31 rows of table 'hot' .* its max_rows is 30"):
            step(bags, hot=range(31), calm=range(40))
        assert bags.stats() == before
        step(bags, hot=range(30), calm=range(40))


@pytest.mark.parametrize("modes", [("sum", "sum"), ("sum", "mean")])
def test_a_batch_for_which_floors_leave_no_room_is_refused(modes: Any) -> None:
    tables = [TableConfig(name, None, 4, mode=mode) for name, mode in zip(("calm", "hot"), modes, strict=True)]
    with make(TierConfig(100 * ROW_BYTES, 0, min_rows={"calm": 60}), tables) as bags:
        step(bags, calm=range(60))
        before = bags.stats()
        with pytest.raises(TierCapacityError, match=r"min_rows keep 60 .* needs 1616 bytes: raise hbm_bytes"):
            step(bags, hot=range(41), calm=range(5))
        assert bags.stats() == before
        step(bags, hot=range(40), calm=range(30, 90))
        assert rows_in(bags, "calm") == 60


def test_rows_of_a_table_are_set_whatever_its_quota() -> None:
    with make(TierConfig(0, "64KiB", max_rows={"hot": 3}, min_rows={"calm": 400})) as bags:
        bags.set_rows("hot", torch.arange(50), torch.arange(200.0).view(50, 4))
        bags.set_rows("calm", torch.arange(500), torch.arange(2000.0).view(500, 4))
        bags.set_rows("hot", torch.arange(50, 60), torch.arange(40.0).view(10, 4))
        assert torch.equal(bags.rows("hot", torch.arange(50)), torch.arange(200.0).view(50, 4))
        assert torch.equal(bags.rows("calm", torch.arange(500)), torch.arange(2000.0).view(500, 4))


def bag(tiers: TierConfig, name: str, dim: int = 4) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(None, dim, mode="sum", tiers=tiers, name=name, optimizer=RULE, seed=1)


def look_up(one: TieredEmbeddingBag, ids: range) -> None:
    one(torch.tensor(list(ids)).unsqueeze(1)).sum().backward()


def look_up_in_parts(one: TieredEmbeddingBag, ids: range) -> None:
    for first in range(0, len(ids), 100):
        look_up(one, ids[first : first + 100])


def test_modules_that_come_later_have_floors_too() -> None:
    """Each in the group of its rows: one of other rows takes no room here."""
    store = HeapStore()
    floors = {"a": 80, "b": 70, "wide": 30, "nobody": 10**9}
    tiers = TierConfig(0, "64KiB", store, min_rows=floors, max_rows={"c": 100})
    again = TierConfig(0, "64KiB", store, min_rows=dict(reversed(floors.items())), max_rows={"c": 100})
    with bag(tiers, "a") as a, bag(again, "c") as c:
        look_up(a, range(100))
        for first in range(0, 3_000, 100):
            look_up(c, range(first, first + 100))
        assert lowest(a).by_table["a"]["rows"] == 100  # the others have room enough with their quota
        with bag(tiers, "b") as b, bag(tiers, "d") as d, bag(tiers, "wide", 16) as wide:
            look_up(b, range(90))
            look_up(wide, range(40))
            for first in range(0, 6_000, 200):
                look_up(d, range(first, first + 200))
            for first in range(1000, 2_000, 60):
                look_up(wide, range(first, first + 60))
            counts = lowest(a).by_table
            assert [counts[name]["rows"] for name in ("a", "b")] == [80, 70]
            assert counts["wide"]["rows"] > 60
            assert counts["c"]["rows"] <= 100


def test_a_floor_for_which_a_made_tier_has_no_room_is_refused() -> None:
    store = HeapStore()
    tiers = TierConfig(0, "64KiB", store, min_rows={"a": 300, "b": 5_000})
    with bag(tiers, "a") as a:
        look_up(a, range(100))
        before, expected = a.stats(), a.rows(torch.arange(200))
        with pytest.raises(TierCapacityError, match="min_rows of a, b are 5300 rows together"):
            bag(tiers, "b")
        assert a.stats().tiers == before.tiers
        with bag(tiers, "c") as c:
            look_up(c, range(200))
        assert torch.equal(a.rows(torch.arange(200)), expected)


def test_floors_survive_groups_that_come_later() -> None:
    """A new group takes its share of what floors leave, or is refused."""
    tiers = TierConfig(0, "64KiB", HeapStore(), min_rows={"a": 250, "wide": 400})
    with bag(tiers, "a") as a:
        look_up(a, range(600))
        with pytest.raises(TierCapacityError, match="min_rows"):
            bag(tiers, "wide", 24)
        with bag(tiers, "small", 5):
            assert lowest(a).by_table["a"]["rows"] >= 250
        with pytest.raises(TierCapacityError, match=r"min_rows of a are 250"):
            bag(tiers, "huge", 300)


# ------------------------------------------------------------------------------------------------ admission


def down(rule: str, **more: Any) -> TieredEmbeddingBag:
    """Room for 100 rows above."""
    return bag(TierConfig(100 * ROW_BYTES, "256KiB", admission=rule, **more), "one")


def test_tinylfu_lets_in_what_comes_down_a_second_time() -> None:
    with down("tinylfu") as one:
        expected = one.rows(torch.arange(400))
        look_up(one, range(100))
        look_up(one, range(100, 200))
        hbm, ddr = one.stats().tiers
        assert (hbm.write_backs, ddr.rows, ddr.evictions) == (100, 0, 0)
        look_up(one, range(100))  # from the store; the others leave for the first time
        look_up(one, range(200, 300))
        hbm, ddr = one.stats().tiers
        assert (hbm.write_backs, ddr.rows, ddr.hits) == (200, 100, 0)
        look_up(one, range(100))
        assert one.stats().tiers[1].hits == 100
        for ids in (range(100), range(100), range(300)):
            expected[list(ids)] -= 1
        assert torch.equal(one.rows(torch.arange(400)), expected)
        one.flush()
        assert torch.equal(one.rows(torch.arange(400)), expected)


@pytest.mark.parametrize(
    ("rule", "share"), [("probability:0", 0.0), ("probability:0.25", 0.25), ("probability:1", 1.0)]
)
def test_probability_lets_a_share_in(rule: str, share: float) -> None:
    with down(rule) as one:
        for first in range(0, 1_100, 100):
            look_up(one, range(first, first + 100))
        hbm, ddr = one.stats().tiers
        assert abs(ddr.rows / 1_000 - share) < 0.06
        assert hbm.write_backs == 1_000 - ddr.rows


def test_clean_rows_that_are_not_let_in_are_forgotten() -> None:
    with down("probability:0") as one:
        for first in range(0, 500, 100):
            one(torch.arange(first, first + 100).unsqueeze(1))  # no backward pass: nothing changes
        hbm, ddr = one.stats().tiers
        assert (hbm.evictions, hbm.write_backs, ddr.rows) == (400, 0, 0)
        assert one.stats().store.rows == 0


def test_quotas_and_admission_decide_together() -> None:
    with down("probability:0.5", max_rows={"one": 20}) as one:
        for first in range(0, 1_000, 100):
            look_up(one, range(first, first + 100))
            assert one.stats().tiers[1].rows <= 20
        assert one.stats().tiers[1].rows == 20
        assert torch.equal(one.rows(torch.arange(2_000, 2_001)), one.rows(torch.tensor([2_000])))


# ------------------------------------------------------------------------------------------------ bad input

BAD: list[tuple[dict[str, Any], str]] = [
    ({"min_rows": 5}, "min_rows is 5; expected rows by table name"),
    ({"max_rows": ["a"]}, r"max_rows is \['a'\]; expected rows by table name"),
    ({"min_rows": {"": 1}}, "min_rows: table name is ''"),
    ({"max_rows": {3: 1}}, "max_rows: table name is 3"),
    ({"min_rows": {"a": 0}}, "min_rows of table 'a' is 0; expected an integer from 1"),
    ({"max_rows": {"a": -1}}, "max_rows of table 'a' is -1"),
    ({"max_rows": {"a": 1.5}}, "max_rows of table 'a' is 1.5"),
    ({"max_rows": {"a": True}}, "max_rows of table 'a' is True"),
    ({"max_rows": {"a": 2**31}}, "max_rows of table 'a' is 2147483648"),
    ({"min_rows": {"a": 2}, "max_rows": {"a": 1}}, "min_rows of table 'a' is 2, above its max_rows, 1"),
    ({"max_rows": {f"t{i}": 1 for i in range(1 << 16)}}, "min_rows and max_rows name more than 65534 tables"),
    ({"admission": 3}, "admission is 3; expected a name"),
    ({"admission": "tinylfu"}, "admission is 'tinylfu', but hbm_bytes is 0"),
    ({"admission": "tinylfu", "hbm_bytes": 64, "ddr_bytes": 0}, "admission is 'tinylfu', but ddr_bytes is 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierConfig(**options)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("sometimes", "'sometimes'; expected one of always, tinylfu, probability, or with a number"),
        ("always:2", "'always:2'; expected one of always"),
        ("tinylfu:", "'tinylfu:'; expected one of always"),
        ("tinylfu:1.5", "'tinylfu:1.5'; expected one of always"),
        ("tinylfu:16", "'tinylfu:16'; least=16: a row can be seen 1 to 15 times"),
        ("probability:2", "'probability:2'; p=2.0 is no probability"),
        ("probability:nan", "'probability:nan'; p=nan is no probability"),
    ],
)
def test_rules_that_there_are_not(tmp_path: Path, rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"admission is {message}"):
        bag(TierConfig("1KiB", "64KiB", tmp_path / "rows", admission=rule), "one")
    assert not (tmp_path / "rows").exists()


def test_a_config_keeps_a_copy_and_can_be_sent() -> None:
    floors = {"a": 1}
    tiers = TierConfig(min_rows=floors, max_rows={"a": np.int64(3)})  # type: ignore[dict-item]
    floors["a"] = 2
    assert tiers.min_rows == {"a": 1}
    assert tiers == TierConfig(min_rows={"a": 1}, max_rows={"a": 3}) == pickle.loads(pickle.dumps(tiers))
    assert hash(tiers) == hash(dataclasses.replace(tiers))
    assert tiers != TierConfig(min_rows={"a": 1})


def test_a_narrow_table_opens_beside_a_wide_one_of_another_module(tmp_path: Path) -> None:
    """Its share is less than what the budget keeps back from every new tier."""
    tiers = TierConfig(0, "1MiB", tmp_path / "rows")
    wide = TieredEmbeddingBag(None, 64, tiers=tiers, optimizer=SGD(0.1), name="wide", seed=0)
    with wide, TieredEmbeddingBag(None, 1, tiers=tiers, optimizer=SGD(0.1), name="narrow", seed=0):
        assert wide.stats().tiers[0].peak_bytes <= 1 << 20

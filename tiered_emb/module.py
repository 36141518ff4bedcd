"""The modules trainers plug in where ``nn.EmbeddingBag``, ``nn.Embedding`` or a collection of bags was.

Rows live in tiers (:mod:`tiered_emb.group`), not in a Parameter: there is no ``.weight``; ``rows`` and ``set_rows``
read and write rows by id. The optimizer is given when the module is made, because its state lives in the rows.

In train mode with gradients enabled a forward admits its rows to the tiers and pins them until they are updated. In
eval mode or under ``no_grad`` it leaves no trace: nothing is admitted, counted or written, and rows never stored are
computed.

One thread at a time uses the modules of one store.

Shapes: N ids, B bags, L ids a bag, D dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np
import torch

from tiered_emb.config import Mode, RowOptions, TableConfig, TierConfig
from tiered_emb.errors import ConfigError, InvalidBatchError
from tiered_emb.group import TableGroup
from tiered_emb.init import Initializer, Normal
from tiered_emb.inputs import (
    Ends,
    as_ids,
    bag_ends,
    check_ends,
    check_features,
    check_integers,
    check_range,
    check_unique,
    flat_weights,
    listed,
    padding_id,
    refuse_unsupported,
    select,
    without,
)
from tiered_emb.lookup import Feature, LookupInput, TableLookup, UpdateTime
from tiered_emb.optim import RowRule
from tiered_emb.plan import Ids, JaggedIds
from tiered_emb.tables import ModuleOptions, TieredTables


class TieredEmbeddingBagCollection(TieredTables):
    """Bags of several tables, looked up together: ``JaggedIds`` in, feature name -> (B, D) out.

    Args:
        tables: names unique; features unique over all tables.
        tiers: budgets and store; ``TierConfig()`` if None.
        optimizer: the row rule of all tables; ``RowwiseAdagrad(lr=0.01)`` if None.
        seed: of rows never stored; None = the one a stored table has, else drawn from torch's generator.
        update: "backward" applies the rule at the end of the backward pass, "step" in ``self.optimizer.step()``.
        device: of the HBM tier and the outputs; "cpu" may stand in for a GPU.

    Raises ConfigError, TierCapacityError and the errors of ``storage.errors`` for a store that cannot be opened.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        tiers: TierConfig | None = None,
        optimizer: RowRule | None = None,
        seed: int | None = None,
        update: UpdateTime = "backward",
        device: torch.device | str | None = None,
    ) -> None:
        if not tables:
            raise ConfigError("a collection needs at least one table")
        check_unique([table.name for table in tables], "table")
        check_unique([name for table in tables for name in table.feature_names], "feature")
        super().__init__(tables, ModuleOptions(tiers, optimizer, seed, update, device))
        self.feature_names = tuple(name for table in self.tables for name in table.feature_names)
        self._lookups = self._make_lookups()

    def forward(self, batch: JaggedIds) -> dict[str, torch.Tensor]:
        """Pooled rows (B, D) of each feature of the batch.

        Every feature of the tables must be in the batch, in any order, and no other.
        """
        pooled: dict[str, torch.Tensor] = {}
        inputs = self.lookup_inputs(batch)
        for one, outs in zip(inputs, self._answers(inputs), strict=True):
            pooled.update(zip(one.names, map(self._to_device, outs), strict=True))
        return {name: pooled[name] for name in batch.features}

    def lookup_inputs(self, batch: JaggedIds) -> list[LookupInput]:
        """What the batch asks of each look-up; arguments as of `forward`."""
        self._check_open()
        check_features(batch, self.feature_names)
        ids, ends = as_ids(batch.ids), as_ids(batch.offsets, "offsets")
        check_ends(ends, len(ids), "the batch")
        if (len(ends) - 1) % len(batch.features):
            raise InvalidBatchError(f"{len(ends) - 1} bags do not divide over {len(batch.features)} features")
        asked = [[name for name in batch.features if name in lookup.features] for lookup in self._lookups]
        return [
            LookupInput(lookup, names, *select(batch, ids, ends, names))
            for lookup, names in zip(self._lookups, asked, strict=True)
        ]

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Weights (N, D) of a table's rows, wherever they are; leaves no trace. Raises IdRangeError."""
        return self._rows(self._table(table), ids)

    def set_rows(self, table: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a table's rows (N, D) by id and reset their optimizer state; the last of equal ids wins."""
        self._set_rows(self._table(table), ids, values)

    def _table(self, name: str) -> TableConfig:
        for table in self.tables:
            if table.name == name:
                return table
        raise ConfigError(f"no table {name!r} here; expected one of {listed([table.name for table in self.tables])}")

    def _make_lookups(self) -> list[TableLookup]:
        """One look-up a group and pooling mode: tables of one dimension and mode go through one call."""
        together: dict[tuple[int, Mode], list[Feature]] = {}
        groups: dict[int, TableGroup] = {}
        for table in self.tables:
            group, ref = self._opened[table.name]
            groups[group.number] = group
            features = together.setdefault((group.number, table.mode), [])
            features += [Feature(name, table.name, ref.number, table.num_embeddings) for name in table.feature_names]
        return [
            TableLookup(groups[number], features, mode, self._updates) for (number, mode), features in together.items()
        ]

    def extra_repr(self) -> str:
        """The tables, in one line."""
        return listed([table.name for table in self.tables])


class _OneTable(TieredTables):
    """A module of one table: ``rows`` and ``set_rows`` by id."""

    padding_idx: int | None

    def __init__(
        self, table: TableConfig, options: ModuleOptions, first: torch.Tensor | None, *, copies: bool = False
    ) -> None:
        super().__init__([table], options)
        self.num_embeddings = table.num_embeddings
        self.embedding_dim = table.embedding_dim
        self.name = table.name
        group, ref = self._opened[table.name]
        feature = Feature(table.name, table.name, ref.number, table.num_embeddings)
        self._lookup = TableLookup(group, [feature], table.mode, self._updates, copies=copies)
        if first is not None:
            try:
                self._start_from(first)
            except BaseException:
                self.close()
                raise

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Weights (N, D) of the rows ``ids`` (N,), wherever they are; leaves no trace. Raises IdRangeError."""
        return self._rows(self.tables[0], ids)

    def set_rows(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Replace rows ``ids`` (N,) by ``values`` (N, D) with zero optimizer state; the last of equal ids wins."""
        self._set_rows(self.tables[0], ids, values)

    def _unpadded(self, ids: Ids, ends: Ends, weights: torch.Tensor | None) -> tuple[Ids, Ends, torch.Tensor | None]:
        """The batch without its padding; ids are checked before, so that an error names the position it came in."""
        if self.padding_idx is None:
            return ids, ends, weights
        check_range(self.name, self.name, self.num_embeddings, ids)
        return without(self.padding_idx, ids, ends, weights)

    def _start_from(self, weight: torch.Tensor) -> None:
        if self.num_embeddings is None or weight.shape != (self.num_embeddings, self.embedding_dim):
            raise ConfigError(
                f"_weight has shape {tuple(weight.shape)}; expected ({self.num_embeddings}, {self.embedding_dim}) of a "
                f"bounded table"
            )
        self.set_rows(torch.arange(self.num_embeddings, device="cpu"), weight)

    def extra_repr(self) -> str:
        """As ``nn.Embedding`` prints itself."""
        return f"{self.num_embeddings}, {self.embedding_dim}, name={self.name!r}"


class TieredEmbeddingBag(_OneTable):
    """``nn.EmbeddingBag`` over tiers. The positional arguments are its, in its order.

    Args:
        num_embeddings: ids are 0 .. num_embeddings-1; None = any 64-bit integer.
        embedding_dim: D.
        max_norm, norm_type, scale_grad_by_freq: not offered; anything but the default is refused.
        mode: "sum", "mean" or "max".
        sparse: accepted; gradients are always sparse.
        _weight: (num_embeddings, D) first rows.
        include_last_offset: ``offsets`` has B + 1 items.
        padding_idx: ids that count as absent.
        device: of the HBM tier and the outputs.
        dtype: float32.
        tiers, optimizer, seed, name, init, update: as for TieredEmbeddingBagCollection and TableConfig.
        row_options: precision, rounding, clip_value, clip_norm, on_nan, as for TableConfig.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tiers: TierConfig | None = None,
        optimizer: RowRule | None = None,
        seed: int | None = None,
        name: str = "embedding",
        init: Initializer | None = None,
        update: UpdateTime = "backward",
        **row_options: Unpack[RowOptions],
    ) -> None:
        refuse_unsupported(max_norm, scale_grad_by_freq, dtype)
        first = Normal() if init is None else init
        table = TableConfig(name, num_embeddings, embedding_dim, [name], mode, first, **row_options)
        padding = padding_id(padding_idx, table.num_embeddings)
        super().__init__(table, ModuleOptions(tiers, optimizer, seed, update, device), _weight)
        self.mode = mode
        self.sparse = sparse
        self.include_last_offset = include_last_offset
        self.padding_idx = padding

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pooled rows (B, D).

        Args:
            input: (N,) ids with ``offsets``, or (B, L) ids: B bags of L. int32 or int64.
            offsets: (B,) first position of each bag, or (B + 1,) with ``include_last_offset``.
            per_sample_weights: of ``input``'s shape, float32; mode "sum" only.
        """
        ((out,),) = self._answers(self.lookup_inputs(input, offsets, per_sample_weights))
        return self._to_device(out)

    def lookup_inputs(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> list[LookupInput]:
        """What the batch asks of the look-up; arguments as of `forward`."""
        self._check_open()
        if per_sample_weights is not None and self.mode != "sum":
            raise InvalidBatchError(f"per_sample_weights go with mode 'sum', not {self.mode!r}")
        ends = bag_ends(input, offsets, self.include_last_offset)
        weights = flat_weights(per_sample_weights, input)
        ids, ends, weights = self._unpadded(as_ids(input.reshape(-1)), ends, weights)
        return [LookupInput(self._lookup, [self.name], ids, ends, weights)]


class TieredEmbedding(_OneTable):
    """``nn.Embedding`` over tiers. The positional arguments are its, in its order; see TieredEmbeddingBag."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tiers: TierConfig | None = None,
        optimizer: RowRule | None = None,
        seed: int | None = None,
        name: str = "embedding",
        init: Initializer | None = None,
        update: UpdateTime = "backward",
        **row_options: Unpack[RowOptions],
    ) -> None:
        refuse_unsupported(max_norm, scale_grad_by_freq, dtype)
        if _freeze:
            raise ConfigError("_freeze is not offered; use eval() or no_grad() to look rows up without training them")
        first = Normal() if init is None else init
        table = TableConfig(name, num_embeddings, embedding_dim, [name], "sum", first, **row_options)
        padding = padding_id(padding_idx, table.num_embeddings)
        super().__init__(table, ModuleOptions(tiers, optimizer, seed, update, device), _weight, copies=True)
        self.padding_idx = padding

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows (*, D) of ids (*); zeros, without a gradient, where the id is ``padding_idx``."""
        ((out,),) = self._answers(self.lookup_inputs(input))
        return self._to_device(out.view(*input.shape, self.embedding_dim))

    def lookup_inputs(self, input: torch.Tensor) -> list[LookupInput]:
        """What the batch asks of the look-up; arguments as of `forward`."""
        self._check_open()
        check_integers(input)
        ids, ends, _ = self._unpadded(as_ids(input.reshape(-1)), np.arange(input.numel() + 1, dtype=np.int64), None)
        return [LookupInput(self._lookup, [self.name], ids, ends, None)]

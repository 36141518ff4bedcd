"""From what a person passes to a module to plain arrays: ids int64, bag ends int64, weights float32; or a clear
refusal.

Shapes: N ids, B bags, L ids a bag, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_emb.config import TableConfig, as_int
from tiered_emb.errors import ConfigError, IdRangeError, InvalidBatchError
from tiered_emb.kernels.batch import check_offsets, first_out_of_range
from tiered_emb.plan import Ids, JaggedIds

Ends = NDArray[np.int64]


def as_ids(values: torch.Tensor, what: str = "ids") -> Ids:
    """(N,) int64 on the host, contiguous, of an integer tensor of one dimension."""
    check_integers(values, what)
    if values.ndim != 1:
        raise InvalidBatchError(f"{what} have shape {tuple(values.shape)}; expected one dimension")
    return values.detach().to("cpu", torch.int64).contiguous().numpy()


def check_integers(values: torch.Tensor, what: str = "ids") -> None:
    """Raise InvalidBatchError unless ``values`` are an int64 or int32 tensor."""
    if not isinstance(values, torch.Tensor) or values.dtype not in (torch.int64, torch.int32):
        raise InvalidBatchError(f"{what} are {kind_of(values)}; expected an int64 or int32 tensor")


def kind_of(seen: object) -> str:
    """How a message names what was passed: a tensor by its dtype, anything else by its type."""
    return str(seen.dtype) if isinstance(seen, torch.Tensor) else type(seen).__name__


def checked_ids(table: TableConfig, ids: torch.Tensor) -> Ids:
    """``as_ids``, all of them in the table's range. Raises IdRangeError."""
    wanted = as_ids(ids)
    check_range(table.name, table.name, table.num_embeddings, wanted)
    return wanted


def check_range(table: str, feature: str, num_embeddings: int | None, ids: Ids) -> None:
    """Raise IdRangeError if an id is outside [0, num_embeddings); None = no bounds."""
    if num_embeddings is None:
        return
    at = first_out_of_range(ids, 0, num_embeddings)
    if at >= 0:
        raise IdRangeError(
            f"table {table!r}, feature {feature!r}: id {ids[at]} at position {at} is not in [0, {num_embeddings})"
        )


def check_ends(ends: Ends, n: int, what: str) -> None:
    """Raise InvalidBatchError unless ``ends`` (B + 1,) run from 0 to n without falling."""
    wrong = check_offsets(ends, n) if len(ends) else 0
    if wrong >= 0:
        seen = ends[wrong] if len(ends) else "absent"
        raise InvalidBatchError(
            f"{what}: offsets[{wrong}] is {seen}; offsets must start at 0, never fall, and stay within the {n} ids"
        )


def bag_ends(ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool) -> Ends:
    """(B + 1,) boundaries of the bags of ``nn.EmbeddingBag``'s input: (B, L) ids, or (N,) ids with offsets."""
    check_integers(ids)
    if ids.ndim == 2:
        if offsets is not None:
            raise InvalidBatchError("ids of two dimensions are bags of equal length; offsets must be None then")
        return np.arange(ids.shape[0] + 1, dtype=np.int64) * ids.shape[1]
    if ids.ndim != 1:
        raise InvalidBatchError(f"ids have shape {tuple(ids.shape)}; expected one or two dimensions")
    if offsets is None:
        raise InvalidBatchError("ids of one dimension need offsets: the first position of each bag")
    starts = as_ids(offsets, "offsets")
    ends = starts if include_last_offset else np.append(starts, len(ids))
    check_ends(ends, len(ids), "offsets")
    return ends


def flat_weights(weights: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor | None:
    """(N,) per-sample weights that lie as the ids do, whatever their strides."""
    if weights is None:
        return None
    if not isinstance(weights, torch.Tensor):
        raise InvalidBatchError(f"per_sample_weights are {kind_of(weights)}; expected a float32 tensor")
    if weights.shape != ids.shape:
        raise InvalidBatchError(f"per_sample_weights have shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}")
    return weights.reshape(-1)


def without(padding: int, ids: Ids, ends: Ends, weights: torch.Tensor | None) -> tuple[Ids, Ends, torch.Tensor | None]:
    """The batch without the ids that are ``padding``: their bags are shorter."""
    kept = ids != padding
    if kept.all():
        return ids, ends, weights
    before = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(kept, out=before[1:])
    return ids[kept], before[ends], None if weights is None else weights[torch.from_numpy(kept)]


def select(batch: JaggedIds, ids: Ids, ends: Ends, features: Sequence[str]) -> tuple[Ids, Ends, torch.Tensor | None]:
    """The part of a batch that belongs to ``features``, in their order."""
    if tuple(features) == batch.features:
        return ids, ends, batch.weights
    size, order = batch.batch_size, [batch.features.index(name) for name in features]
    spans = [slice(int(ends[at * size]), int(ends[(at + 1) * size])) for at in order]
    lengths = np.concatenate([np.diff(ends[at * size : (at + 1) * size + 1]) for at in order])
    part_ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=part_ends[1:])
    weights = None if batch.weights is None else torch.cat([batch.weights[span] for span in spans])
    return np.concatenate([ids[span] for span in spans]), part_ends, weights


def check_features(batch: JaggedIds, expected: Sequence[str]) -> None:
    """Raise InvalidBatchError unless the batch has exactly the expected features, and a weight an id or none."""
    if not isinstance(batch, JaggedIds):
        raise InvalidBatchError(f"the batch is {kind_of(batch)}; expected JaggedIds, see JaggedIds.from_dict")
    if batch.weights is not None and batch.weights.shape != batch.ids.shape:
        raise InvalidBatchError(
            f"the batch's weights have shape {tuple(batch.weights.shape)}, its ids {tuple(batch.ids.shape)}"
        )
    if sorted(batch.features) != sorted(expected):
        odd = sorted(set(batch.features) ^ set(expected)) or ["a feature twice"]
        raise InvalidBatchError(
            f"the batch's features are not those of the tables (look at {', '.join(odd[:5])}); "
            f"expected {listed(expected)}"
        )


def check_unique(names: Sequence[str], what: str) -> None:
    """Raise ConfigError if a name stands twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{what} {name!r} is given {names.count(name)} times; names must be unique")


def padding_id(padding_idx: int | None, num_embeddings: int | None) -> int | None:
    """The id that counts as absent; negative ones count from the end of a bounded table, as in torch."""
    if padding_idx is None:
        return None
    padding = as_int(padding_idx)
    if padding is None:
        raise ConfigError(f"padding_idx is {padding_idx!r}; expected an integer or None")
    if num_embeddings is None:
        return padding
    if not -num_embeddings <= padding < num_embeddings:
        raise ConfigError(f"padding_idx is {padding}; expected one of the table's {num_embeddings} ids")
    return padding % num_embeddings


def refuse_unsupported(max_norm: float | None, scale_grad_by_freq: bool, dtype: torch.dtype | None) -> None:
    """Raise ConfigError for arguments of torch's modules that are not offered."""
    if max_norm is not None:
        raise ConfigError("max_norm is not offered; clip rows with rows() and set_rows()")
    if scale_grad_by_freq:
        raise ConfigError("scale_grad_by_freq is not offered; use a rule that scales by row, such as RowwiseAdagrad")
    if dtype not in (None, torch.float32):
        raise ConfigError(f"dtype is {dtype}; rows are torch.float32")


def listed(names: Sequence[str]) -> str:
    """Up to ten names in one line."""
    return ", ".join(names[:10]) + (f", ... ({len(names)} in all)" if len(names) > 10 else "")

"""What a checkpoint has beside the rows, in one file: the dense part of the model, the optimizer's and the loader's
state, random generators, and whatever the user adds. Plain values and tensors: reading them runs no code.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from tiered_emb.errors import CheckpointError, ConfigError
from tiered_emb.pipeline import Positioned


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and loaded: optimizers, and loaders as torchdata has them."""

    def state_dict(self) -> Any:
        """All that matters, of tensors, numbers, strings, lists, tuples and dicts."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from there."""


def dense_state(model: nn.Module, modules: Collection[str]) -> dict[str, Any]:
    """What ``state_dict()`` has of everything that is no tiered module."""
    mine = tuple(f"{name}." if name else "" for name in modules)
    return {key: value for key, value in model.state_dict().items() if not key.startswith(mine)}


def state_of(what: str, one: Any) -> Any:
    """What an optimizer or a loader says of itself; None of none. Raises ConfigError if it says nothing."""
    if one is None:
        return None
    if not isinstance(one, Positioned):
        raise ConfigError(
            f"the {what} is a {type(one).__name__}, which has no state_dict(): give one that has (a loader: with its "
            f"position in it, as torchdata's StatefulDataLoader), or leave it out"
        )
    return one.state_dict()


def random_states() -> dict[str, Any]:
    """Of the generators of torch (CUDA's too, once that is in use), numpy and Python."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def write_dense(beside: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write it. Raises ConfigError for what cannot be written."""
    try:
        torch.save(beside, file)
    except RecursionError as error:
        raise _not_taken(error) from error
    except (OSError, MemoryError, RuntimeError):  # torch's of the disk are RuntimeErrors
        raise
    except Exception as error:
        raise _not_taken(error) from error


def check_readable(file: Path) -> None:
    """Raise ConfigError for what can be written and not be read back without running code."""
    try:
        torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        raise _not_taken(error) from error


def _not_taken(error: Exception) -> ConfigError:
    return ConfigError(
        f"the state of the model, optimizer or loader, or extra, has something in it that no checkpoint takes: "
        f"give tensors, numbers, strings, lists, tuples and dicts ({_unsupported(error)})"
    )


def _unsupported(error: Exception) -> str:
    """The line of torch's message that names what it does not read."""
    lines = [line.strip() for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (lines or str(error).splitlines() or [type(error).__name__])[0][:200]


def read_dense(file: Path) -> dict[str, Any]:
    """What was saved. Raises CheckpointError if this torch does not read it."""
    try:
        found: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read by this torch ({error}): use the version that wrote it"
        ) from error
    return found


def check_beside(model: nn.Module, modules: Collection[str], optimizer: Any, loader: Any, beside: Mapping[str, Any],
                  tag: str) -> None:  # fmt: skip
    """Raise CheckpointError for a dense part, an optimizer or a loader that is not as saved."""
    then = beside["dense"]
    now = {} if then is None else dense_state(model, modules)
    then = {} if then is None else then
    if odd := sorted(now.keys() ^ then.keys()):
        where = "the model" if odd[0] in now else f"checkpoint {tag!r}"
        raise CheckpointError(
            f"only {where} has {odd[0]!r} beside the rows: load it into a model of the same structure"
        )
    for name, value in then.items():
        if _shape(value) != _shape(now[name]):
            raise CheckpointError(
                f"{name!r} has shape {_shape(now[name])}, in checkpoint {tag!r} {_shape(value)}: load it into a model "
                f"of the same sizes"
            )
    for what, one in (("optimizer", optimizer), ("loader", loader)):
        if one is not None and not isinstance(one, Stateful):
            raise ConfigError(
                f"the {what} is a {type(one).__name__}, which has no load_state_dict(): give what has one"
            )
        if one is not None and beside[what] is None:
            raise CheckpointError(f"checkpoint {tag!r} was saved without the {what}: load it without one")
    if optimizer is not None:
        _check_parameters(optimizer, beside["optimizer"], tag)


def _shape(value: Any) -> tuple[int, ...] | None:
    """A tensor's; other things have none."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _check_parameters(optimizer: Any, saved: Any, tag: str) -> None:
    """Raise CheckpointError for a torch optimizer of other parameters, as it would in the middle of the load."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    if mine != theirs:
        raise CheckpointError(
            f"the optimizer has groups of {mine} parameters, in checkpoint {tag!r} of {theirs}: make it as it was then"
        )


def load_beside(model: nn.Module, optimizer: Any, loader: Any, beside: Mapping[str, Any]) -> None:
    """Set all of it but ``extra``."""
    if beside["dense"] is not None:
        model.load_state_dict(beside["dense"], strict=False)
    if optimizer is not None:
        optimizer.load_state_dict(beside["optimizer"])
    if loader is not None:
        loader.load_state_dict(beside["loader"])
    if beside["random"] is not None:
        _set_random_states(beside["random"])


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])

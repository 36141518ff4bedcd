"""Files that commands write: refused before any work if they would be written over what is read, or over each other.

Stateless; any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiered_emb.errors import ConfigError


def check_outputs(outputs: Mapping[str, str | os.PathLike[str] | None], inputs: Sequence[str] = ()) -> None:
    """Refuse outputs, by option, before anything is read or written. None is no file, "-" standard output.

    Args:
        inputs: files and directories that these must not be, or be in.

    Raises:
        ConfigError: an output is a directory, cannot be written, is or lies in an input, or is another one.
    """
    seen: dict[str, str] = {}
    for option, file in outputs.items():
        if file is None or str(file) == "-":
            continue
        _check_writable(str(file))
        real = os.path.realpath(file)
        if real in seen:
            raise ConfigError(f"{file} is named twice; {seen[real]} and {option} write a file each")
        for path in inputs:
            if Path(real).is_relative_to(os.path.realpath(path)):
                raise ConfigError(f"{option} {file} would be written over {path}; give it another name")
        seen[real] = option


def _check_writable(file: str) -> None:
    path = Path(file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{file} cannot be written: expected the name of a file in a directory that is there")


def check_new_directory(path: str, inputs: Sequence[str] = ()) -> None:
    """Refuse a directory that a command is to make, before it does anything else.

    Args:
        inputs: files and directories that it must not be in.

    Raises:
        ConfigError: it is there, its parent is not or cannot be written to, or it lies in an input.
    """
    real = Path(os.path.realpath(path))
    if os.path.lexists(path) or not os.access(real.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be made: expected a new name in a directory that is there")
    for one in inputs:
        if real.is_relative_to(os.path.realpath(one)):
            raise ConfigError(f"{path} would lie in {one}; put it beside it")


@contextmanager
def writing(file: str | os.PathLike[str]) -> Iterator[None]:
    """What the system says about a file that cannot be written, as a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error

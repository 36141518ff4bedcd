"""MovieLens-100k: 100,000 ratings of 943 people, in time order; a rating of 4 or 5 stars counts as a click.

Users, movies and occupations are ids, the genres of a movie are a bag, the age is an id and also the one dense
number. The data (Harper and Konstan, "The MovieLens Datasets", 2015; GroupLens allows research use, not
redistribution) is not part of this project: it lies in the wheel of RecBole on the Python package index, from which
three small files are taken once and kept in the user's cache directory ($XDG_CACHE_HOME or ~/.cache). Sorting by time
takes the whole data set in memory, about 10 MB.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_emb.errors import DataError
from tiered_emb.plan import JaggedIds
from tiered_emb.reference.stream import ClickBatch, Feature, Part, held_out_samples

REQUIREMENT = "recbole==1.2.1"
CLICK_STARS = 4
_FOLDER = "recbole/dataset_example/ml-100k"
_SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}
_AGE_SCALE = 50.0

Download = Callable[[Path], None]
"""Puts a wheel of `REQUIREMENT` into a folder; raises DataError."""


class MovieLensStream:
    """Ratings in time order, ties in the order of the file; see the module's essay."""

    def __init__(self, folder: Path) -> None:
        """``folder`` holds the three files, as :func:`fetch` leaves them."""
        users, items = _users(folder / "ml-100k.user"), _items(folder / "ml-100k.item")
        ratings = _ratings(folder / "ml-100k.inter")
        order = np.argsort(ratings[:, 3], kind="stable")
        self._user, self._item, stars = ratings[order, :3].T.astype(np.int64)
        self._labels = (stars >= CLICK_STARS).astype(np.float32)
        self._people, self._genres, self._genre_offsets = users.people, items.genres, items.offsets
        self.name = "movielens"
        self.dense_width = 1
        self.features = (
            Feature("user", len(self._people)),
            Feature("item", len(self._genre_offsets) - 1),
            Feature("genres", items.num_genres, "mean"),
            Feature("age", int(self._people[:, 0].max()) + 1),
            Feature("occupation", int(self._people[:, 1].max()) + 1),
        )
        self._held_out = held_out_samples(len(order), self.name)

    def samples(self, part: Part) -> int:
        """As `ClickStream.samples`."""
        return self._held_out if part is Part.HELD_OUT else len(self._labels) - self._held_out

    def batches(self, part: Part, batch_size: int) -> Iterator[ClickBatch]:
        """As `ClickStream.batches`."""
        border = len(self._labels) - self._held_out
        first, stop = (0, border) if part is Part.TRAIN else (border, len(self._labels))
        for start in range(first, stop, batch_size):
            yield self._batch(slice(start, min(start + batch_size, stop)))

    def _batch(self, rows: slice) -> ClickBatch:
        user, item = self._user[rows], self._item[rows]
        age, occupation = self._people[user].T
        genres, lengths = _bags(self._genres, self._genre_offsets, item)
        ones = np.ones(len(user), np.int64)
        parts = {
            "user": (user, ones),
            "item": (item, ones),
            "genres": (genres, lengths),
            "age": (age, ones),
            "occupation": (occupation, ones),
        }
        sparse = JaggedIds.from_dict({name: tuple(map(_tensor, part)) for name, part in parts.items()})
        dense = torch.from_numpy((age / _AGE_SCALE).astype(np.float32)[:, None])
        return ClickBatch(_tensor(self._labels[rows]), dense, sparse)


def cache_folder() -> Path:
    """Where the files are kept, after the XDG base directory specification."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return base / "tiered-emb" / "movielens-100k"


def fetch(folder: Path, download: Download | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """``folder`` with the three files in it, taken from the wheel unless they are there, which takes a while and is
    therefore told to ``say``. Raises DataError."""
    if all(_is_whole(folder / name) for name in _SHA256):
        return folder
    say(f"fetching MovieLens-100k out of {REQUIREMENT}, once; it is kept in {folder}")
    with tempfile.TemporaryDirectory(prefix="tiered-emb-") as scratch:
        (download or pip_download)(Path(scratch))
        try:
            _unpack(Path(scratch), folder)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"MovieLens-100k could not be unpacked into {folder}: {error}") from error
    return folder


def pip_download(target: Path) -> None:
    """The wheel of `REQUIREMENT`, by the pip of this interpreter. Raises DataError with pip's last words."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no message"]
        raise DataError(
            f"MovieLens-100k could not be fetched: `pip download --no-deps {REQUIREMENT}` ended with {done.returncode} "
            f"({words[-1]}). It needs a network and a package index, once; or put {', '.join(_SHA256)} of that wheel's "
            f"{_FOLDER} into {cache_folder()}"
        )


def _unpack(source: Path, folder: Path) -> None:
    wheels = sorted(source.glob("*.whl"))
    if not wheels:
        raise DataError(f"pip download of {REQUIREMENT} left no wheel in {source}")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name, expected in _SHA256.items():
            content = wheel.read(f"{_FOLDER}/{name}")
            if hashlib.sha256(content).hexdigest() != expected:
                raise DataError(f"{name} in {wheels[0].name} is not the file of {REQUIREMENT} that this reader knows")
            part = folder / f"{name}.{os.getpid()}"
            part.write_bytes(content)
            part.replace(folder / name)  # whole or not at all, also when two processes fetch


def _is_whole(path: Path) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256[path.name]


class _Users:
    """Age and number of occupation (P, 2) int64 by user id."""

    def __init__(self, people: NDArray[np.int64]) -> None:
        self.people = people


class _Items:
    """Genre numbers, of item i in genres[offsets[i]:offsets[i + 1]]."""

    def __init__(self, genres: NDArray[np.int64], offsets: NDArray[np.int64], num_genres: int) -> None:
        self.genres, self.offsets, self.num_genres = genres, offsets, num_genres


def _table(path: Path, fields: int) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows):
        if len(row) != fields:
            raise DataError(f"{path}, line {number + 2}: {len(row)} fields between tabs; expected {fields}")
    return rows


def _ratings(path: Path) -> NDArray[np.float64]:
    return np.array(_table(path, 4), np.float64)


def _users(path: Path) -> _Users:
    rows = _table(path, 5)
    occupations = {name: number for number, name in enumerate(sorted({row[3] for row in rows}))}
    people = np.zeros((max(int(row[0]) for row in rows) + 1, 2), np.int64)
    for row in rows:
        people[int(row[0])] = int(row[1]), occupations[row[3]]
    return _Users(people)


def _items(path: Path) -> _Items:
    rows = _table(path, 4)
    named = {int(row[0]): row[3].split() for row in rows}
    numbers = {name: number for number, name in enumerate(sorted({name for names in named.values() for name in names}))}
    bags = [[numbers[name] for name in named.get(item, [])] for item in range(max(named) + 1)]
    offsets = np.cumsum([0, *map(len, bags)])
    return _Items(np.array([genre for bag in bags for genre in bag], np.int64), offsets, len(numbers))


def _bags(
    members: NDArray[np.int64], offsets: NDArray[np.int64], which: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The members of bags ``which`` (B,), one bag after the other, and their lengths (B,)."""
    lengths = offsets[which + 1] - offsets[which]
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return members[np.repeat(offsets[which], lengths) + within], lengths


def _tensor(array: NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))

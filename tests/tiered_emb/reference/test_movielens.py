from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tiered_emb.errors import DataError
from tiered_emb.reference import movielens
from tiered_emb.reference.movielens import MovieLensStream, cache_folder, fetch, pip_download
from tiered_emb.reference.stream import Part

FILES = {
    "ml-100k.inter": "user\titem\trating\ttime\n"
    + "".join(f"{1 + i % 3}\t{1 + i % 2}\t{1 + i % 5}\t{1000 - i}\n" for i in range(20)),
    "ml-100k.user": "id\tage\tsex\tjob\tzip\n1\t24\tM\twriter\t1\n2\t53\tF\tartist\t2\n3\t33\tM\twriter\t3\n",
    "ml-100k.item": "id\ttitle\tyear\tclass\n1\tToy Story\t1995\tComedy Action\n2\tX\t1996\t\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes the small files above for the real ones."""
    sums = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(movielens, "_SHA256", sums)


def wheel_with(files: dict[str, str]) -> movielens.Download:
    def download(target: Path) -> None:
        with zipfile.ZipFile(target / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(f"recbole/dataset_example/ml-100k/{name}", content)

    return download


def refuse(target: Path) -> None:
    raise AssertionError("nothing was to be downloaded")


def test_ratings_come_in_time_order_with_their_features(folder: Path) -> None:
    stream = MovieLensStream(folder)
    assert (stream.samples(Part.TRAIN), stream.samples(Part.HELD_OUT)) == (18, 2)
    batch = next(iter(stream.batches(Part.TRAIN, 3)))  # ratings 19, 18, 17 of the file
    assert batch.labels.tolist() == [1.0, 1.0, 0.0]
    lengths = batch.sparse.offsets.diff().reshape(5, 3)
    assert batch.sparse.features == ("user", "item", "genres", "age", "occupation")
    parts = dict(zip(batch.sparse.features, batch.sparse.ids.split(lengths.sum(1).tolist()), strict=True))
    assert parts["user"].tolist() == [2, 1, 3]
    assert parts["item"].tolist() == [2, 1, 2]
    assert lengths[2].tolist() == [0, 2, 0]
    assert parts["genres"].tolist() == [1, 0]  # Comedy, Action, numbered by name
    assert parts["age"].tolist() == [53, 24, 33]
    assert parts["occupation"].tolist() == [0, 1, 1]
    torch.testing.assert_close(batch.dense, torch.tensor([[53.0], [24.0], [33.0]]) / 50)
    sizes = {feature.name: feature.num_embeddings for feature in stream.features}
    assert sizes == {"user": 4, "item": 3, "genres": 2, "age": 54, "occupation": 2}


def test_the_held_out_ratings_are_the_last(folder: Path) -> None:
    labels = [batch.labels.numpy() for batch in MovieLensStream(folder).batches(Part.HELD_OUT, 1)]
    assert np.concatenate(labels).tolist() == [0.0, 0.0]  # the first two of the file: 2 and 1 stars


def test_files_are_taken_from_the_wheel_once(tmp_path: Path, known: None) -> None:
    said: list[str] = []
    folder = fetch(tmp_path / "cache", wheel_with(FILES), said.append)
    assert said == [f"fetching MovieLens-100k out of recbole==1.2.1, once; it is kept in {folder}"]
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert fetch(folder, refuse, said.append) == folder
    assert len(said) == 1
    (folder / "ml-100k.user").write_text("cut")
    fetch(folder, wheel_with(FILES))
    assert (folder / "ml-100k.user").read_text() == FILES["ml-100k.user"]


def test_another_wheel_is_refused(tmp_path: Path, known: None) -> None:
    with pytest.raises(DataError, match=r"ml-100k.user in recbole-1.2.1.* is not the file"):
        fetch(tmp_path / "cache", wheel_with(FILES | {"ml-100k.user": "something else"}))


def test_a_cache_that_cannot_be_written_and_a_wheel_without_the_files(tmp_path: Path, known: None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"could not be unpacked into .*file/cache"):
        fetch(tmp_path / "file" / "cache", wheel_with(FILES))
    with pytest.raises(DataError, match=r"could not be unpacked.*ml-100k\.item"):
        fetch(tmp_path / "cache", wheel_with({name: FILES[name] for name in list(FILES)[:2]}))


def test_without_a_network_the_error_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        DataError, match=r"could not be fetched: .*recbole==1.2.1.* needs a network and a package index"
    ):
        pip_download(tmp_path)


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/tiered-emb/movielens-100k")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/tiered-emb/movielens-100k")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/me/.cache/tiered-emb/movielens-100k")

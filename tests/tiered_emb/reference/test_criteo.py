from __future__ import annotations

import errno
import gzip
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tiered_emb.errors import DataError
from tiered_emb.reference import criteo
from tiered_emb.reference._criteo_lines import diagnose, parse_lines
from tiered_emb.reference.criteo import CriteoStream
from tiered_emb.reference.stream import ClickBatch, Part

GOOD = ["0", *["1"] * 13, *["a0"] * 26]
RIGHT_LINE = re.compile(rb"[01](\t(-?\d{1,18})?){13}(\t[0-9a-fA-F]{0,16}){26}\r?")


def line(**fields: str) -> bytes:
    """A good line but for `fields`, such as I3="-2"."""
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    return "\t".join(fields.get(name, good) for name, good in zip(names, GOOD, strict=True)).encode()


def numbered(count: int) -> bytes:
    """Lines of varying length whose C1 counts from 0."""
    return b"".join(line(C1=f"{i:x}", C2="b" * (i % 17), I1=str(i)) + b"\n" for i in range(count))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def first_ids(batches: list[ClickBatch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.sparse.ids[: len(batch.labels)]]


def read(path: Path, part: Part, batch_size: int = 4) -> list[ClickBatch]:
    return list(CriteoStream(path).batches(part, batch_size))


def test_fields_become_numbers_ids_and_empty_bags(tmp_path: Path) -> None:
    content = b"\n".join(
        [
            line(label="1", I1="-2", I2="", I3="893", C1="68fd1e64", C2="", C26="FFFFFFFFFFFFFFFF"),
            line(C1="8000000000000000", C2="0"),
            line(C1="7fffffffffffffff"),
        ]
    )
    batch = read(write(tmp_path / "a.tsv", content), Part.TRAIN)[0]
    assert batch.labels.tolist() == [1.0, 0.0]
    expected = [-np.log1p(2.0), 0.0, np.log1p(893.0), np.log1p(1.0)]
    torch.testing.assert_close(batch.dense[0, :4], torch.tensor(expected, dtype=torch.float32))
    sparse = batch.sparse
    assert sparse.features[0] == "C1"
    assert len(sparse.features) == 26
    assert sparse.ids[:2].tolist() == [0x68FD1E64, -(2**63)]
    assert sparse.offsets[:5].tolist() == [0, 1, 2, 2, 3]  # C2's first bag is empty, its second holds id 0
    assert sparse.ids[2] == 0
    assert sparse.ids[-2:].tolist() == [-1, 0xA0]


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize("block_bytes", [64, 300, 1 << 20])
def test_blocks_and_packing_do_not_show_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    path = write(tmp_path / name, numbered(57))
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", block_bytes)
    stream = CriteoStream(path)
    assert (stream.samples(Part.TRAIN), stream.samples(Part.HELD_OUT)) == (52, 5)
    train = list(stream.batches(Part.TRAIN, 8))
    assert [len(batch.labels) for batch in train] == [8] * 6 + [4]
    assert first_ids(train) == list(range(52))
    assert first_ids(list(stream.batches(Part.HELD_OUT, 3))) == list(range(52, 57))
    assert first_ids(list(stream.batches(Part.TRAIN, 8))) == list(range(52))


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_line_endings(tmp_path: Path, ending: bytes) -> None:
    lines = [line(C1=f"{i:x}") for i in range(20)]
    stream = CriteoStream(write(tmp_path / "a.tsv", (ending or b"\n").join(lines) + ending))
    assert stream.samples(Part.TRAIN) + stream.samples(Part.HELD_OUT) == 20
    assert first_ids(list(stream.batches(Part.HELD_OUT, 8))) == [18, 19]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(label="2"), r"field 1 \(label\) is '2'; expected 0 or 1"),
        (line(label=""), r"field 1 \(label\) is ''; expected 0 or 1"),
        (line(I4="1.5"), r"field 5 \(I4\) is '1\.5'; expected an integer"),
        (line(I13="-"), r"field 14 \(I13\) is '-'"),
        (line(I1="1" * 19), r"field 2 \(I1\) is '1111111111111111111'; expected an integer of at most 18 digits"),
        (line(C1="xyz"), r"field 15 \(C1\) is 'xyz'; expected 1 to 16 hexadecimal digits"),
        (line(C26="0" * 17), r"field 40 \(C26\) is '00000000000000000'"),
        (line(C26="0\u00e9"), r"field 40 \(C26\) is '0é'"),
        (line()[:-3], r"field 40 \(C26\) is missing: the line has 39 fields"),
        (line() + b"\t1", r"field 41 is one too many: the line has 41 fields"),
        (b"", r"field 1 \(label\) is ''"),
        (b"\xff\xfe" * 60, r"field 1 \(label\) is '(\\xff\\xfe){20}'\.\.\.; expected 0 or 1"),
    ],
)
def test_a_malformed_line_names_file_line_and_field(tmp_path: Path, bad: bytes, message: str) -> None:
    lines = [line()] * 30
    lines[16] = bad
    path = write(tmp_path / "clicks.tsv", b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=rf"clicks\.tsv, line 17: {message}"):
        read(path, Part.TRAIN, 8)


def test_a_malformed_line_far_into_the_file_is_counted_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 512)
    path = write(tmp_path / "a.tsv.gz", numbered(97) + b"0\toops\n" + numbered(2))
    with pytest.raises(DataError, match=r"line 98: field 2 \(I1\) is 'oops'"):
        read(path, Part.HELD_OUT)


@given(st.binary(max_size=6), st.integers(0, 200), st.integers(0, 6))
@example(b"-", 3, 0)
@example(b"\t", 60, 0)
@example(b"\r", 200, 0)
def test_kernel_and_diagnosis_agree_with_the_grammar(inserted: bytes, at: int, cut: int) -> None:
    text = line()
    text = (text[:at] + inserted + text[at + cut :]).replace(b"\n", b"")
    parsed = parse_lines(line() + b"\n" + text + b"\n")
    right = RIGHT_LINE.fullmatch(text) is not None
    assert parsed.bad == (-1 if right else len(line()) + 1)
    assert len(parsed.labels) == (2 if right else 1)
    if not right:
        assert re.match(r"field \d+ ", diagnose(text))


def test_what_is_no_click_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; expected a Criteo-format file"):
        CriteoStream(tmp_path / "none.tsv")
    with pytest.raises(DataError, match="is not a regular file"):
        CriteoStream(tmp_path)
    with pytest.raises(DataError, match="has 1 sample;"):
        CriteoStream(write(tmp_path / "one.tsv", line() + b"\n"))
    with pytest.raises(DataError, match="has 0 samples"):
        CriteoStream(write(tmp_path / "empty.tsv", b""))
    with pytest.raises(DataError, match="without a newline"):
        CriteoStream(write(tmp_path / "binary", b"\0" * (3 << 20)))


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tsv", numbered(20))

    def forbidden(*args: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for verb in ("open", "is_file"):
        monkeypatch.setattr(Path, verb, forbidden)
        with pytest.raises(DataError, match=r"a\.tsv cannot be read: Permission denied$"):
            CriteoStream(path)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(numbered(500))
    (tmp_path / "a.tsv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.tsv\.gz is a damaged or incomplete gzip file"):
        CriteoStream(tmp_path / "a.tsv.gz")


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 1 << 14)
    path = write(tmp_path / "a.tsv", numbered(300) * 100)  # about 4 MB
    read(write(tmp_path / "b.tsv", numbered(20)), Part.TRAIN)  # compiles
    tracemalloc.start()
    samples = sum(len(batch.labels) for batch in CriteoStream(path).batches(Part.TRAIN, 128))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples == 27_000
    assert peak < path.stat().st_size / 4


def test_the_sample_is_read_as_its_lines_say(require_shared: Callable[[str], Path]) -> None:
    path = require_shared("data/criteo/criteo_7200.tsv.gz")
    stream = CriteoStream(path)
    assert (stream.samples(Part.TRAIN), stream.samples(Part.HELD_OUT)) == (6480, 720)
    batch = next(iter(stream.batches(Part.TRAIN, 100)))
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()[:100]
    fields = [text.split("\t") for text in lines]
    assert batch.labels.tolist() == [float(row[0]) for row in fields]
    assert batch.sparse.ids.tolist() == [int(row[14 + c], 16) for c in range(26) for row in fields if row[14 + c]]

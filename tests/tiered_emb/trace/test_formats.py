"""Every format is read as it was written, plain and compressed; what is cut, damaged or foreign is named."""

from __future__ import annotations

import gzip
import importlib.util
import lzma
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tiered_emb.errors import ConfigError, TraceError
from tiered_emb.trace import FORMATS, Trace, TraceWriter, fixed, lines, read_trace, source
from tiered_emb.trace.value import Growing

IDS = np.array([5, 7, 5, 0, 2**31 - 1, 9, 5, 1000000], np.int64)
WIDE = np.array([5, -7, 2**63 - 1, -(2**63), 0, 5, 2**40], np.int64)

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def oracle(ids: list[int], sizes: list[int] | None = None) -> bytes:
    records = zip(ids, sizes or [1] * len(ids), strict=True)
    return b"".join(struct.pack("<IQIq", at, id % 2**64, size, -1) for at, (id, size) in enumerate(records))


def recorded(path: Path) -> bytes:
    with TraceWriter(path) as writer:
        writer.append(0, IDS)
    data = path.read_bytes()
    path.unlink()
    return data


def bytes_of(format: str, path: Path) -> bytes:
    """IDS in a format."""
    if format == "tiered":
        return recorded(path)
    if format == "oracleGeneral":
        return oracle(IDS.tolist())
    if format in ("text", "csv"):
        return "".join(f"{id}\n" for id in IDS).encode()
    return IDS.astype(fixed.INTEGERS[format]).tobytes()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_each_format_plain_and_compressed(format: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"some.trace{packing}"
    path.write_bytes(PACKINGS[packing](bytes_of(format, path)))
    trace = read_trace(path, format)
    assert np.array_equal(trace.ids, IDS)
    assert trace.ids.dtype == np.int64
    assert (trace.name, trace.tables, len(trace)) == ("some", 0, len(IDS))
    assert trace.num_batches == (format == "tiered")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.csv", "csv"),
        ("a.tsv", "csv"),
        ("a.txt", "text"),
        ("a.oracleGeneral", "oracleGeneral"),
        ("w01.oracleGeneral.bin", "oracleGeneral"),
        ("anything.bin", "tiered"),
        ("misnamed.csv", "tiered"),
    ],
)
@pytest.mark.parametrize("packing", PACKINGS)
def test_formats_are_guessed_where_that_is_safe(name: str, format: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}{packing}"
    path.write_bytes(PACKINGS[packing](bytes_of(format, path)))
    assert np.array_equal(read_trace(path).ids, IDS)
    path.rename(tmp_path / "without")  # compression is told by the bytes
    assert np.array_equal(read_trace(tmp_path / "without", format).ids, IDS)


def test_a_format_that_cannot_be_guessed_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    path.write_bytes(IDS.tobytes())
    with pytest.raises(ConfigError, match=r"ids\.bin: neither .* tell the format; give one of tiered, oracleGeneral"):
        read_trace(path)
    with pytest.raises(ConfigError, match="format is 'parquet'; expected one of tiered, oracleGeneral, text, csv"):
        read_trace(path, "parquet")


@pytest.mark.parametrize("format", [name for name in fixed.INTEGERS if "64" in name])
def test_every_64_bits_are_an_id(format: str, tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_bytes(WIDE.view(np.uint64).astype(fixed.INTEGERS[format]).tobytes())
    assert np.array_equal(read_trace(path, format).ids, WIDE)


def test_unsigned_32_bits_are_positive(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_bytes(struct.pack(">III", 2**32 - 1, 0, 7))
    assert read_trace(path, "uint32-be").ids.tolist() == [2**32 - 1, 0, 7]
    assert read_trace(path, "int32-be").ids.tolist() == [-1, 0, 7]


def test_oracle_general_leaves_out_objects_of_no_size(tmp_path: Path) -> None:
    path = tmp_path / "a.oracleGeneral"
    path.write_bytes(oracle([3, 4, 2**64 - 1, 5], [1, 0, 100, 1]))
    assert read_trace(path).ids.tolist() == [3, -1, 5]


# Real traces


@pytest.mark.parametrize(
    ("file", "format", "name"),
    [("scarab-recs.trace.xz", "int64-be", "scarab_recs"), ("web12.trace.xz", "int32-be", "web12")],
)
def test_real_traces(file: str, format: str, name: str, require_shared: Callable[[str], Path]) -> None:
    spec = importlib.util.spec_from_file_location("load", require_shared("traces/load.py"))
    assert spec is not None
    assert spec.loader is not None
    load = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(load)
    assert np.array_equal(read_trace(require_shared(f"traces/{file}"), format).ids, load.load(name))


def test_a_real_csv_column(require_shared: Callable[[str], Path]) -> None:
    import csv

    path = require_shared("data/online_retail/online_retail_by_day_concat.csv.gz")
    with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
        names = [row[1] for row in csv.reader(file)]
    by_number = read_trace(path, column=1, header=True).ids
    assert np.array_equal(by_number, read_trace(path, column=names[0]).ids)
    first: dict[str, int] = {}
    numbers = [first.setdefault(name.strip(), len(first)) for name in names[1:]]
    renumbered: dict[int, int] = {}
    assert [renumbered.setdefault(id, len(renumbered)) for id in by_number.tolist()] == numbers


# Text and CSV


def text_ids(tmp_path: Path, text: bytes, **options: Any) -> list[int]:
    path = tmp_path / "given"
    path.write_bytes(text)
    return read_trace(path, "csv" if options else "text", **options).ids.tolist()


def fnv(name: str) -> int:
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 if value >= 2**63 else value


def meant(line: str) -> int:
    """The id of a line, by the words of the documentation."""
    digits = line.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 20 and -(2**63) <= int(line) < 2**64:
        return int(line) - 2**64 if int(line) >= 2**63 else int(line)
    return fnv(line)


SOME = ["0", "007", "-0", "-1", "-", "--1", "1-", "+1", "1.5", "1e3", "a", "ä", "12 34", "9" * 19, "9" * 20, "9" * 400]
EDGES = [str(edge + by) for edge in (0, 2**31, 2**63, 2**64, -(2**63)) for by in (-1, 0, 1)]


@given(st.lists(st.sampled_from(SOME + EDGES) | st.from_regex(r"-?[0-9]{1,22}", fullmatch=True), min_size=1))
def test_integers_are_ids_and_anything_else_is_a_name(
    tmp_path_factory: pytest.TempPathFactory, some: list[str]
) -> None:
    assert text_ids(tmp_path_factory.mktemp("text"), "\n".join(some).encode()) == [meant(line) for line in some]


def test_fnv_is_fnv() -> None:
    assert fnv("foobar") % 2**64 == 0x85944171F73967E8  # of the authors' own test vectors


@pytest.mark.parametrize(
    "text",
    [
        b"1\n2\n3\n",
        b"1\n2\n3",
        b"1\r\n2\r\n3\r\n",
        b"\xef\xbb\xbf1\n2\n3\n",
        b"\n\n1\n\n 2\t\n3  \n\n \n",
        b"1 \r\n\t2\n3 ",
    ],
)
def test_line_ends_blanks_and_marks(tmp_path: Path, text: bytes) -> None:
    assert text_ids(tmp_path, text) == [1, 2, 3]


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    ids = (rng.integers(-(2**62), 2**62, 500) >> rng.integers(0, 60, 500)).tolist()
    rows = "".join(f'"a,\n""b""",{id}\r\n' for id in ids).encode()
    for size in (1, 2, 7, 64, 1000):
        monkeypatch.setattr(lines, "_BLOCK_BYTES", size)
        monkeypatch.setattr(source, "_PLAIN_BYTES", 3)
        assert text_ids(tmp_path, "\n".join(map(str, ids)).encode()) == ids
        assert text_ids(tmp_path, rows, column=1) == ids


@pytest.mark.parametrize(
    ("text", "options", "ids"),
    [
        (b"when,id\n1,7\n2,8\n", {"column": "id"}, [7, 8]),
        (b"when,id\r\n1,7\r\n2,8\r\n", {"column": "id"}, [7, 8]),
        (b'"when", "id" \n1,7\n', {"column": "id"}, [7]),
        (b"when,id\n1,7\n2,8\n", {"column": 0, "header": True}, [1, 2]),
        (b"1,7\n2,8\n", {"column": 1}, [7, 8]),
        (b"1\t\t7\n\t\t8\n\t\t\n", {"column": 2, "delimiter": "\t"}, [7, 8]),
        (b"1;7\n2;8\n", {"column": 1, "delimiter": ";"}, [7, 8]),
        (b'1,"7",x\n2,"8"\n', {"column": 1}, [7, 8]),
        (b'"a,b\nc",7\n"""",8\n', {"column": 1}, [7, 8]),
        (b"1,7\n\n2,\n3,8\n", {"column": 1}, [7, 8]),  # an empty line, an empty field
        (b'1,"x, y"\n2,x\n', {"column": 1}, [fnv("x, y"), fnv("x")]),
    ],
)
def test_csv(tmp_path: Path, text: bytes, options: dict[str, Any], ids: list[int]) -> None:
    assert text_ids(tmp_path, text, **options) == ids


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (b"when,id\n1,7\n", {"column": "user"}, r"has no column 'user'; its header has 'when', 'id'$"),
        (b"1,7\n2,8\n3\n", {"column": 1}, r"line 3: no column 1 \(they count from 0\) among its 1; give"),
        (b'1,"a\n\nb"\n2,8,9\n', {"column": 2}, r"line 1: no column 2 .* among its 2"),
        (b'1,"a\n\nb",3\n\n2,8\n', {"column": 2}, r"line 5: no column 2 .* among its 2"),
        (b'1,7\n2,"8\n3,9\n', {"column": 1}, r'line 2: a quote \("\) begins that does not end'),
        (b"1,7\n2,\0\n", {"column": 1}, r"line 2: a zero byte, so this is no text"),
        (b"id\n", {"column": "id"}, r"holds no requests"),
    ],
)
def test_csv_that_is_not_as_asked_for(tmp_path: Path, text: bytes, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=rf"^trace .*given,? ?.*{message}"):
        text_ids(tmp_path, text, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": -1}, "column is -1"),
        ({"column": 1.5}, "column is 1.5"),
        ({"column": "id", "header": False}, "give its number"),
        ({"delimiter": ""}, "delimiter is ''"),
        ({"delimiter": ", "}, "delimiter is ', '"),
        ({"delimiter": '"'}, "delimiter is "),
    ],
)
def test_columns_that_make_no_sense(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text_ids(tmp_path, b"1,2\n", **options)


def test_columns_go_with_csv(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n")
    with pytest.raises(ConfigError, match="go with format 'csv', not 'text'"):
        read_trace(tmp_path / "a.txt", column=1)


# What is cut, foreign, empty or missing


@pytest.mark.parametrize("format", [*fixed.INTEGERS, "oracleGeneral"])
def test_a_partial_record_is_an_error_or_left_out(format: str, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    whole = bytes_of(format, path)
    record = len(whole) // len(IDS)
    for size in range(record, len(whole)):
        path.write_bytes(whole[:size])
        if size % record:
            where = size - size % record
            with pytest.raises(TraceError, match=rf"cut ends in the middle of a record of {record} .*at byte {where}:"):
                read_trace(path, format)
        assert np.array_equal(read_trace(path, format, tolerate_cut=True).ids, IDS[: size // record])


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("format", ["int64-be", "text", "tiered"])
def test_a_cut_compressed_file_is_an_error_or_what_is_whole(format: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    whole = PACKINGS[packing](bytes_of(format, path))
    for size in range(16, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError, match="is cut short: its"):
            read_trace(path, format)
        found = ids_left(path, format)
        assert np.array_equal(found, IDS[: len(found)])


def ids_left(path: Path, format: str) -> np.ndarray:
    """What is whole in a file that is cut."""
    try:
        return read_trace(path, format, tolerate_cut=True).ids
    except TraceError as error:
        if "holds no requests" not in str(error) and "in its header" not in str(error):
            raise
        return np.empty(0, np.int64)


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_members_one_after_the_other_and_padding(packing: str, tmp_path: Path) -> None:
    pack, path = PACKINGS[packing], tmp_path / "two"
    path.write_bytes(pack(IDS[:3].tobytes()) + pack(IDS[3:].tobytes()) + bytes(4))
    assert np.array_equal(read_trace(path, "int64-le").ids, IDS)
    path.write_bytes(pack(IDS.tobytes()) + b"no member")
    with pytest.raises(TraceError, match="data are damaged behind byte 64 of what they hold"):
        read_trace(path, "int64-le")


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_damaged_compressed_data(packing: str, tmp_path: Path) -> None:
    pack = PACKINGS[packing] if packing != ".zst" else zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(pack(np.random.default_rng(0).integers(0, 1 << 62, 4000).tobytes()))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path = tmp_path / "damaged"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="data are damaged behind byte"):
        read_trace(path, "int64-le")


def test_foreign_files(tmp_path: Path) -> None:
    text, random, ours = (tmp_path / name for name in ("text", "random", "ours"))
    text.write_text("a line of words, of which there are some\n" * 6)
    random.write_bytes(np.random.default_rng(0).bytes(24 * 40))
    ours.write_bytes(recorded(ours))
    for format in [*fixed.INTEGERS, "oracleGeneral"]:
        with pytest.raises(TraceError, match="text is text, not binary records: it begins with b'a line of"):
            read_trace(text, format)
        with pytest.raises(TraceError, match="ours is one that tiered_emb recorded"):
            read_trace(ours, format)
    with pytest.raises(TraceError, match=r"random is not oracleGeneral: the record at byte \d+ says .* request -?\d+"):
        read_trace(random, "oracleGeneral")
    for foreign in (text, random):
        with pytest.raises(TraceError, match="is no trace that tiered_emb recorded: it begins with b'"):
            read_trace(foreign, "tiered")
    for format in ("text", "csv"):
        with pytest.raises(TraceError, match="line 1: a zero byte, so this is no text"):
            read_trace(ours, format)


def test_a_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"7\n" + b"x" * (3 << 20))
    with pytest.raises(TraceError, match="line 2: no end of the line within"):
        read_trace(path)


@pytest.mark.parametrize("format", FORMATS)
def test_empty_missing_and_unreadable_files(format: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(TraceError, match=r"empty holds no requests \(0 bytes|empty is cut short in its header"):
        read_trace(empty, format)
    with pytest.raises(TraceError, match="missing cannot be opened: No such file"):
        read_trace(tmp_path / "missing", format)
    with pytest.raises(TraceError, match=r"cannot be (opened|read): Is a directory"):
        read_trace(tmp_path, format)


# Values


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_REPORT_BYTES", 1000)
    monkeypatch.setattr(source, "_PLAIN_BYTES", 256)
    path, seen = tmp_path / "ids", []
    path.write_bytes(bytes(8 * 1000))
    read_trace(path, "int64-le", progress=lambda done, size: seen.append((done, size)))
    assert len(seen) == 8
    assert seen == sorted(seen)
    assert seen[-1] == (8000, 8000)


def test_a_growing_array_keeps_what_it_was_given() -> None:
    growing, rng = Growing(np.int64), np.random.default_rng(0)
    parts = [rng.integers(0, 1 << 60, rng.integers(0, 9000)) for _ in range(50)]
    for part in parts:
        growing.append(part, len(part))
    assert np.array_equal(growing.whole(), np.concatenate(parts))


def test_parts_of_a_trace() -> None:
    ids = np.arange(5, dtype=np.int64)
    tables = np.array([1, 1, 2, 2, 1], np.uint32)
    one, several = Trace("a", ids, 9), Trace("b", ids, tables, np.array([0, 2, 2, 5]))
    assert [part.tolist() for part in one.part(1, 3)] == [[9, 9], [1, 2]]
    assert (one.num_batches, list(one.each_batch())) == (0, [])
    assert several.num_batches == 3
    assert [(t.tolist(), i.tolist()) for t, i in several.each_batch()] == [
        ([1, 1], [0, 1]),
        ([], []),
        ([2, 2, 1], [2, 3, 4]),
    ]

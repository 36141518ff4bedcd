"""Where does zstd pay for rows of float32?

Rows of a store that `tiered-emb train` has filled (made here, or `--store`). One core each:

- **Streams** of a MiB: rows as put, and with the bytes of every MiB split (all first bytes of its floats, all second
  ones, ...; the splitting is part of the time), at levels 1, 3 and 9.
- **Blocks** of 256 KiB, as segments of cold rows would be compressed, and what reading one row out of one then takes,
  beside a read of a row of such size by itself (`us_a_row_raw`, in memory both).
- **Parquet's** own BYTE_STREAM_SPLIT of a column, with zstd 1, write and read.
- **The export** of the store as it is, by each of its ways (`export_ratio` = "auto"), and beside a synced copy
  (`benchmarks.export_copy`).

Ratios are compressed bytes divided by bytes: 1 = nothing is saved.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.disk import scratch
from benchmarks.export_copy import export_vs_copy
from benchmarks.options import at_least
from benchmarks.report import Report
from storage import LmdbStore
from storage.export.write import COMPRESSIONS

QUESTION = "where zstd pays: trained rows raw, split by bytes, in blocks of segments, in Parquet, as exports"
LEVELS = (1, 3, 9)
STREAM, SEGMENT = 1 << 20, 1 << 18
WAYS = ("raw", "split", "block", "block_split")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    parser.add_argument("--store", metavar="DIRECTORY", help="trained rows of float32 (default: train some, a minute)")
    parser.add_argument("--mb", type=at_least(1), default=64, help="of rows that are compressed (default 64)")
    parser.add_argument("--rows", type=at_least(1000), default=2_000_000, help="of export beside copy (default 2 M)")
    parser.add_argument("--directory", metavar="DIRECTORY", help="where files go (default: a temporary one on a disk)")


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question."""
    report = Report("zstd on trained rows, one core", ("what", "ratio", "MB/s", "MB/s back"))
    with scratch(options.directory) as place:
        store = Path(options.store) if options.store else _train(place / "trained")
        rows = _rows(store, options.mb * 1_000_000)
        report.figures |= {"rows": len(rows), "row_bytes": rows.shape[1]}
        for way in WAYS:
            for level in LEVELS:
                _compress(report, rows, way, level)
        report.figures["ratio_raw"], report.figures["ratio_split"] = (
            report.figures[f"ratio_{way}_{LEVELS[0]}"] for way in ("raw", "split")
        )
        _one_row(report, rows)
        _parquet(report, rows)
        _exports(report, store, place)
        report.figures |= export_vs_copy(options.rows, 64, place)
    ours = [report.figures[f"{side}_ratio_to_copy"] for side in ("export", "import")]
    report.notes.append(f"Of a synced copy's speed: export {ours[0]}, import {ours[1]}.")
    return report


def _train(store: Path) -> Path:
    """A store of rows of 64 floats and their optimizer's state, as training leaves them."""
    options = ["--data", "synthetic", "--dim", "64", "--hbm-bytes", "0", "--ddr-bytes", "64MiB", "--store", str(store)]
    subprocess.run([sys.executable, "-m", "tiered_emb", "train", *options], check=True, capture_output=True)
    return store


def _rows(path: Path, most_bytes: int) -> NDArray[np.uint8]:
    """Rows of the first group (n, row_bytes), spread over the log."""
    with LmdbStore(path, read_only=True) as store:
        rows = np.concatenate([data for _, data in store.scan(0)])
    most = max(1, most_bytes // rows.shape[1])
    return np.ascontiguousarray(rows[:: max(1, len(rows) // most)][:most])


def split(data: bytes) -> bytes:
    """The first bytes of all floats, then the second ones, and so on; what is left over at the end as it is."""
    whole = len(data) // 4 * 4
    return np.frombuffer(data, np.uint8, whole).reshape(-1, 4).T.tobytes() + data[whole:]


def unsplit(data: bytes) -> bytes:
    """What was split."""
    whole = len(data) // 4 * 4
    return np.frombuffer(data, np.uint8, whole).reshape(4, -1).T.tobytes() + data[whole:]


def _compress(report: Report, rows: NDArray[np.uint8], way: str, level: int) -> None:
    size = SEGMENT if way.startswith("block") else STREAM
    flat = rows.reshape(-1)
    blocks = [flat[at : at + size].tobytes() for at in range(0, len(flat), size)]
    before, after = (split, unsplit) if way.endswith("split") else (bytes, bytes)
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    packed, seconds = _timed(lambda: [packer.compress(before(block)) for block in blocks])
    back, seconds_back = _timed(lambda: [after(unpacker.decompress(block)) for block in packed])
    assert back == blocks
    _put(report, f"{way}_{level}", sum(map(len, packed)) / len(flat), len(flat), seconds, seconds_back)


def _put(report: Report, name: str, ratio: float, size: int, seconds: float, seconds_back: float) -> None:
    speed, speed_back = size / seconds / 1e6, size / seconds_back / 1e6
    report.figures |= {
        f"ratio_{name}": round(ratio, 3),
        f"mb_per_s_{name}": round(speed),
        f"mb_per_s_back_{name}": round(speed_back),
    }
    report.lines.append((name.replace("_", " "), f"{ratio:.3f}", f"{speed:,.0f}", f"{speed_back:,.0f}"))


def _timed(call: Callable[[], list[bytes]]) -> tuple[list[bytes], float]:
    """What a call gives, and the least of three times."""
    least = float("inf")
    for _ in range(3):
        start = time.process_time()
        result = call()
        least = min(least, time.process_time() - start)
    return result, least


def _one_row(report: Report, rows: NDArray[np.uint8]) -> None:
    """Microseconds to have one row out of a compressed block, and without compression."""
    raw = rows.reshape(-1)[:SEGMENT].tobytes()
    packed, unpacker = zstandard.ZstdCompressor(level=1).compress(raw), zstandard.ZstdDecompressor()
    width = rows.shape[1]
    for name, call in (
        ("us_a_row_from_block", lambda: unpacker.decompress(packed)[width : 2 * width]),
        ("us_a_row_raw", lambda: raw[width : 2 * width]),
    ):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        report.figures[name] = round(statistics.median(times), 2)
        report.lines.append((name.replace("_", " "), "", str(report.figures[name]), ""))


def _parquet(report: Report, rows: NDArray[np.uint8]) -> None:
    """The first 64 floats of each row, or all there are, as a column with BYTE_STREAM_SPLIT, and without."""
    import pyarrow
    from pyarrow import parquet

    width = min(rows.shape[1], 256)
    data = np.ascontiguousarray(rows[:, :width])
    column = pyarrow.Array.from_buffers(pyarrow.binary(width), len(data), [None, pyarrow.py_buffer(data)])
    table = pyarrow.Table.from_arrays([column], names=["weight"])
    for name, splits in (("parquet", False), ("parquet_split", True)):

        def write(splits: bool = splits) -> list[bytes]:
            file = io.BytesIO()
            parquet.write_table(
                table,
                file,
                use_dictionary=False,
                compression="zstd",
                compression_level=1,
                use_byte_stream_split=splits,
            )
            return [file.getvalue()]

        (packed,), seconds = _timed(write)
        _, seconds_back = _timed(lambda packed=packed: [parquet.read_table(io.BytesIO(packed), use_threads=False)])
        _put(report, name, len(packed) / data.size, data.size, seconds, seconds_back)


def _exports(report: Report, path: Path, place: Path) -> None:
    """Bytes of each way to export the store, divided by those of its rows."""
    with LmdbStore(path) as store:
        store.snapshot("compression benchmark")
        try:
            for way in COMPRESSIONS:
                start = time.perf_counter()
                done = store.export(place / f"export-{way}", snapshot="compression benchmark", compression=way)
                _put_export(report, way, done.file_bytes / done.row_bytes, done.row_bytes, time.perf_counter() - start)
        finally:
            store.drop_snapshot("compression benchmark")


def _put_export(report: Report, way: str, ratio: float, size: int, seconds: float) -> None:
    name = "export_ratio" if way == "auto" else f"export_ratio_{way}"
    report.figures |= {name: round(ratio, 3), f"mb_per_s_export_{way}": round(size / seconds / 1e6)}
    report.lines.append((f"export, {way}", f"{ratio:.3f}", f"{size / seconds / 1e6:,.0f}", ""))

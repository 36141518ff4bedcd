"""`tiered-emb train` behind its options: consoles, the report's way out, exit codes."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from tiered_emb.outputs import check_outputs
from tiered_emb.reference.check import IDENTICAL
from tiered_emb.reference.job import run_job
from tiered_emb.reference.report import check_target, print_report, write_json
from tiered_emb.reference.settings import TrainOptions, decide


def train(options: TrainOptions) -> int:
    """Run and report; the exit code: 0, or 1 where ``--check`` found a difference. Raises what `run_job` raises."""
    settings = decide(options)
    if options.json is not None and options.json != "-":
        check_target(options.json)
        data = None if options.data in ("synthetic", "movielens") else options.data
        check_outputs({"--json": options.json}, [path for path in (data, options.store, options.record) if path])
    on_stderr = Console(stderr=True)
    to_stdout = options.json == "-"
    report = run_job(settings, on_stderr, hashes=options.json is not None, check=options.check is not None)
    print_report(report, on_stderr if to_stdout else Console())
    if to_stdout:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
    elif options.json is not None:
        write_json(report, options.json)
    return 0 if report.dense_check in (None, IDENTICAL) else 1

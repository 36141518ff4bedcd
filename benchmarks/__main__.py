"""``python -m benchmarks NAME``: answer one question; without NAME, list them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

NAMES = ("checkpoint", "compression", "gpu", "hot_path", "identity", "pipeline", "policies", "precision", "store")


def main(arguments: list[str]) -> int:
    """Measure one question and print its report; with ``--json -`` the last line is one JSON object. 1 = it failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME", title="questions")
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.QUESTION, description=module.QUESTION)
        command.add_argument(
            "--json", metavar="FILE|-", type=target, help="write the figures to FILE, or as the last line to stdout"
        )
        module.add_options(command)
    options = parser.parse_args(arguments)
    if options.name is None:
        parser.print_help()
        return 0
    report = modules[options.name].measure(options)
    report.show()
    if options.json:
        report.write_json(options.json)
    return int(report.failed)


def target(text: str) -> str:
    """The value of ``--json``, refused before anything is measured where it could not be written."""
    path = Path(text)
    if text != "-" and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; expected the name of a file, or -")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

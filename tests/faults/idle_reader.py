"""A program: a reader that has read, or is in the middle of a scan, and does nothing more until it is told to.

Its arguments are the path and `get` or `scan`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from storage import LmdbStore
from storage.testing import contents

if __name__ == "__main__":
    with LmdbStore(sys.argv[1], read_only=True) as store:
        if sys.argv[2] == "scan":
            scan = store.scan(0)
            next(scan)
        else:
            contents(store, 0)
        print("reading", flush=True)
        sys.stdin.readline()

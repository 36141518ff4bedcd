"""What a run of the fault suites did and found, as one JSON line at its end."""

from __future__ import annotations

import json
import time
from collections import Counter

from tests.faults.oracle import Crashed, Lost, Undetected

FINDINGS = {Lost: "lost", Undetected: "undetected", Crashed: "crashes"}
PROMISED = {"kills": 200, "flips": 1000, "truncations": 20, "full_disks": 12, "power_cuts": 60, "failed_calls": 60}


class Tally(Counter[str]):
    """How many of each fault were injected, how many findings there were."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = time.monotonic()

    def finding(self, error: BaseException) -> None:
        """Count the error that a test failed with."""
        for kind, name in FINDINGS.items():
            self[name] += isinstance(error, kind)

    @property
    def seconds(self) -> int:
        """Since the beginning."""
        return round(time.monotonic() - self._begun)

    def line(self) -> str:
        """All of it, as JSON."""
        names = dict.fromkeys([*PROMISED, *FINDINGS.values(), *sorted(self)])
        return json.dumps({name: self[name] for name in names} | {"seconds": self.seconds})

    def short_of(self) -> dict[str, int]:
        """What was promised and not done."""
        return {name: least - self[name] for name, least in PROMISED.items() if self[name] < least}


TALLY = Tally()

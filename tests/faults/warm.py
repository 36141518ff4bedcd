"""What the fork server loads: the store and its kernels, so that no child has to."""

from __future__ import annotations

from tests.faults.victim import warm_up

warm_up()

"""`python -m tiered_emb` is `tiered-emb`."""

from __future__ import annotations

from tiered_emb.cli import main

main(prog_name="tiered-emb")

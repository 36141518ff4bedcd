"""The control of every trace: the same requests in random order.

Shuffling keeps how often each row is requested and destroys when. What a policy still hits is what it owes to
popularity; the rest of its hits on the trace itself is what it owes to recency, to rows that come again soon. It is
negative where a trace's order is harder than none, such as a loop that is a little longer than the tier. In batches it
is what is left of recency once a batch's own repeats are taken out, which shuffling spreads over other batches: mostly
negative, too.
"""

from __future__ import annotations

import numpy as np

from tiered_emb.sim.requests import Requests


def shuffled(requests: Requests, seed: int = 0) -> Requests:
    """The same requests in an order drawn from `seed`; batches begin where they did."""
    return requests.taken(np.random.default_rng(seed).permutation(len(requests)))

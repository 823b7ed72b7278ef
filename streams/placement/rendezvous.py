"""Weighted rendezvous hashing: every reader computes the same owners of an adapter, without a table. Pure.

Each replica scores -weight / ln(u), u in (0, 1) from a hash of (adapter, replica); the highest scores own the adapter.
Adding or removing one of n replicas moves about 1/n of the placements, and only to or from that replica
(Thaler and Ravishankar 1998; the logarithmic weighting is Schindelhauer and Schomaker 2005).
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b

OWNERS = 2  # of an adapter that no plan says otherwise of


@lru_cache(1 << 16)
def score(adapter: str, replica: int, weight: float = 1.0) -> float:
    """The replica's claim on the adapter; the same in every process and on every machine."""
    digest = blake2b(f"{adapter}\0{replica}".encode(), digest_size=8).digest()
    # 53 bits, so that u is exact in a double and never 0 or 1.
    u = ((int.from_bytes(digest, "big") >> 11) + 0.5) / (1 << 53)
    return -weight / math.log(u)


def ranked(adapter: str, replicas: Iterable[int], weights: Mapping[int, float] | None = None) -> list[int]:
    """All `replicas`, best owner first; a replica with weight 0 is left out. Ties go to the lower place."""
    scored = [
        (-score(adapter, replica, weight), replica)
        for replica in replicas
        if (weight := 1.0 if weights is None else weights.get(replica, 1.0)) > 0
    ]
    return [replica for _, replica in sorted(scored)]

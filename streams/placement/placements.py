"""Where each adapter is, and where it belongs: the brief's `placements`. Pure."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from schemas.placement import OwnerPlan
from schemas.reasons import Tier
from schemas.replicas import Residency
from streams.placement.rendezvous import OWNERS, ranked

OWNER, SPILL = "owner", "spill"


class Placement(msgspec.Struct, frozen=True):
    """`tier` is the nearest that has the adapter; remote: an owner that has not pulled it yet."""

    adapter_id: str
    replica: int
    role: str  # owner | spill
    tier: Tier


def owners_of(adapter_id: str, replicas: Collection[int], plan: OwnerPlan | None) -> list[int]:
    """Of the `replicas` that take work, the best owners; and those that the plan pins it to."""
    count, pins = (plan.owners, plan.pins) if plan is not None else (OWNERS, [])
    best = ranked(adapter_id, replicas)[:count]
    return best + [pin for pin in pins if pin in replicas and pin not in best]


def placements(
    owners: Mapping[str, Iterable[int]], residency: Mapping[int, Residency], adapters: Collection[str]
) -> list[Placement]:
    """Of `adapters`, on the replicas of `residency`. `owners`: by adapter, among those replicas."""
    tiers: dict[tuple[str, int], Tier] = {}
    for replica, held in residency.items():
        tiers |= {(adapter, replica): Tier.DISK for adapter in held.disk_adapters}
        tiers |= {(adapter, replica): Tier.RAM for adapter in held.ram_adapters}
        tiers |= {(adapter, replica): Tier.GPU for adapter in held.gpu_adapters}
    found = [
        Placement(adapter, replica, OWNER, tiers.pop((adapter, replica), Tier.REMOTE))
        for adapter in adapters
        for replica in owners.get(adapter, ())
    ]
    return found + [
        Placement(adapter, replica, SPILL, tier) for (adapter, replica), tier in tiers.items() if adapter in adapters
    ]

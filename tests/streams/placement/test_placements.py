from schemas.placement import OwnerPlan
from schemas.reasons import Tier
from schemas.replicas import Residency
from streams.placement.placements import Placement, owners_of, placements
from streams.placement.rendezvous import ranked

ADAPTER = "acme/support@7"


def test_owners_are_the_best_and_the_pinned_ones_that_live() -> None:
    best = ranked(ADAPTER, range(6))
    assert owners_of(ADAPTER, range(6), None) == best[:2]
    assert owners_of(ADAPTER, range(6), OwnerPlan(ADAPTER, owners=3, pins=[best[5], best[0], 17])) == [
        *best[:3],
        best[5],
    ]
    assert owners_of(ADAPTER, [], None) == []


def test_an_adapter_is_in_the_nearest_tier_that_has_it() -> None:
    other = "acme/sales@1"
    residency = {
        0: Residency(gpu_adapters=[ADAPTER], ram_adapters=[ADAPTER, other], disk_adapters=[ADAPTER, other]),
        1: Residency(disk_adapters=[ADAPTER, "acme/gone@1"]),
        2: Residency(),
    }
    found = placements({ADAPTER: [0, 2], other: [1]}, residency, {ADAPTER, other})
    assert sorted(found, key=lambda one: (one.adapter_id, one.replica)) == [
        Placement(other, 0, "spill", Tier.RAM),
        Placement(other, 1, "owner", Tier.REMOTE),
        Placement(ADAPTER, 0, "owner", Tier.GPU),
        Placement(ADAPTER, 1, "spill", Tier.DISK),
        Placement(ADAPTER, 2, "owner", Tier.REMOTE),
    ]

"""Owners as the gateways compute them, and the order in which what is owned is worth having."""

import msgspec

from schemas.placement import OwnerPlan
from streams.placement.rendezvous import ranked
from tests.workers.loader.rig import Rig
from workers.loader.owned import HALF_LIFE_S, Settled, Usage, most_used_first, owns

LIVE = frozenset(range(5))


def test_the_owners_are_the_gateways() -> None:
    for n in range(50):
        adapter = f"acme/x@{n}"
        owners = {replica for replica in LIVE if owns(replica, adapter, LIVE, None)}
        assert owners == set(ranked(adapter, LIVE)[:2])
        wide = OwnerPlan(adapter, owners=4)
        assert {replica for replica in LIVE if owns(replica, adapter, LIVE, wide)} == set(ranked(adapter, LIVE)[:4])


def test_a_pin_owns_and_who_takes_no_work_does_not() -> None:
    adapter = "acme/x@1"
    last = ranked(adapter, LIVE)[-1]
    assert not owns(last, adapter, LIVE, None)
    assert owns(last, adapter, LIVE, OwnerPlan(adapter, pins=[last]))
    first = ranked(adapter, LIVE)[0]
    assert not owns(first, adapter, LIVE - {first}, None)


def test_a_replica_that_is_back_at_once_moves_nothing() -> None:
    settled = Settled()
    assert settled.see(LIVE, 0.0) == frozenset()
    assert settled.see(LIVE, 4.9) == frozenset()
    assert settled.see(LIVE, 5.0) == LIVE
    assert settled.see(LIVE - {3}, 6.0) == LIVE
    assert settled.see(LIVE, 9.0) == LIVE
    assert settled.see(LIVE - {3}, 10.0) == LIVE
    assert settled.see(LIVE - {3}, 15.0) == LIVE - {3}


def test_usage_fades_and_is_forgotten() -> None:
    usage = Usage()
    for _ in range(4):
        usage.use("often", 0.0)
    usage.use("late", HALF_LIFE_S)
    assert usage.score("often", HALF_LIFE_S) == 2
    assert usage.used(HALF_LIFE_S) == ["late", "often"]
    assert usage.used(20 * HALF_LIFE_S) == []
    assert usage.score("never", 1.0) == 0


async def test_most_used_first(rig: Rig) -> None:
    one = rig.adapter(0)
    records = [msgspec.structs.replace(one, adapter_id=name, content_id=name) for name in "abcdef"]
    order = most_used_first(records, {"f": 2.0, "e": 0.5}, {"d": 9, "e": 100}, ["c", "b", "f"])
    assert [record.adapter_id for record in order] == ["f", "e", "d", "c", "b", "a"]

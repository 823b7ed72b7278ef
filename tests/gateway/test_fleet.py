"""The replicas as a gateway sees them: who is a candidate, and with what load."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.fleet import Fleet
from gateway.flight import Ask, Flight
from gateway.router import Candidate, NoRoute, Route
from schemas.placement import OwnerPlan
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaStatus, Residency
from schemas.requests import Sampling
from schemas.tokens import LoadReport
from streams.placement.rendezvous import ranked
from streams.presence.holders import Lost


def beat(place: int, incarnation: int, tokens: int = 0, **changes: Any) -> ReplicaBeat:
    fields: dict[str, Any] = {
        "replica": place,
        "incarnation": incarnation,
        "start_offset": 0,
        "beat": 1,
        "status": ReplicaStatus.READY,
        "step": 1,
        "load": LoadReport(5, 0, 0, tokens),
        "residency": Residency(),
        "base_hash": "base",
        "numeric_class": "fp32",
        "capacity_tokens": 1000,
        "at_unix_ms": 0,
    }
    return ReplicaBeat(**fields | changes)


def claim(place: int) -> ReplicaClaim:
    return ReplicaClaim(place, "nonce", 0, "base", "fp32", 0)


def flight(adapter: str = "acme/x@1", **changes: Any) -> Flight:
    ask = Ask("r", "acme", adapter, adapter, "c", [1] * 10, 20, Sampling(0), [2], 0.0, 60.0)
    return Flight(ask, **changes)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet("base", {})
    for place in range(4):
        fleet.apply(10 + place, claim(place), True, 0.0)
        fleet.apply(20 + place, beat(place, 10 + place, tokens=place * 100), True, 0.0)
    return fleet


def test_live_replicas_with_their_loads(fleet: Fleet) -> None:
    assert fleet.candidates(0.0) == [Candidate(place, 10 + place, place * 100, 1000) for place in range(4)]
    fleet.loads.sent(2, 12, ("r", 0), 30)
    assert fleet.candidates(0.0)[2].load == 230


@pytest.mark.parametrize(
    "changes",
    [
        {"status": ReplicaStatus.DRAINING},
        {"status": ReplicaStatus.GONE, "reason": "drained"},
        {"base_hash": "another"},
    ],
)
def test_no_candidates(fleet: Fleet, changes: dict[str, Any]) -> None:
    fleet.apply(30, beat(2, 12, **changes), True, 0.1)
    assert [c.replica for c in fleet.candidates(0.1)] == [0, 1, 3]


def test_suspects_and_replayed_are_no_candidates(fleet: Fleet) -> None:
    fleet.apply(30, beat(2, 12), True, 2.0)
    fleet.apply(31, beat(5, 15), False, 2.0)
    assert [c.replica for c in fleet.candidates(4.0)] == [2]


def test_one_known_to_be_replaced_is_no_candidate(fleet: Fleet) -> None:
    # The next holder's tokens came before its claim: two topics, two orders.
    fleet.loads.reported(2, 40, LoadReport(9, 0, 0, 0))
    assert [c.replica for c in fleet.candidates(0.0)] == [0, 1, 3]
    assert fleet.apply(40, claim(2), True, 0.1) == [Lost(2, 12, "replaced")]
    fleet.apply(41, beat(2, 40), True, 0.2)
    assert sorted(c.replica for c in fleet.candidates(0.2)) == [0, 1, 2, 3]


def test_last_words_are_told(fleet: Fleet) -> None:
    word = beat(2, 12, status=ReplicaStatus.GONE, reason="engine crashed")
    assert fleet.apply(30, word, True, 0.1) == [Lost(2, 12, "gone", "engine crashed")]


def test_two_owners_unless_planned_otherwise() -> None:
    plans = {"acme/wide@1": OwnerPlan("acme/wide@1", owners=4)}
    fleet = Fleet("base", plans)
    order = {name: ranked(name, range(4)) for name in ("acme/x@1", "acme/wide@1")}
    for place in range(4):
        fleet.apply(10 + place, beat(place, place, tokens=500), True, 0.0)
    for name, owners in (("acme/x@1", 2), ("acme/wide@1", 4)):
        idle = order[name][3]
        fleet.apply(50, beat(idle, idle, tokens=1), True, 0.0)
        target = fleet.choose(flight(name), 0.0)
        assert isinstance(target, Route)
        assert (target.replica == idle) is (owners == 4)
        fleet.apply(51, beat(idle, idle, tokens=500), True, 0.0)


def test_only_the_one_that_was_named_however_full(fleet: Fleet) -> None:
    asked = replace(flight().ask, only_on=3)
    fleet.loads.sent(3, 13, ("other", 0), 10_000)
    for avoid in (set[int](), {3}):
        assert fleet.choose(Flight(asked, avoid=avoid), 0.0) == Route(3, 13, spilled=False)
    fleet.apply(30, beat(3, 13, status=ReplicaStatus.DRAINING), True, 0.1)
    assert fleet.choose(Flight(asked), 0.1) == NoRoute(overloaded=False)


def test_avoids_what_failed_it(fleet: Fleet) -> None:
    first = fleet.choose(flight(), 0.0)
    assert isinstance(first, Route)
    second = fleet.choose(flight(avoid={first.replica}), 0.0)
    assert isinstance(second, Route)
    assert second.replica != first.replica
    assert fleet.choose(flight(), 9.0) == NoRoute(overloaded=False)

"""Which replica takes a request: fewer tokens in flight, owners first, spill, refusal."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.router import Candidate, NoRoute, Route, route
from streams.placement.rendezvous import ranked

ADAPTER = "acme/support@7"


def fleet(*loads: int, capacity: int = 1000) -> list[Candidate]:
    return [Candidate(place, 100 + place, load, capacity) for place, load in enumerate(loads)]


def taken(target: Route | NoRoute) -> int:
    assert isinstance(target, Route)
    return target.replica


def test_idle_owners_the_best_takes_it() -> None:
    best, *_ = ranked(ADAPTER, range(5))
    assert route(ADAPTER, fleet(0, 0, 0, 0, 0), 10) == Route(best, 100 + best, spilled=False)


def test_the_owner_with_fewer_tokens_in_flight() -> None:
    best, second, third, *_ = ranked(ADAPTER, range(5))
    loads = [5] * 5
    loads[second], loads[third] = 4, 0
    assert taken(route(ADAPTER, fleet(*loads), 10)) == second
    assert taken(route(ADAPTER, fleet(*loads), 10, owners=3)) == third
    assert taken(route(ADAPTER, fleet(*loads), 10, owners=1)) == best


def test_spills_when_no_owner_has_room() -> None:
    best, second, third, *_ = ranked(ADAPTER, range(4))
    loads = [100] * 4
    loads[best], loads[second], loads[third] = 991, 992, 99
    assert route(ADAPTER, fleet(*loads), 10) == Route(third, 100 + third, spilled=True)
    loads[second] = 990
    assert route(ADAPTER, fleet(*loads), 10) == Route(second, 100 + second, spilled=False)


def test_refuses_when_all_are_full_or_none_lives() -> None:
    assert route(ADAPTER, fleet(991, 991, 999), 10) == NoRoute(overloaded=True)
    assert route(ADAPTER, [], 10) == NoRoute(overloaded=False)


def test_an_idle_replica_takes_what_exceeds_its_capacity() -> None:
    assert isinstance(route(ADAPTER, fleet(0, 1, capacity=5), 50), Route)
    assert route(ADAPTER, fleet(1, 1, capacity=5), 50) == NoRoute(overloaded=True)


def test_avoided_only_when_nothing_else_has_room() -> None:
    best, second, *others = ranked(ADAPTER, range(4))
    assert taken(route(ADAPTER, fleet(0, 0, 0, 0), 10, avoid={best})) == second
    assert taken(route(ADAPTER, fleet(0, 0, 0, 0), 10, avoid={best, second})) == others[0]
    assert taken(route(ADAPTER, fleet(0, 0, 0, 0), 10, avoid={0, 1, 2, 3})) == best
    full = [1000] * 4
    full[best] = 500
    assert taken(route(ADAPTER, fleet(*full), 10, avoid={best})) == best


def test_the_base_model_is_owned_by_all() -> None:
    assert route("", fleet(3, 2, 1, 2, 3), 10) == Route(2, 102, spilled=False)


@given(
    loads=st.lists(st.integers(0, 1200), max_size=8),
    cost=st.integers(1, 1100),
    owners=st.integers(1, 4),
    avoid=st.sets(st.integers(0, 8)),
    adapter=st.sampled_from([ADAPTER, "beta/qa@1", ""]),
)
def test_whatever_the_loads(loads: list[int], cost: int, owners: int, avoid: set[int], adapter: str) -> None:
    candidates = fleet(*loads)
    target = route(adapter, candidates, cost, owners, avoid)
    room = {c.replica for c in candidates if c.load == 0 or c.load + cost <= c.capacity}
    if isinstance(target, NoRoute):
        assert not room
        assert target.overloaded is bool(candidates)
        return
    assert target.replica in room
    assert target.incarnation == 100 + target.replica
    assert target.replica not in avoid or not room - avoid
    pool = room - avoid or room
    order = ranked(adapter, [c.replica for c in candidates if (c.replica in avoid) == (target.replica in avoid)])
    owning = pool & set(order[:owners] if adapter else order)
    assert target.spilled is not (target.replica in owning)
    assert owning == set() or target.replica in owning
    assert loads[target.replica] == min(loads[place] for place in owning or pool)

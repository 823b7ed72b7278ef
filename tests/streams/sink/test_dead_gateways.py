"""Which gateways will write no row any more, and from when on."""

from schemas.gateways import GatewayBeat, GatewayClaim
from streams.sink.dead_gateways import OVER_S, SILENT_S, STIRRED_S, DeadGateways


def claim(dead: DeadGateways, place: int, offset: int, now: float, live: bool = True) -> None:
    dead.apply(offset, GatewayClaim(place, "nonce", 0, 0), live, now)


def beat(dead: DeadGateways, place: int, incarnation: int, now: float, gone: bool = False) -> None:
    dead.apply(10_000, GatewayBeat(place, incarnation, 1, 0, {}, gone), True, now)


def test_a_holder_and_whoever_comes_later_are_not_over() -> None:
    dead = DeadGateways()
    claim(dead, 0, 5, 0.0)
    beat(dead, 0, 5, 1000.0)
    assert dead.among([(0, 5), (0, 6), (1, 3)], 1000.0 + SILENT_S) == []


def test_the_replaced_are_over_a_while_after_the_newer_claim() -> None:
    dead = DeadGateways()
    claim(dead, 0, 5, 0.0)
    claim(dead, 0, 9, 100.0)
    assert dead.among([(0, 5), (0, 9)], 99.9 + OVER_S) == []
    assert dead.among([(0, 5), (0, 3), (0, 9)], 100.0 + OVER_S) == [(0, 5), (0, 3)]


def test_replayed_claims_count_from_the_readers_start() -> None:
    dead = DeadGateways()
    claim(dead, 0, 9, 0.0, live=False)
    assert dead.among([(0, 5)], OVER_S - 0.1) == []
    assert dead.among([(0, 5)], OVER_S) == [(0, 5)]


def test_one_that_said_its_last_word() -> None:
    dead = DeadGateways()
    claim(dead, 0, 5, 0.0)
    beat(dead, 0, 5, 50.0, gone=True)
    assert dead.among([(0, 5)], 49.0 + OVER_S) == []
    assert dead.among([(0, 5)], 50.0 + OVER_S) == [(0, 5)]


def test_the_silent_may_only_be_paused_and_are_given_long() -> None:
    dead = DeadGateways()
    claim(dead, 0, 5, 0.0)
    beat(dead, 0, 5, 10.0)
    assert dead.among([(0, 5)], 10.0 + SILENT_S) == []
    assert dead.among([(0, 5)], 10.1 + SILENT_S) == [(0, 5)]
    beat(dead, 0, 5, 11.0 + SILENT_S)
    assert dead.among([(0, 5)], 12.0 + SILENT_S) == []


def test_nothing_stirs_for_ever() -> None:
    dead = DeadGateways()
    assert not dead.stirred(0.0)
    claim(dead, 0, 5, 0.0)
    assert dead.stirred(OVER_S)
    for now in range(0, 1000, 10):
        beat(dead, 0, 5, now)
    assert not dead.stirred(OVER_S + STIRRED_S)
    claim(dead, 0, 9, 5000.0)
    assert dead.stirred(5000.0 + OVER_S)
    assert dead.stirred(5001.0 + SILENT_S)
    assert not dead.stirred(5001.0 + SILENT_S + STIRRED_S)

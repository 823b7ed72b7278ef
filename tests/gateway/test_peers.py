"""When a change holds everywhere: every gateway that may still serve has said so."""

from gateway.peers import Peers
from schemas.gateways import GatewayBeat, GatewayClaim
from streams.presence.holders import DEAD_S


def beat(gateway: int, incarnation: int, position: int, gone: bool = False) -> GatewayBeat:
    return GatewayBeat(gateway, incarnation, 0, 0, {"aliases": {3: position}}, gone)


def test_all_who_live_must_have_passed() -> None:
    peers = Peers()
    for place, incarnation in ((0, 10), (1, 11)):
        peers.apply(incarnation, GatewayClaim(place, "n", 0, 0), True, 0.0)
    assert peers.behind("aliases", 3, 5) == [0, 1]  # claimed, and said nothing yet
    peers.apply(12, beat(0, 10, 6), True, 0.0)
    peers.apply(13, beat(1, 11, 5), True, 0.0)  # the next offset is 5: not that one
    assert peers.behind("aliases", 3, 5) == [1]
    assert peers.behind("aliases", 4, 0) == [0, 1]  # another partition
    peers.apply(14, beat(1, 11, 6), True, 0.0)
    assert peers.behind("aliases", 3, 5) == []


def test_a_new_holder_speaks_for_itself() -> None:
    peers = Peers()
    peers.apply(10, GatewayClaim(0, "n", 0, 0), True, 0.0)
    peers.apply(11, beat(0, 10, 9), True, 0.0)
    peers.apply(12, GatewayClaim(0, "m", 0, 0), True, 0.0)
    assert peers.behind("aliases", 3, 5) == [0]
    peers.apply(13, beat(0, 10, 9), True, 0.0)  # the ghost of the old one
    assert peers.behind("aliases", 3, 5) == [0]
    peers.apply(14, beat(0, 12, 9), True, 0.0)
    assert peers.behind("aliases", 3, 5) == []


def test_the_gone_and_the_dead_do_not_count() -> None:
    peers = Peers()
    peers.apply(10, beat(0, 1, 0), False, 0.0)
    peers.apply(11, beat(1, 2, 0, gone=True), True, 0.0)
    assert peers.behind("aliases", 3, 5) == [0]  # silent, and perhaps alive
    peers.tick(DEAD_S + 0.1)
    assert peers.behind("aliases", 3, 5) == []

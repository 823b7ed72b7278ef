"""Owners by rendezvous hash: the same for ever, in proportion to weight, and hardly moved by a replica that comes."""

import math
import random
from hashlib import sha256

import pytest

from streams.placement.rendezvous import ranked, score

ADAPTERS = [f"customer-{n % 700}/model-{n}@{n % 9 + 1}" for n in range(5000)]
PLACES = range(26)


def test_owners_are_the_same_for_ever() -> None:
    # A change of this digest moves every adapter of a running fleet to other replicas.
    lines = "\n".join(f"{a} {ranked(a, PLACES)[:2]} {score(a, 3):.12e}" for a in ADAPTERS)
    assert sha256(lines.encode()).hexdigest() == "adb5df659bd514897859396adffb238f987e61d61a849d4b13d2cb6fe0800b54"


def test_order_of_replicas_does_not_matter() -> None:
    shuffled = list(PLACES)
    random.Random(1).shuffle(shuffled)
    assert all(ranked(a, PLACES) == ranked(a, shuffled) for a in ADAPTERS[:200])
    assert sorted(ranked("acme/x@1", PLACES)) == list(PLACES)


def test_shares_follow_weights() -> None:
    weights = {0: 1.0, 1: 1.0, 2: 2.0, 3: 4.0}
    first = [ranked(a, weights, weights)[0] for a in ADAPTERS]
    for place, weight in weights.items():
        expected = len(ADAPTERS) * weight / 8
        assert abs(first.count(place) - expected) < 4 * math.sqrt(expected)


def test_equal_weights_share_evenly() -> None:
    first = [ranked(a, range(10))[0] for a in ADAPTERS]
    assert all(abs(first.count(place) - 500) < 4 * math.sqrt(500) for place in range(10))


def test_one_more_replica_takes_only_its_share() -> None:
    before = {a: ranked(a, range(10))[:2] for a in ADAPTERS}
    after = {a: ranked(a, range(11))[:2] for a in ADAPTERS}
    moved = [a for a in ADAPTERS if before[a] != after[a]]
    # Whoever moved, moved to the new one and kept its other owner in order.
    for a in moved:
        assert 10 in after[a]
        assert [p for p in after[a] if p != 10] == before[a][:1]
    assert abs(len(moved) - len(ADAPTERS) * 2 / 11) < 4 * math.sqrt(len(ADAPTERS) * 2 / 11)


def test_one_less_moves_only_what_it_had() -> None:
    for a in ADAPTERS[:1000]:
        whole = ranked(a, range(10))
        assert ranked(a, [p for p in range(10) if p != 4]) == [p for p in whole if p != 4]


def test_more_weight_never_takes_an_adapter_away() -> None:
    for a in ADAPTERS[:1000]:
        rank = ranked(a, range(10)).index(4)
        assert ranked(a, range(10), {4: 3.0}).index(4) <= rank


def test_weight_zero_owns_nothing_and_none_is_fine() -> None:
    assert ranked("acme/x@1", [1, 2], {1: 0.0}) == [2]
    assert ranked("acme/x@1", []) == []


@pytest.mark.parametrize("adapter", ["", "a", "ä/ö@1", "a\0b"])
def test_scores_are_positive_and_finite(adapter: str) -> None:
    assert all(0 < score(adapter, place) < math.inf for place in range(1000))

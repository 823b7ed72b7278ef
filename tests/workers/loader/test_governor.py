"""The signal rises when loads chase evictions, falls when they stop, and stays down under an honest load."""

from schemas.reasons import Tier
from schemas.stats import CacheEvent
from workers.loader.governor import Governor


def say(governor: Governor, event: str, content: str, now: float, tier: Tier = Tier.GPU) -> None:
    governor.event(CacheEvent(0, 0, 0, "", content, event, tier, Tier.NONE, 1, 0.0), now)


def chase(governor: Governor, times: int, now: float, tier: Tier = Tier.GPU) -> None:
    for n in range(times):
        say(governor, "evict", f"c{n}", now, tier)
        say(governor, "load", f"c{n}", now + 1, tier)


def test_chases_raise_it_in_their_tier_alone() -> None:
    governor = Governor()
    chase(governor, 9, 0.0, Tier.RAM)
    assert governor.thrashing(1.0) == []
    chase(governor, 1, 2.0, Tier.RAM)
    assert governor.thrashing(3.0) == [Tier.RAM]


def test_it_falls_only_when_they_are_over() -> None:
    governor = Governor()
    chase(governor, 10, 0.0)
    assert governor.thrashing(1.0) == [Tier.GPU]
    chase(governor, 4, 50.0)
    assert governor.thrashing(70.0) == [Tier.GPU], "four of the last minute are too many still"
    assert governor.thrashing(112.0) == []
    chase(governor, 4, 113.0)
    assert governor.thrashing(114.0) == []


def test_new_adapters_and_old_ones_that_come_back_are_no_chase() -> None:
    governor = Governor()
    for n in range(100):
        say(governor, "evict", f"old{n}", 0.0)
        say(governor, "load", f"new{n}", 1.0)
        say(governor, "load", f"old{n}", 61.0)
    assert governor.thrashing(61.0) == []


def test_a_few_chases_among_many_loads_are_no_thrashing() -> None:
    governor = Governor()
    for n in range(11):
        say(governor, "load", f"new{n}", 0.0)
    chase(governor, 10, 1.0)
    assert governor.thrashing(2.0) == []


def test_failures_count_for_nothing_and_nothing_is_kept() -> None:
    governor = Governor()
    for n in range(1000):
        say(governor, "fail", f"c{n}", 0.0)
        say(governor, "evict", f"c{n}", 0.0)
    assert governor.thrashing(61.0) == []
    assert not governor._tiers[Tier.GPU]._gone

"""The clock that runs only while its reader hears: outages, pauses and the grace after them never count as silence."""

from hypothesis import given
from hypothesis import strategies as st

from streams.presence.listening import DEAF_S, GRACE_S, LONGEST_STEP_S, ListeningClock


def run(clock: ListeningClock, start: float, seconds: float, age_s: float = 0.05, step_s: float = 0.1) -> float:
    """Ticks from `start` on; the time of the last tick."""
    ticks = round(seconds / step_s)
    for tick in range(1, ticks + 1):
        clock.tick(start + tick * step_s, age_s)
    return start + ticks * step_s


def test_runs_with_time_after_the_first_grace() -> None:
    clock = ListeningClock()
    at = run(clock, 1000.0, GRACE_S)
    assert clock.now < 0.2
    assert clock.hearing
    run(clock, at, 10.0)
    assert 9.9 < clock.now < 10.2


def test_stands_still_while_deaf_and_in_the_grace_after() -> None:
    clock = ListeningClock()
    at = run(clock, 0.0, 10.0)
    before = clock.now
    at = run(clock, at, 60.0, age_s=DEAF_S + 0.1)
    assert not clock.hearing
    assert clock.now == before
    at = run(clock, at, GRACE_S)
    assert clock.now - before < 0.11
    run(clock, at, 2.0)
    assert 1.9 < clock.now - before < 2.2


def test_an_outage_is_noticed_after_a_second() -> None:
    clock = ListeningClock()
    at = run(clock, 0.0, 10.0)
    before = clock.now
    for tick in range(1, 100):
        clock.tick(at + 0.1 * tick, 0.1 * tick)
    assert DEAF_S - 0.2 < clock.now - before <= DEAF_S + 0.1


def test_a_pause_of_this_process_is_no_silence() -> None:
    clock = ListeningClock()
    at = run(clock, 0.0, 10.0)
    before = clock.now
    # It wakes up, and its first fetch has already succeeded.
    clock.tick(at + 30.0, 0.01)
    assert clock.now == before
    at = run(clock, at + 30.0, GRACE_S - 0.1)
    assert clock.now == before
    run(clock, at, 1.0)
    assert clock.now > before + 0.8


def test_deaf_again_within_the_grace() -> None:
    clock = ListeningClock()
    at = run(clock, 0.0, 10.0)
    before = clock.now
    for _ in range(5):
        at = run(clock, at, 2.0, age_s=9.0)
        at = run(clock, at, GRACE_S - 0.5)
    assert clock.now == before


@given(steps=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 3)), max_size=60))
def test_never_backwards_and_never_faster_than_time(steps: list[tuple[float, float]]) -> None:
    clock, now, heard_s = ListeningClock(), 50.0, 0.0
    last = 0.0
    for step_s, age_s in steps:
        now += step_s
        assert clock.tick(now, age_s) == clock.now >= last
        assert clock.now - last <= step_s + 1e-9
        if age_s <= DEAF_S and step_s <= LONGEST_STEP_S:
            heard_s += step_s
        assert clock.now <= heard_s + 1e-9
        last = clock.now

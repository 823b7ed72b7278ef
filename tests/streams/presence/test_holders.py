"""Who holds a place, and who is alive: claims, beats, last words, silence, ghosts and replayed records."""

import random

from hypothesis import given
from hypothesis import strategies as st

from streams.presence.holders import DEAD_S, SUSPECT_S, Holders, Lost

View = Holders[str]


def alive(view: View, now: float) -> list[tuple[int, int]]:
    return [(h.place, h.incarnation) for h in view.alive(now)]


def test_a_claim_alone_serves_nothing_yet() -> None:
    view = View()
    assert view.claimed(3, 10, 200, True, 0.0) == []
    assert alive(view, 0.0) == []
    assert view.beaten(3, 10, 200, "beat", True, 0.5) == []
    assert alive(view, 0.5) == [(3, 10)]
    holder = view.get(3)
    assert holder is not None
    assert (holder.start_offset, holder.beat) == (200, "beat")


def test_replayed_records_prove_nothing() -> None:
    view = View()
    view.claimed(3, 10, 200, False, 0.0)
    view.beaten(3, 10, 200, "beat", False, 0.0)
    assert alive(view, 0.0) == []
    assert not view.free(3)  # it may well be alive
    assert not view.is_ghost(3, 10)
    view.beaten(3, 10, 200, "beat", True, 1.0)
    assert alive(view, 1.0) == [(3, 10)]


def test_suspect_then_dead_once() -> None:
    view = View()
    view.beaten(3, 10, 200, "beat", True, 1.0)
    assert alive(view, 1.0 + SUSPECT_S) == [(3, 10)]
    assert alive(view, 1.01 + SUSPECT_S) == []
    assert view.tick(1.0 + DEAD_S) == []
    assert not view.free(3)
    assert view.tick(1.01 + DEAD_S) == [Lost(3, 10, "silent")]
    assert view.tick(2.0 + DEAD_S) == []
    assert view.free(3)
    assert view.is_ghost(3, 10)


def test_one_that_was_only_paused_comes_back() -> None:
    view = View()
    view.beaten(3, 10, 200, "beat", True, 0.0)
    view.tick(9.0)
    assert view.beaten(3, 10, 200, "again", True, 10.0) == []
    assert alive(view, 10.0) == [(3, 10)]
    assert not view.free(3)
    assert not view.is_ghost(3, 10)
    assert view.tick(16.0) == [Lost(3, 10, "silent")]


def test_a_newer_claim_replaces_at_once() -> None:
    view = View()
    view.beaten(3, 10, 200, "beat", True, 0.0)
    assert view.claimed(3, 12, 300, True, 0.1) == [Lost(3, 10, "replaced")]
    assert alive(view, 0.1) == []
    assert view.is_ghost(3, 10)
    assert not view.is_ghost(3, 12)
    # The ghost's beats change nothing.
    assert view.beaten(3, 10, 200, "ghost", True, 0.2, gone="I went") == []
    assert view.claimed(3, 10, 200, True, 0.2) == []
    holder = view.get(3)
    assert holder is not None
    assert (holder.incarnation, holder.beat, holder.gone) == (12, None, False)


def test_a_beat_may_be_the_first_that_is_heard_of_a_holder() -> None:
    view = View()  # compaction keeps one record per place
    view.beaten(3, 10, 200, "beat", True, 0.0)
    assert view.beaten(3, 12, 300, "beat", True, 0.1) == [Lost(3, 10, "replaced")]
    assert alive(view, 0.1) == [(3, 12)]


def test_the_last_word_ends_it_at_once() -> None:
    view = View()
    view.beaten(3, 10, 200, "beat", True, 0.0)
    assert view.beaten(3, 10, 200, "bye", True, 0.1, gone="engine crashed") == [Lost(3, 10, "gone", "engine crashed")]
    assert alive(view, 0.1) == []
    assert view.free(3)
    # Said twice, and followed by a straggler: it is still gone, and lost once.
    assert view.beaten(3, 10, 200, "bye", True, 0.2, gone="engine crashed") == []
    assert view.beaten(3, 10, 200, "beat", True, 0.3) == []
    assert alive(view, 0.3) == []
    assert view.tick(20.0) == []
    assert view.claimed(3, 12, 300, True, 21.0) == []  # it was lost before


def test_the_dead_are_not_lost_twice_by_being_replaced() -> None:
    view = View()
    view.beaten(3, 10, 200, "beat", True, 0.0)
    view.tick(9.0)
    assert view.claimed(3, 12, 300, True, 9.1) == []


def test_unknown_places() -> None:
    view = View()
    assert view.free(3)
    assert not view.is_ghost(3, 10)  # a claim that this reader has not read yet
    assert view.get(3) is None
    view.claimed(3, 10, 0, True, 0.0)
    assert not view.is_ghost(3, 11)


@given(seed=st.integers(0, 10_000))
def test_any_life_is_lost_at_most_once_between_beats_and_never_after_a_newer_one(seed: int) -> None:
    rng, view, now = random.Random(seed), View(), 0.0
    newest, lost_since_beat = -1, set[int]()
    for _ in range(60):
        now += rng.choice((0.1, 1.0, 2.0, 6.0))
        incarnation = rng.randint(max(0, newest - 2), newest + 1)
        losses = view.tick(now)
        assert not lost_since_beat & {loss.incarnation for loss in losses}
        lost_since_beat |= {loss.incarnation for loss in losses}
        if rng.random() < 0.7:
            gone = "bye" if rng.random() < 0.1 else None
            live = rng.random() < 0.9
            if incarnation >= newest and live:
                lost_since_beat.discard(incarnation)  # it may be lost anew
            for loss in view.beaten(1, incarnation, 0, "beat", live, now, gone):
                assert loss.incarnation not in lost_since_beat
                assert loss.incarnation <= max(newest, incarnation)
                lost_since_beat.add(loss.incarnation)
        if view.get(1) is not None:
            holder = view.get(1)
            assert holder is not None
            assert holder.incarnation >= newest
            newest = holder.incarnation
            assert view.is_ghost(1, newest - 1)
            assert view.is_ghost(1, newest) is holder.lost is view.free(1)
            assert not (holder.lost and alive(view, now))

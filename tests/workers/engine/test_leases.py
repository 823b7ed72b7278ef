"""The engine says what its leases are, so that the worker's audit sees any that leaks or lacks."""

import pytest

from schemas.engine import CancelSequence, Leases
from schemas.reasons import FinishReason
from tests.workers.engine.test_scheduler import Counting, load
from tests.workers.engine.tiny import InProcess, content_id, start
from workers.audit import of_slots
from workers.engine import engine as engines


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """Three sequences run, two of them with adapters; it says its leases behind every step."""
    monkeypatch.setattr(engines, "AUDIT_S", 0.0)
    engine = InProcess(Counting(), 2)
    engine.say(load("a"), load("b"))
    engine.say(start(1, [1], "a"), start(2, [1], "b"), start(3, [1]))
    engine.engine.step()
    return engine


ATTEMPTS = {1: content_id("a"), 2: content_id("b"), 3: ""}


def last(engine: InProcess) -> Leases:
    event = engine.events[-1]
    assert isinstance(event, Leases)
    return event


def test_leases_are_those_of_the_rows(engine: InProcess) -> None:
    assert last(engine) == Leases({1: content_id("a"), 2: content_id("b")}, [1, 2], 3)
    engine.say(CancelSequence(1, FinishReason.CANCELLED))
    engine.engine.step()
    assert last(engine) == Leases({2: content_id("b")}, [2], 2)
    assert not list(of_slots(last(engine), {seq: ATTEMPTS[seq] for seq in (2, 3)}))
    engine.run()
    assert last(engine) == Leases({}, [])


def test_a_lease_that_leaks_is_seen(engine: InProcess) -> None:
    engine.slots.lease(99, content_id("a"))
    engine.engine.step()
    assert list(of_slots(last(engine), ATTEMPTS)) == [f"gpu: sequence 99 holds {content_id('a')} and is no more"]


def test_a_lease_of_a_sequence_that_waits_again_is_seen(engine: InProcess) -> None:
    """Whoever is taken out of the batch gives its lease back, though its attempt lives on."""
    told = Leases(last(engine).held, [1])
    assert list(of_slots(told, ATTEMPTS)) == [f"gpu: sequence 2 holds {content_id('b')} and does not run"]


def test_a_row_without_a_lease_is_seen(engine: InProcess) -> None:
    engine.slots.release(2)
    engine.engine.step()
    assert list(of_slots(last(engine), ATTEMPTS)) == ["gpu: sequence 2 runs without a lease"]


def test_they_are_said_every_few_seconds_and_not_with_every_step() -> None:
    engine = InProcess(Counting(), 2)
    engine.say(load("a"), start(1, [1], "a")).run()
    assert not [event for event in engine.events if isinstance(event, Leases)]

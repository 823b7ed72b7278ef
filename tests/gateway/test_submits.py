"""A Submit on its way to the log: written, unwritten, or answered before it is known which."""

from gateway.flight import End, Phase, SendSubmit
from schemas.reasons import FinishReason, Outcome, RejectReason
from schemas.tokens import Finished, Rejected
from streams.presence.holders import Lost
from tests.gateway.desk import Desk, admitted, cancel, finished, only, tokens


def test_never_written_and_never_run_is_refused(desk: Desk) -> None:
    submit = desk.open(written=None)
    actions = desk.flights.unwritten("r", 0, 3.0)
    assert actions[0] == cancel(submit)  # it may have been written all the same
    assert only(actions, End).outcome is Outcome.UNAVAILABLE
    assert desk.flights.unwritten("r", 0, 3.0) == []
    # And if it was: the words for it are answered by one more Cancel.
    assert desk.hear(submit, admitted(submit)) == [cancel(submit)]
    assert desk.hear(submit, tokens(submit, 0, 1)) == []
    assert desk.hear(submit, finished(submit, 1)) == []


def test_each_attempt_that_haunts_is_cancelled_once(desk: Desk) -> None:
    first = desk.open()
    second = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    desk.flights.cancel("r")
    for submit in (first, second):
        assert desk.hear(submit, tokens(submit, 0, 1)) == [cancel(submit)]
        assert desk.hear(submit, tokens(submit, 1, 3), admitted(submit)) == []


def test_one_that_ran_before_waits_for_the_broker(desk: Desk) -> None:
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 1))
    again = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    assert desk.flights.unwritten("r", 1, 4.0) == [cancel(again)]
    assert only(desk.flights.tick(5.0, 1.0), SendSubmit).submit.attempt == 2
    assert desk.flights.redrives == 1


def test_answered_before_the_acknowledgement_or_its_failure(desk: Desk) -> None:
    submit = desk.open(written=None)
    desk.hear(submit, admitted(submit), tokens(submit, 0, 1))
    assert desk.flights.unwritten("r", 0, 1.0) == []
    desk.flights.written("r", 0, 10)
    flight = desk.flights.get("r")
    assert flight is not None
    assert flight.phase is Phase.ADMITTED


def test_an_answer_ends_the_double_count_before_the_acknowledgement(desk: Desk) -> None:
    submit = desk.open(written=None)
    assert desk.loads.load(1, 101) == 15
    desk.hear(submit, admitted(submit))
    assert desk.loads.load(1, 101) == 10  # the report that came with the answer covers it
    desk.flights.written("r", 0, 10)
    assert desk.loads.load(1, 101) == 10


def test_an_end_before_the_acknowledgement_leaves_no_load(desk: Desk) -> None:
    for word in (Rejected("r", 0, RejectReason.TOO_LONG), Finished("r", 0, 0, FinishReason.LENGTH)):
        desk.hear(desk.open(written=None), word)
        desk.flights.written("r", 0, 10)
        assert desk.loads.load(1, 101) == 10  # as reported


def test_late_news_of_older_attempts(desk: Desk) -> None:
    desk.open(written=None)
    desk.flights.lost([Lost(1, 101, "silent")], 1.0)
    desk.flights.written("r", 0, 10)
    assert desk.flights.unwritten("r", 0, 1.0) == []
    flight = desk.flights.get("r")
    assert flight is not None
    assert (flight.phase, flight.attempt, flight.offset) == (Phase.WRITING, 1, None)

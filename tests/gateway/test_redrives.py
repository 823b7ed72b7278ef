"""An attempt that is lost: where the next one begins, and when there is none."""

import pytest

from gateway.flight import Deliver, End, SendCancel, SendSubmit
from gateway.flights import MAX_REDRIVES, MAX_WAITS, UNANSWERED_S
from schemas.reasons import FinishReason, Outcome
from schemas.replicas import ENGINE_CRASHED
from schemas.tokens import LoadReport
from streams.presence.holders import Lost
from tests.gateway.desk import STOP_ID, Desk, admitted, ask, cancel, finished, only, replace_submit, tokens


def test_words_of_an_older_attempt_are_dropped(desk: Desk) -> None:
    first = desk.open()
    second = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    assert desk.hear(first, tokens(first, 0, 1), finished(first, 1)) == []
    same_place = replace_submit(first, attempt=second.attempt)
    assert desk.hear(same_place, tokens(same_place, 0, 1)) == []  # the attempt is another replica's
    assert desk.hear(second, tokens(second, 0, 1)) == [Deliver("r", [1])]


@pytest.mark.parametrize(
    "loss", [Lost(1, 101, "silent"), Lost(1, 101, "gone", "drained"), Lost(1, 101, "replaced"), Lost(1, 105, "gone")]
)
def test_a_lost_replica_is_made_good_elsewhere(desk: Desk, loss: Lost) -> None:
    submit = desk.open()
    desk.hear(submit, admitted(submit), tokens(submit, 0, 1, 3))
    actions = desk.flights.lost([loss], 20.0)
    again = only(actions, SendSubmit).submit
    assert actions[0] == cancel(submit)
    assert (again.replica, again.incarnation, again.attempt) == (2, 102, 1)
    assert (again.generated, again.max_tokens, again.remaining_ms) == ([1, 3], 5, 40_000)
    assert desk.flights.redrives == 1
    assert desk.hear(again, admitted(again), tokens(again, 2, 4)) == [Deliver("r", [4])]


@pytest.mark.parametrize("loss", [Lost(2, 101, "silent"), Lost(1, 100, "silent")])
def test_losses_of_others_change_nothing(desk: Desk, loss: Lost) -> None:
    desk.open()
    assert desk.flights.lost([loss], 1.0) == []


def test_at_most_two_redrives(desk: Desk) -> None:
    submit = desk.open()
    for _ in range(MAX_REDRIVES):
        submit = only(desk.flights.lost([Lost(submit.replica, submit.incarnation, "silent")], 1.0), SendSubmit).submit
    actions = desk.flights.lost([Lost(submit.replica, submit.incarnation, "silent")], 1.0)
    assert actions[0] == cancel(submit)
    assert only(actions, End).outcome is Outcome.FAILED
    assert desk.flights.redrives == MAX_REDRIVES


def test_present_at_two_engine_crashes(desk: Desk) -> None:
    """Read is enough: a poison kills its engine before the worker has said a word."""
    desk.open(written=10)
    desk.loads.reported(1, 101, LoadReport(11, 1, 0, 10))
    again = only(desk.flights.lost([Lost(1, 101, "gone", ENGINE_CRASHED)], 1.0), SendSubmit).submit
    desk.flights.written("r", again.attempt, 20)
    desk.loads.reported(2, 102, LoadReport(21, 1, 0, 10))
    end = only(desk.flights.lost([Lost(2, 102, "gone", ENGINE_CRASHED)], 1.0), End)
    assert (end.outcome, end.finish) == (Outcome.FAILED, "redrives_used_up")


@pytest.mark.parametrize("written", [None, 20])
def test_an_engine_that_crashed_before_it_read_the_request_is_not_held_against_it(
    desk: Desk, written: int | None
) -> None:
    submit = desk.open()
    desk.hear(submit, admitted(submit), tokens(submit, 0, 1))
    again = only(desk.flights.lost([Lost(1, 101, "gone", ENGINE_CRASHED)], 1.0), SendSubmit).submit
    if written is not None:
        desk.flights.written("r", again.attempt, written)
    desk.loads.reported(2, 102, LoadReport(20, 0, 0, 0))  # its last word's
    actions = desk.flights.lost([Lost(2, 102, "gone", ENGINE_CRASHED)], 1.0)
    assert actions[0] == cancel(again)
    third = only(actions, SendSubmit).submit
    assert (third.replica, third.attempt, third.generated) == (3, 2, [1])
    assert desk.flights.redrives == 1


def test_one_replica_after_the_other_gone_unread_ends_it_at_last(desk: Desk) -> None:
    submit, actions = desk.open(), []
    for _ in range(MAX_WAITS + 1):
        actions = desk.flights.lost([Lost(submit.replica, submit.incarnation, "gone", "left")], 1.0)
        submit = next((action.submit for action in actions if isinstance(action, SendSubmit)), submit)
    assert only(actions, End).outcome is Outcome.UNAVAILABLE


def test_a_gap_begins_anew_at_the_next_position(desk: Desk) -> None:
    submit = desk.open()
    actions = desk.hear(submit, tokens(submit, 0, 1), tokens(submit, 2, 4), tokens(submit, 3, 5))
    assert actions[0] == Deliver("r", [1])
    assert actions[1] == cancel(submit)
    assert only(actions, SendSubmit).submit.generated == [1]
    assert len(actions) == 3  # what came behind the gap is of an attempt that does not count any more


def test_a_last_word_beyond_what_came(desk: Desk) -> None:
    submit = desk.open()
    again = only(desk.hear(submit, tokens(submit, 0, 1), finished(submit, 3, FinishReason.STOP)), SendSubmit).submit
    assert again.generated == [1]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.GATEWAY_LOST])
def test_an_end_that_nobody_here_wanted(desk: Desk, reason: FinishReason) -> None:
    submit = desk.open()
    assert only(desk.hear(submit, tokens(submit, 0, 1), finished(submit, 1, reason)), SendSubmit).submit.generated == [
        1
    ]


def test_died_between_the_last_token_and_the_word_for_it(desk: Desk) -> None:
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 1, 3, 4, 5, 6))
    assert only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), End).finish == "length"
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 1, STOP_ID))
    assert only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), End).finish == "stop"
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 1, 3, 4, 5, STOP_ID))
    assert only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), End).finish == "stop"


def test_a_place_lost_in_the_log_begins_everything_anew(desk: Desk) -> None:
    submits = [desk.open(ask(f"r{n}")) for n in range(3)]
    desk.hear(submits[1], tokens(submits[1], 0, 1))
    actions = desk.flights.gap(1.0)
    assert [a.submit.request_id for a in actions if isinstance(a, SendSubmit)] == ["r0", "r1", "r2"]
    assert [a for a in actions if isinstance(a, SendCancel)] == [cancel(submit) for submit in submits]


def test_parked_until_a_replica_comes(desk: Desk) -> None:
    desk.open()
    desk.live = []
    assert not any(isinstance(a, SendSubmit) for a in desk.flights.lost([Lost(1, 101, "silent")], 1.0))
    assert desk.flights.tick(2.0, 1.0) == []
    desk.live = [3]
    submit = only(desk.flights.tick(3.0, 1.0), SendSubmit).submit
    assert (submit.replica, submit.attempt) == (3, 1)
    # Words of the attempt that was lost, while parked and after, change nothing.
    assert desk.hear(replace_submit(submit, attempt=0, replica=1, incarnation=101), tokens(submit, 0, 1)) == []


def test_words_of_the_lost_attempt_while_parked(desk: Desk) -> None:
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 1))
    desk.live = []
    desk.flights.lost([Lost(1, 101, "replaced")], 1.0)
    assert desk.hear(submit, tokens(submit, 1, 3), finished(submit, 2)) == []


def test_parked_until_there_is_room_but_not_beyond_the_deadline(desk: Desk) -> None:
    desk.open(ask(deadline_at=5.0))
    desk.full = True
    desk.flights.lost([Lost(1, 101, "silent")], 1.0)
    assert desk.flights.tick(4.0, 1.0) == []
    assert desk.flights.tick(5.0, 1.0) == [End("r", Outcome.DEADLINE, "deadline", "the request's time is over")]


def test_what_was_read_is_answered_in_time_or_made_good(desk: Desk) -> None:
    submit = desk.open(written=10)
    assert desk.flights.tick(1.0, 0.0) == []
    desk.loads.reported(1, 101, LoadReport(10, 0, 0, 0))
    assert desk.flights.tick(30.0, 20.0) == []  # it has not read it yet: there may be a queue
    desk.loads.reported(1, 101, LoadReport(11, 0, 0, 0))
    assert desk.flights.tick(31.0, 30.0) == []
    assert desk.flights.tick(45.0, 30.0 + UNANSWERED_S) == []  # only time in which this gateway could hear counts
    actions = desk.flights.tick(46.0, 30.1 + UNANSWERED_S)
    assert actions[0] == cancel(submit)
    assert only(actions, SendSubmit).submit.replica == 2


def test_an_answered_one_may_be_silent_for_long(desk: Desk) -> None:
    submit = desk.open(written=10)
    desk.hear(submit, admitted(submit))
    assert desk.flights.tick(10.0, 10.0) == []
    assert desk.flights.tick(40.0, 40.0) == []

"""A Submit that its replica refuses: what is tried again, where, when, and for how long."""

from dataclasses import replace

import pytest

from gateway.flight import Deliver, End, SendSubmit
from gateway.flights import MAX_REFUSALS, MAX_UNHEARD
from schemas.reasons import FinishReason, Outcome, RejectReason
from streams.presence.holders import Lost
from tests.gateway.desk import Desk, admitted, ask, cancel, finished, only, rejected, tokens


@pytest.mark.parametrize(
    "reason",
    [
        RejectReason.DRAINING,
        RejectReason.OVERLOADED,
        RejectReason.GATEWAY_LOST,
        RejectReason.UNKNOWN_ADAPTER,
        RejectReason.BASE_MISMATCH,
    ],
)
def test_passing_refusals_are_tried_elsewhere_at_once(desk: Desk, reason: RejectReason) -> None:
    submit = desk.open()
    [again] = desk.hear(submit, rejected(submit, reason))
    assert isinstance(again, SendSubmit)
    assert (again.submit.replica, again.submit.attempt) == (2, 1)
    assert desk.flights.redrives == 0


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (RejectReason.DRAINING, Outcome.UNAVAILABLE),
        (RejectReason.STALE, Outcome.UNAVAILABLE),
        (RejectReason.OVERLOADED, Outcome.OVERLOADED),
        (RejectReason.UNKNOWN_ADAPTER, Outcome.FAILED),
    ],
)
def test_refused_by_all_it_waits_for_ticks_and_gives_up_at_last(
    desk: Desk, reason: RejectReason, outcome: Outcome
) -> None:
    desk.live = [1]
    submit = desk.open()
    for now in range(MAX_REFUSALS):
        assert desk.hear(submit, rejected(submit, reason)) == []  # not in a tight circle
        submit = only(desk.flights.tick(1.0 + now, 0.0), SendSubmit).submit
    assert only(desk.hear(submit, rejected(submit, reason)), End).outcome is outcome


def test_taken_for_dead_it_waits_until_its_beat_is_heard(desk: Desk) -> None:
    """After a pause of this process, and for as long as it takes to make sure of its place."""
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 11))
    actions, now = desk.hear(submit, finished(submit, 1, FinishReason.GATEWAY_LOST)), 1.0
    for _ in range(MAX_UNHEARD):
        actions = actions or desk.flights.tick(now := now + 0.1, 0.0)
        submit = only(actions, SendSubmit).submit
        actions = desk.hear(submit, rejected(submit, RejectReason.GATEWAY_LOST))
    submit = only(desk.flights.tick(now, 0.0), SendSubmit).submit
    assert submit.generated == [11]
    assert desk.hear(submit, tokens(submit, 1, 12)) == [Deliver("r", [12])]
    [again] = desk.flights.lost([Lost(submit.replica, submit.incarnation, "gone")], 9.0)[1:]
    submit = only([again], SendSubmit).submit
    end = only(desk.hear(submit, rejected(submit, RejectReason.GATEWAY_LOST)), End)
    assert (end.outcome, end.finish) == (Outcome.UNAVAILABLE, "gateway_lost")


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (RejectReason.DEADLINE, Outcome.DEADLINE),
        (RejectReason.CONTENT_MISMATCH, Outcome.FAILED),
        (RejectReason.QUARANTINED, Outcome.FAILED),
        (RejectReason.TOO_LONG, Outcome.FAILED),
    ],
)
def test_refusals_for_good(desk: Desk, reason: RejectReason, outcome: Outcome) -> None:
    submit = desk.open()
    assert desk.hear(submit, rejected(submit, reason))[0] == End(
        "r", outcome, "deadline" if outcome is Outcome.DEADLINE else reason.value, "why"
    )


def test_a_stale_refusal_comes_from_the_next_holder(desk: Desk) -> None:
    submit = desk.open()
    [again] = desk.hear(submit, rejected(submit, RejectReason.STALE), incarnation=140)
    assert isinstance(again, SendSubmit)
    assert again.submit.replica == 2
    assert desk.loads.replaced(1, 101)
    # The claim shows in the table afterwards: nothing of it is left to make good.
    assert desk.flights.lost([Lost(1, 101, "replaced")], 1.0) == []


def test_a_stale_refusal_of_one_that_ran_is_a_loss(desk: Desk) -> None:
    submit = desk.open()
    desk.hear(submit, admitted(submit), tokens(submit, 0, 1))
    actions = desk.hear(submit, rejected(submit, RejectReason.STALE), incarnation=140)
    assert actions[0] == cancel(submit)
    assert only(actions, SendSubmit).submit.generated == [1]
    assert desk.flights.redrives == 1


def test_a_stale_refusal_of_an_earlier_holder_is_noise(desk: Desk) -> None:
    submit = desk.open()
    assert desk.hear(submit, rejected(submit, RejectReason.STALE), incarnation=90) == []


def test_retired_before_the_first_token_resolves_the_alias_once(desk: Desk) -> None:
    submit = desk.open()
    desk.resolved = replace(ask(), adapter="acme/x@2", content_id="c2")
    again = only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), SendSubmit).submit
    assert (again.adapter, again.content_id) == ("acme/x@2", "c2")
    end = only(desk.hear(again, rejected(again, RejectReason.RETIRED)), End)
    assert (end.outcome, end.finish) == (Outcome.FAILED, "retired")


def test_retired_while_the_table_here_is_behind(desk: Desk) -> None:
    submit = desk.open()
    desk.resolved = ask()
    assert desk.hear(submit, rejected(submit, RejectReason.RETIRED)) == []
    submit = only(desk.flights.tick(1.0, 0.0), SendSubmit).submit
    desk.resolved = replace(ask(), adapter="acme/x@2", content_id="c2")
    again = only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), SendSubmit).submit
    assert again.adapter == "acme/x@2"


def test_retired_after_many_other_refusals_is_resolved_all_the_same(desk: Desk) -> None:
    desk.live = [1]
    submit = desk.open()
    for now in range(MAX_REFUSALS):
        desk.hear(submit, rejected(submit, RejectReason.OVERLOADED))
        submit = only(desk.flights.tick(1.0 + now, 0.0), SendSubmit).submit
    desk.resolved = replace(ask(), adapter="acme/x@2", content_id="c2")
    assert only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), SendSubmit).submit.adapter == "acme/x@2"


def test_retired_for_good(desk: Desk) -> None:
    submit = desk.open()
    desk.resolved = None
    assert only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), End).finish == "retired"
    # Told by the table here again and again that it is ready: an end all the same.
    submit = desk.open()
    desk.resolved = ask()
    for now in range(MAX_REFUSALS):
        assert desk.hear(submit, rejected(submit, RejectReason.RETIRED)) == []
        submit = only(desk.flights.tick(1.0 + now, 0.0), SendSubmit).submit
    assert only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), End).finish == "retired"


def test_retired_after_the_first_token_never_changes_the_adapter(desk: Desk) -> None:
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 1))
    again = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    desk.resolved = replace(ask(), adapter="acme/x@2", content_id="c2")
    assert only(desk.hear(again, rejected(again, RejectReason.RETIRED)), End).outcome is Outcome.FAILED

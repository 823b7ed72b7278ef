"""A Submit that its replica refuses: what is tried again, where, when, and for how long."""

from dataclasses import replace
from itertools import pairwise

import pytest

from gateway.flight import Deliver, End, SendSubmit
from gateway.flights import BACKOFF_S, MAX_WAITS
from schemas.reasons import Outcome, RejectReason
from streams.presence.holders import Lost
from tests.gateway.desk import Desk, admitted, ask, cancel, only, rejected, tokens


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
        (RejectReason.GATEWAY_LOST, Outcome.UNAVAILABLE),
        (RejectReason.OVERLOADED, Outcome.OVERLOADED),
        (RejectReason.UNKNOWN_ADAPTER, Outcome.FAILED),
    ],
)
def test_refused_by_all_it_waits_for_ticks_and_gives_up_at_last(
    desk: Desk, reason: RejectReason, outcome: Outcome
) -> None:
    desk.live = [1]
    submit = desk.open()
    for now in range(MAX_WAITS):
        assert desk.hear(submit, rejected(submit, reason), now=1.0 + now) == []  # not in a tight circle
        submit = only(desk.flights.tick(2.0 + now, 0.0), SendSubmit).submit
    assert only(desk.hear(submit, rejected(submit, reason)), End).outcome is outcome


@pytest.mark.parametrize(
    "reason",
    [
        RejectReason.STALE,
        RejectReason.DRAINING,
        RejectReason.OVERLOADED,
        RejectReason.GATEWAY_LOST,
        RejectReason.UNKNOWN_ADAPTER,
    ],
)
def test_one_that_ran_waits_until_it_is_taken(desk: Desk, reason: RejectReason) -> None:
    """Its client sees a pause; the replicas see a try now and then."""
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 11))
    actions, tries = desk.flights.lost([Lost(1, 101, "silent")], 1.0), []
    for step in range(3000):
        now = 1.0 + step / 100
        if actions := actions or desk.flights.tick(now, 0.0):
            tries.append(now)
            submit = only(actions, SendSubmit).submit
            actions = desk.hear(submit, rejected(submit, reason), now=now)
    assert tries[:2] == [1.0, 1.01]  # the other replicas, at once
    assert [b - a for a, b in pairwise(tries[1:7])] == pytest.approx([*BACKOFF_S, *BACKOFF_S[-1:]], abs=0.011)
    assert 50 < len(tries) < 70
    submit = only(desk.flights.tick(40.0, 0.0), SendSubmit).submit
    assert submit.generated == [11]
    assert desk.hear(submit, tokens(submit, 1, 12)) == [Deliver("r", [12])]
    assert desk.flights.redrives == 1


def test_one_that_ran_waits_no_longer_than_its_deadline(desk: Desk) -> None:
    submit = desk.open(ask(deadline_at=5.0))
    desk.hear(submit, tokens(submit, 0, 11))
    desk.live = [2]
    submit = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    assert desk.hear(submit, rejected(submit, RejectReason.OVERLOADED), now=4.9) == []
    assert desk.flights.tick(5.0, 0.0) == [End("r", Outcome.DEADLINE, "deadline", "the request's time is over")]


def test_what_ran_in_between_is_no_refusal(desk: Desk) -> None:
    """Each time that replicas refuse it begins anew: the first tries come quickly."""
    desk.live = [1]
    submit = desk.open()
    for now in (1.0, 2.0, 3.0):
        desk.hear(submit, rejected(submit, RejectReason.OVERLOADED), now=now)
        submit = only(desk.flights.tick(now + 0.9, 0.0), SendSubmit).submit
    desk.hear(submit, admitted(submit))
    submit = only(desk.flights.lost([Lost(1, 101, "silent")], 5.0), SendSubmit).submit
    desk.hear(submit, rejected(submit, RejectReason.OVERLOADED), now=6.0)
    assert desk.flights.tick(6.0 + BACKOFF_S[0], 0.0) != []


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
    submit = only(desk.flights.tick(2.0, 0.0), SendSubmit).submit
    desk.resolved = replace(ask(), adapter="acme/x@2", content_id="c2")
    again = only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), SendSubmit).submit
    assert again.adapter == "acme/x@2"


def test_retired_after_many_other_refusals_is_resolved_all_the_same(desk: Desk) -> None:
    desk.live = [1]
    submit = desk.open()
    for now in range(MAX_WAITS):
        desk.hear(submit, rejected(submit, RejectReason.OVERLOADED))
        submit = only(desk.flights.tick(2.0 + now, 0.0), SendSubmit).submit
    desk.resolved = replace(ask(), adapter="acme/x@2", content_id="c2")
    assert only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), SendSubmit).submit.adapter == "acme/x@2"


def test_retired_for_good(desk: Desk) -> None:
    submit = desk.open()
    desk.resolved = None
    assert only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), End).finish == "retired"
    # Told by the table here again and again that it is ready: an end all the same.
    submit = desk.open()
    desk.resolved = ask()
    for now in range(MAX_WAITS):
        assert desk.hear(submit, rejected(submit, RejectReason.RETIRED)) == []
        submit = only(desk.flights.tick(2.0 + now, 0.0), SendSubmit).submit
    assert only(desk.hear(submit, rejected(submit, RejectReason.RETIRED)), End).finish == "retired"


def test_retired_after_the_first_token_never_changes_the_adapter(desk: Desk) -> None:
    submit = desk.open()
    desk.hear(submit, tokens(submit, 0, 1))
    again = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    desk.resolved = replace(ask(), adapter="acme/x@2", content_id="c2")
    assert only(desk.hear(again, rejected(again, RejectReason.RETIRED)), End).outcome is Outcome.FAILED

"""One gateway's open requests: every way in which an attempt ends, and what follows from it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.flight import Action, Ask, Deliver, End, Flight, Phase, SendCancel, SendSubmit
from gateway.flights import MAX_REDRIVES, MAX_REFUSALS, MAX_UNHEARD, UNANSWERED_S, Flights
from gateway.loadview import LoadView
from gateway.router import NoRoute, Route
from schemas.reasons import FinishReason, Outcome, RejectReason, Tier
from schemas.replicas import ENGINE_CRASHED
from schemas.requests import Cancel, Sampling, Submit
from schemas.tokens import Admitted, Finished, LoadReport, Rejected, TokenBatch, TokenEvent, Tokens
from streams.presence.holders import Lost

GATEWAY, INCARNATION = 2, 50
STOP_ID = 2


def ask(request_id: str = "r", deadline_at: float = 60.0) -> Ask:
    return Ask(
        request_id, "acme", "acme/x:prod", "acme/x@1", "c1", [7] * 10, 5, Sampling(3), [STOP_ID], 0.0, deadline_at
    )


class Desk:
    """Flights with a router that follows `routes`: replica n is incarnation 100 + n."""

    def __init__(self) -> None:
        self.loads = LoadView()
        self.live = [1, 2, 3]
        self.full = False
        self.resolved: Ask | None = None
        self.incarnations = {place: 100 + place for place in range(1, 4)}
        self.flights = Flights(GATEWAY, INCARNATION, "base", self.loads, self.route, lambda _: self.resolved)

    def route(self, flight: Flight) -> Route | NoRoute:
        if self.full or not self.live:
            return NoRoute(overloaded=self.full)
        place = next((p for p in self.live if p not in flight.avoid), self.live[0])
        return Route(place, self.incarnations[place], spilled=False)

    def open(self, asked: Ask | None = None, written: int | None = 10) -> Submit:
        _, actions = self.flights.open(asked or ask(), 0.0)
        submit: Submit = only(actions, SendSubmit).submit
        if written is not None:
            self.flights.written(submit.request_id, submit.attempt, written)
        return submit

    def hear(self, submit: Submit, *events: TokenEvent, now: float = 1.0, **changes: Any) -> list[Action]:
        fields: dict[str, Any] = {
            "replica": submit.replica,
            "incarnation": submit.incarnation,
            "gateway": GATEWAY,
            "gateway_incarnation": INCARNATION,
            "load": LoadReport(1_000_000, 1, 0, 10),
        } | changes
        return self.flights.events(TokenBatch(events=list(events), **fields), now)


def only(actions: Iterable[Action], kind: type[Any]) -> Any:
    [found] = [action for action in actions if isinstance(action, kind)]
    return found


def tokens(submit: Submit, position: int, *ids: int) -> Tokens:
    return Tokens(submit.request_id, submit.attempt, position, list(ids))


def admitted(submit: Submit, tier: Tier = Tier.GPU) -> Admitted:
    return Admitted(submit.request_id, submit.attempt, tier)


def finished(submit: Submit, length: int, reason: FinishReason = FinishReason.LENGTH, detail: str = "") -> Finished:
    return Finished(submit.request_id, submit.attempt, length, reason, detail)


def rejected(submit: Submit, reason: RejectReason) -> Rejected:
    return Rejected(submit.request_id, submit.attempt, reason, "why")


def cancel(submit: Submit) -> SendCancel:
    return SendCancel(submit.replica, Cancel(submit.request_id, submit.attempt, GATEWAY, INCARNATION))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_life_without_trouble(desk: Desk) -> None:
    submit = desk.open()
    assert submit == Submit(
        request_id="r", attempt=0, customer="acme", adapter="acme/x@1", content_id="c1", base_hash="base", replica=1,
        incarnation=101, gateway=GATEWAY, gateway_incarnation=INCARNATION, prompt=[7] * 10, generated=[], max_tokens=5,
        sampling=Sampling(3), stop_ids=[STOP_ID], remaining_ms=60_000,
    )  # fmt: skip
    assert desk.hear(submit, admitted(submit, Tier.DISK), tokens(submit, 0, 11)) == [Deliver("r", [11])]
    flight = desk.flights.get("r")
    assert flight is not None
    assert (flight.tier, flight.phase) == (Tier.DISK, Phase.ADMITTED)
    assert desk.hear(submit, tokens(submit, 1, 12, 13), finished(submit, 3, FinishReason.STOP)) == [
        Deliver("r", [12, 13]),
        End("r", Outcome.OK, "stop", ""),
    ]
    assert len(desk.flights) == 0
    assert desk.loads.load(1, 101) == 10  # as reported: nothing of its own is left


@pytest.mark.parametrize(
    ("reason", "outcome", "finish"),
    [
        (FinishReason.LENGTH, Outcome.OK, "length"),
        (FinishReason.DEADLINE, Outcome.DEADLINE, "deadline"),
        (FinishReason.LOAD_FAILED, Outcome.FAILED, "load_failed"),
        (FinishReason.ERROR, Outcome.FAILED, "error"),
    ],
)
def test_endings(desk: Desk, reason: FinishReason, outcome: Outcome, finish: str) -> None:
    submit = desk.open()
    assert desk.hear(submit, finished(submit, 0, reason, "x")) == [End("r", outcome, finish, "x")]


def test_no_replica_or_no_room(desk: Desk) -> None:
    desk.live = []
    assert only(desk.flights.open(ask(), 0.0)[1], End).outcome is Outcome.UNAVAILABLE
    desk.full = True
    assert only(desk.flights.open(ask(), 0.0)[1], End).outcome is Outcome.OVERLOADED
    assert len(desk.flights) == 0


def test_duplicates_are_delivered_once(desk: Desk) -> None:
    submit = desk.open()
    assert desk.hear(submit, admitted(submit), tokens(submit, 0, 1, 3)) == [Deliver("r", [1, 3])]
    assert desk.hear(submit, admitted(submit), tokens(submit, 0, 1, 3)) == []
    assert desk.hear(submit, tokens(submit, 1, 3, 4)) == [Deliver("r", [4])]


@pytest.mark.parametrize(
    "changes",
    [{"incarnation": 99}, {"incarnation": 200}, {"replica": 2}, {"gateway_incarnation": 49}],
)
def test_words_of_others_are_dropped(desk: Desk, changes: dict[str, int]) -> None:
    submit = desk.open()
    assert desk.hear(submit, admitted(submit), tokens(submit, 0, 1), finished(submit, 1), **changes) == []
    flight = desk.flights.get("r")
    assert flight is not None
    assert flight.phase is Phase.WRITTEN


def test_words_of_an_older_attempt_are_dropped(desk: Desk) -> None:
    first = desk.open()
    second = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    assert desk.hear(first, tokens(first, 0, 1), finished(first, 1)) == []
    same_place = replace_submit(first, attempt=second.attempt)
    assert desk.hear(same_place, tokens(same_place, 0, 1)) == []  # the attempt is another replica's
    assert desk.hear(second, tokens(second, 0, 1)) == [Deliver("r", [1])]


def replace_submit(submit: Submit, **changes: Any) -> Submit:
    return msgspec.structs.replace(submit, **changes)


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
    for _ in range(MAX_REFUSALS + 1):
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


def test_the_client_goes_away_in_each_phase(desk: Desk) -> None:
    for written, heard in ((None, False), (10, False), (10, True)):
        submit = desk.open(written=written)
        if heard:
            desk.hear(submit, admitted(submit), tokens(submit, 0, 1))
        assert desk.flights.cancel("r") == [cancel(submit), End("r", Outcome.CANCELLED, "cancelled", "")]
    # Parked: nothing runs anywhere.
    submit = desk.open()
    desk.live = []
    assert desk.flights.lost([Lost(1, 101, "silent")], 1.0) == [cancel(submit)]
    assert desk.flights.cancel("r") == [End("r", Outcome.CANCELLED, "cancelled", "")]
    assert desk.flights.cancel("r") == []
    assert desk.loads.load(1, 101) in (0, 10)


def test_a_stop_string_ends_it_well(desk: Desk) -> None:
    submit = desk.open()
    assert desk.flights.cancel("r", Outcome.OK) == [cancel(submit), End("r", Outcome.OK, "stop", "")]


def test_deadline(desk: Desk) -> None:
    submit = desk.open(ask(deadline_at=5.0))
    assert desk.flights.tick(4.9, 1.0) == []
    actions = desk.flights.tick(5.0, 1.0)
    assert actions[0] == cancel(submit)
    assert only(actions, End).outcome is Outcome.DEADLINE


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

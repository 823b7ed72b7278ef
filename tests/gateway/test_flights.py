"""One gateway's open requests: from acceptance to the End, and all that their clients can do meanwhile."""

import pytest

from gateway.flight import Deliver, End, Phase
from schemas.reasons import FinishReason, Outcome, Tier
from schemas.requests import Sampling, Submit
from streams.presence.holders import Lost
from tests.gateway.desk import GATEWAY, INCARNATION, STOP_ID, Desk, admitted, ask, cancel, finished, only, tokens


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

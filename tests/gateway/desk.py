"""Flights under test: a router that follows the test, and the words of replicas."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.flight import Action, Ask, Flight, SendCancel, SendSubmit
from gateway.flights import Flights
from gateway.loadview import LoadView
from gateway.router import NoRoute, Route
from schemas.reasons import FinishReason, RejectReason, Tier
from schemas.requests import Cancel, Sampling, Submit
from schemas.tokens import Admitted, Finished, LoadReport, Rejected, TokenBatch, TokenEvent, Tokens

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


def replace_submit(submit: Submit, **changes: Any) -> Submit:
    return msgspec.structs.replace(submit, **changes)

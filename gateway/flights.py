"""Every open request of one gateway, and the rules by which an attempt ends and the next begins. Pure.

Owns: the truth about each request between its acceptance and its End. A request has at most one attempt that counts;
events of any other are dropped. Tokens are delivered in order, once. It ends exactly once, and whatever attempt may
still run then gets a Cancel. A refusal that may pass is waited out: the request is tried where nobody has refused it
yet, at once, then anywhere, with back-off. One that ran waits up to its deadline, as it does where no replica is live;
one that never ran is refused after MAX_WAITS. One that only a certain replica may answer ends with that replica.

Ordering relied on: `events` are fed in the order of the gateway's `tokens` partition, and SendSubmit and SendCancel
reach a replica's partition in the order they were returned. Two clocks: `now` is monotonic and is for deadlines;
`heard` is listening time of the tokens reader and is for silence. A crash of the gateway loses all of this: its clients
are gone too, and the workers cancel what they run for it when its beats stop.
"""

from collections.abc import Callable, Iterable, Iterator

from gateway.flight import Action, Ask, Deliver, End, Flight, Phase, SendCancel, SendSubmit
from gateway.loadview import LoadView
from gateway.router import NoRoute, Route
from gateway.sequencer import Gap
from schemas.reasons import FinishReason, Outcome, RejectReason
from schemas.replicas import ENGINE_CRASHED
from schemas.requests import Cancel, Submit
from schemas.tokens import Admitted, Finished, Rejected, TokenBatch, TokenEvent, Tokens
from streams.presence.holders import Lost

MAX_REDRIVES = 2
BACKOFF_S = (0.1, 0.2, 0.4, 0.5)  # before the first further try after a refusal, the second, ...; then always the last
MAX_WAITS = 8  # 3.2 s of back-off: after a pause, workers hear this gateway's beat again well before that
UNANSWERED_S = 1.0  # a Submit that its replica says it has read must be answered by then

ENDINGS: dict[FinishReason, tuple[Outcome, str]] = {
    FinishReason.STOP: (Outcome.OK, "stop"),
    FinishReason.LENGTH: (Outcome.OK, "length"),
    FinishReason.DEADLINE: (Outcome.DEADLINE, "deadline"),
    FinishReason.LOAD_FAILED: (Outcome.FAILED, "load_failed"),
    FinishReason.ERROR: (Outcome.FAILED, "error"),
}
# Refusals that another replica, or the same one a little later, may not repeat.
PASSING = {
    RejectReason.STALE,
    RejectReason.DRAINING,
    RejectReason.OVERLOADED,
    RejectReason.GATEWAY_LOST,
    RejectReason.UNKNOWN_ADAPTER,
    RejectReason.BASE_MISMATCH,
}

Router = Callable[[Flight], Route | NoRoute]
Resolver = Callable[[Ask], Ask | None]


class Flights:
    """`router` chooses a replica for a flight; `resolver` resolves its alias once more (None: no such model now)."""

    def __init__(
        self, gateway: int, incarnation: int, base_hash: str, loads: LoadView, router: Router, resolver: Resolver
    ) -> None:
        self._gateway, self._incarnation, self._base_hash = gateway, incarnation, base_hash
        self._loads, self._router, self._resolver = loads, router, resolver
        self._flights: dict[str, Flight] = {}
        self._ghosts: dict[tuple[str, int], None] = {}  # attempts of ended requests already cancelled, oldest first
        self.redrives = 0

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, request_id: str) -> Flight | None:
        return self._flights.get(request_id)

    def open(self, ask: Ask, now: float) -> tuple[Flight, list[Action]]:
        """Accepts a request. With no replica to take it the only action is its End."""
        flight = self._flights[ask.request_id] = Flight(ask)
        return flight, list(self._start(flight, now, fresh=True))

    def written(self, request_id: str, attempt: int, offset: int) -> None:
        """The broker holds the Submit at `offset`."""
        flight = self._current(request_id, attempt)
        if flight is not None:
            flight.offset = offset
            if flight.phase is Phase.WRITING:
                flight.phase = Phase.WRITTEN
            self._loads.written(flight.replica, flight.incarnation, (request_id, attempt), offset)

    def unwritten(self, request_id: str, attempt: int, now: float) -> list[Action]:
        """The Submit was not, or not surely, written: a request that never ran is refused, one that did waits on."""
        flight = self._current(request_id, attempt)
        if flight is None or flight.phase is not Phase.WRITING:
            return []
        actions = list(self._close(flight))
        if not flight.ran:
            return [*actions, *self._end(flight, Outcome.UNAVAILABLE, "broker", "the broker did not take the request")]
        flight.phase = Phase.PARKED
        return actions

    def events(self, batch: TokenBatch, now: float) -> list[Action]:
        """A record of this gateway's `tokens` partition."""
        if batch.gateway_incarnation != self._incarnation:
            return []
        self._loads.reported(batch.replica, batch.incarnation, batch.load)
        actions: list[Action] = []
        for event in batch.events:
            flight = self._flights.get(event.request_id)
            if flight is None:
                actions += self._haunted(batch, event)
            elif (event.attempt, batch.replica) != (flight.attempt, flight.replica) or flight.phase is Phase.PARKED:
                continue
            elif batch.incarnation == flight.incarnation:
                actions += self._event(flight, event, now)
            elif batch.incarnation > flight.incarnation and isinstance(event, Rejected):
                actions += self._replaced(flight, event, now)
        return actions

    def lost(self, losses: Iterable[Lost], now: float) -> list[Action]:
        """Replicas that will answer no more: their open attempts begin anew elsewhere, at once."""
        actions: list[Action] = []
        for loss in losses:
            for flight in self._at(loss.place, loss.incarnation):
                if (loss.why, loss.incarnation) == ("gone", flight.incarnation) and not self._read(flight):
                    actions += self._unread(flight, now)
                    continue
                flight.crashes += loss.word == ENGINE_CRASHED
                actions += self._redrive(flight, now, f"replica {loss.place} {loss.why}")
        return actions

    def gap(self, now: float) -> list[Action]:
        """The gateway's place in `tokens` is out of range: anything open may miss tokens."""
        open_ = [f for f in self._flights.values() if f.phase is not Phase.PARKED]
        return [action for flight in open_ for action in self._redrive(flight, now, "tokens lost from the log")]

    def cancel(self, request_id: str, outcome: Outcome = Outcome.CANCELLED, detail: str = "") -> list[Action]:
        """The client went away, or has all it wanted (a stop string)."""
        flight = self._flights.get(request_id)
        finish = "stop" if outcome is Outcome.OK else outcome.value
        return [] if flight is None else [*self._close(flight), *self._end(flight, outcome, finish, detail)]

    def tick(self, now: float, heard: float) -> list[Action]:
        """Deadlines, unanswered Submits, and parked flights for which a replica may have come. A few times a second."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            if now >= flight.ask.deadline_at:
                actions += self._close(flight)
                actions += self._end(flight, Outcome.DEADLINE, "deadline", "the request's time is over")
            elif flight.phase is Phase.PARKED:
                if now >= flight.again_at:
                    actions += self._start(flight, now)
            elif flight.phase is Phase.WRITTEN and flight.offset is not None:
                if not self._loads.covers(flight.replica, flight.incarnation, flight.offset):
                    continue
                flight.unanswered_since = heard if flight.unanswered_since is None else flight.unanswered_since
                if heard - flight.unanswered_since > UNANSWERED_S:
                    actions += self._redrive(flight, now, f"replica {flight.replica} did not answer")
        return actions

    def _event(self, flight: Flight, event: TokenEvent, now: float) -> Iterator[Action]:
        match event:
            case Admitted():
                self._answered(flight)
                if not flight.output.ids:
                    flight.tier = event.tier
            case Tokens():
                self._answered(flight)
                try:
                    fresh = flight.output.place(event.position, event.ids)
                except Gap as gap:
                    yield from self._redrive(flight, now, str(gap))
                else:
                    if fresh:
                        if len(fresh) == flight.output.position:
                            flight.cached = event.cached
                        yield Deliver(flight.ask.request_id, fresh, event.scores[-len(fresh) :])
            case Finished():
                if event.length > flight.output.position:
                    yield from self._redrive(flight, now, "the last tokens are missing")
                elif event.reason in ENDINGS:
                    yield from self._end(flight, *ENDINGS[event.reason], event.detail)
                else:  # cancelled there, or it thought this gateway dead: not the client's wish
                    yield from self._redrive(flight, now, f"replica {flight.replica}: {event.reason}")
            case Rejected():
                yield from self._rejected(flight, event, now)

    def _answered(self, flight: Flight) -> None:
        """The attempt runs. The batch that says so carried a report that covers it, so it counts there from now on."""
        if flight.phase is not Phase.ADMITTED:
            flight.phase, flight.waits = Phase.ADMITTED, 0
            self._loads.dropped(flight.replica, flight.incarnation, (flight.ask.request_id, flight.attempt))

    def _replaced(self, flight: Flight, event: Rejected, now: float) -> Iterator[Action]:
        """The place's next holder refuses what was meant for the one before, which is no more."""
        if flight.phase is Phase.ADMITTED:
            yield from self._redrive(flight, now, f"replica {flight.replica} replaced")
        else:
            yield from self._rejected(flight, event, now)

    def _rejected(self, flight: Flight, event: Rejected, now: float) -> Iterator[Action]:
        reason, detail = event.reason, event.detail
        patient = flight.ran or flight.waits < MAX_WAITS
        if reason is RejectReason.RETIRED and not flight.output.ids and not flight.resolved_anew:
            ask = self._resolver(flight.ask)
            if ask is not None and ask.adapter != flight.ask.adapter:
                self._park(flight)
                flight.ask, flight.resolved_anew = ask, True
                yield from self._start(flight, now)
            elif ask is not None and patient:  # the table here is behind
                self._park(flight)
                self._wait(flight, now)
            else:
                yield from self._end(flight, Outcome.FAILED, "retired", f"{flight.ask.model} is retired")
        elif reason in PASSING and patient:
            self._park(flight)
            flight.avoid.add(flight.replica)
            target = self._router(flight)
            if isinstance(target, Route) and target.replica not in flight.avoid:
                yield from self._start(flight, now)
            else:
                self._wait(flight, now)
        elif reason is RejectReason.OVERLOADED:
            yield from self._end(flight, Outcome.OVERLOADED, "overloaded", detail)
        elif reason in (RejectReason.STALE, RejectReason.DRAINING, RejectReason.GATEWAY_LOST):
            yield from self._end(flight, Outcome.UNAVAILABLE, reason.value, detail)
        elif reason is RejectReason.DEADLINE:
            yield from self._end(flight, Outcome.DEADLINE, "deadline", detail)
        else:
            yield from self._end(flight, Outcome.FAILED, reason.value, detail)

    def _park(self, flight: Flight) -> None:
        """The attempt was not taken: nothing of it runs."""
        self._loads.dropped(flight.replica, flight.incarnation, (flight.ask.request_id, flight.attempt))
        flight.phase = Phase.PARKED

    def _wait(self, flight: Flight, now: float) -> None:
        """Not in a tight circle: by the next try a beat may have told more."""
        flight.again_at = now + BACKOFF_S[min(flight.waits, len(BACKOFF_S) - 1)]
        flight.waits += 1

    def _read(self, flight: Flight) -> bool:
        """Whether the replica has read the attempt's Submit, as far as it has said."""
        if flight.phase is Phase.ADMITTED:
            return True
        return flight.offset is not None and self._loads.covers(flight.replica, flight.incarnation, flight.offset)

    def _unread(self, flight: Flight, now: float) -> Iterator[Action]:
        """Its replica's last word says that it never read the Submit: nothing ran, so nothing failed."""
        yield from self._close(flight)
        if flight.waits >= MAX_WAITS and not flight.ran:
            yield from self._end(flight, Outcome.UNAVAILABLE, "no_replica", "one replica after the other is gone")
            return
        flight.waits += 1
        flight.avoid.add(flight.replica)
        flight.phase = Phase.PARKED
        yield from self._start(flight, now)

    def _redrive(self, flight: Flight, now: float, why: str) -> Iterator[Action]:
        yield from self._close(flight)
        if flight.ask.only_on is not None:  # the rest would be another's answer
            yield from self._end(flight, Outcome.UNAVAILABLE, "no_replica", f"attempt {flight.attempt}: {why}")
            return
        flight.losses += 1
        if flight.crashes >= MAX_REDRIVES or flight.losses > MAX_REDRIVES:
            yield from self._end(flight, Outcome.FAILED, "redrives_used_up", f"attempt {flight.attempt}: {why}")
            return
        self.redrives += 1
        flight.avoid.add(flight.replica)
        flight.phase = Phase.PARKED
        yield from self._start(flight, now)

    def _start(self, flight: Flight, now: float, fresh: bool = False) -> Iterator[Action]:
        ask = flight.ask
        # Its replica died between the last token and the word for it.
        if flight.output.ids and flight.output.ids[-1] in ask.stop_ids:
            yield from self._end(flight, Outcome.OK, "stop", "")
            return
        if flight.output.position >= ask.max_tokens:
            yield from self._end(flight, Outcome.OK, "length", "")
            return
        target = self._router(flight)
        if isinstance(target, NoRoute):
            flight.phase = Phase.PARKED
            if fresh and target.overloaded:
                yield from self._end(flight, Outcome.OVERLOADED, "overloaded", "every replica is full")
            elif fresh or ask.only_on is not None:
                yield from self._end(flight, Outcome.UNAVAILABLE, "no_replica", "no replica is live")
            return
        flight.attempt += 1
        flight.replica, flight.incarnation = target.replica, target.incarnation
        flight.phase, flight.offset, flight.unanswered_since = Phase.WRITING, None, None
        self._loads.sent(target.replica, target.incarnation, (ask.request_id, flight.attempt), flight.cost)
        yield SendSubmit(
            Submit(
                request_id=ask.request_id,
                attempt=flight.attempt,
                customer=ask.customer,
                adapter=ask.adapter,
                content_id=ask.content_id,
                base_hash=self._base_hash,
                replica=target.replica,
                incarnation=target.incarnation,
                gateway=self._gateway,
                gateway_incarnation=self._incarnation,
                prompt=ask.prompt,
                generated=list(flight.output.ids),
                max_tokens=ask.max_tokens,
                sampling=ask.sampling,
                stop_ids=ask.stop_ids,
                remaining_ms=max(1, int((ask.deadline_at - now) * 1000)),
            )
        )

    def _close(self, flight: Flight) -> Iterator[Action]:
        """Sees to it that the current attempt, if one may run, stops."""
        if flight.phase in (Phase.WRITING, Phase.WRITTEN, Phase.ADMITTED):
            key = (flight.ask.request_id, flight.attempt)
            self._loads.dropped(flight.replica, flight.incarnation, key)
            yield SendCancel(flight.replica, Cancel(*key, self._gateway, self._incarnation))

    def _end(self, flight: Flight, outcome: Outcome, finish: str, detail: str) -> Iterator[Action]:
        key = (flight.ask.request_id, flight.attempt)
        self._loads.dropped(flight.replica, flight.incarnation, key)
        flight.phase = Phase.ENDED
        del self._flights[flight.ask.request_id]
        yield End(flight.ask.request_id, outcome, finish, detail)

    def _haunted(self, batch: TokenBatch, event: TokenEvent) -> Iterator[Action]:
        """Something still computes for a request that ended here (a Submit thought unwritten): stop it, once."""
        ghost = (event.request_id, event.attempt)
        if isinstance(event, Finished | Rejected) or ghost in self._ghosts:
            return
        self._ghosts[ghost] = None
        if len(self._ghosts) > 4096:
            del self._ghosts[next(iter(self._ghosts))]
        yield SendCancel(batch.replica, Cancel(*ghost, self._gateway, self._incarnation))

    def _current(self, request_id: str, attempt: int) -> Flight | None:
        flight = self._flights.get(request_id)
        return flight if flight is not None and flight.attempt == attempt else None

    def _at(self, place: int, incarnation: int) -> list[Flight]:
        """Flights whose open attempt is with this incarnation, or an older one, of the place."""
        return [
            f
            for f in self._flights.values()
            if f.replica == place and f.incarnation <= incarnation and f.phase is not Phase.PARKED
        ]

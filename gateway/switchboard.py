"""Every open request between its client and the fleet: applies what Flights decides, and tells it what happened.

Owns the flights and their lines, once the place is claimed. Flights is pure and decides; this sends, delivers, keeps
time and reports each request's end, once, a turn of the loop later. Everything here runs on the event loop, one call at
a time. A crash: clients lose their connections, workers hear this gateway's silence.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from gateway.dispatch import Dispatch
from gateway.fleet import Fleet
from gateway.flight import Action, Ask, Deliver, End, SendCancel, SendSubmit
from gateway.flights import Flights, Resolver
from gateway.line import Line, Lines
from schemas.reasons import Outcome
from schemas.stats import RequestFinished
from schemas.tokens import TokenBatch
from streams.bus.reader import Headers
from streams.bus.writer import Writer
from streams.presence.claim import Claim
from streams.presence.holders import Lost
from streams.presence.listening import ListeningClock

if TYPE_CHECKING:
    from gateway.traces import Traces

TICK_S = 0.1


class Switchboard:
    """`listened` is the listening time of the replicas' table; `ended` is told of every accepted request's end.

    `traces`: where attempts are traced, if they are.
    """

    def __init__(
        self,
        writer: Writer,
        base_hash: str,
        fleet: Fleet,
        listened: Callable[[], float],
        resolver: Resolver,
        ended: Callable[[RequestFinished], None],
        traces: "Traces | None" = None,
    ) -> None:
        self._dispatch = Dispatch(writer, self._written, self._unwritten)
        self._base_hash, self._fleet, self._listened = base_hash, fleet, listened
        self._resolver, self._ended, self._traces = resolver, ended, traces
        self.clock = ListeningClock()  # of the tokens' reader
        self._claim: Claim | None = None
        self._flights: Flights | None = None
        self._lines: dict[str, Line] = {}
        self._ended_one = asyncio.Event()

    @property
    def claimed(self) -> bool:
        return self._flights is not None

    @property
    def redrives(self) -> int:
        return self._flights.redrives if self._flights is not None else 0

    def __len__(self) -> int:
        return len(self._lines)

    def takes_work(self, place: int) -> bool:
        """Whether the replica of this place may be given work now."""
        return any(candidate.replica == place for candidate in self._fleet.candidates(self._listened()))

    def begin(self, claim: Claim) -> None:
        """The place is held: requests can be opened."""
        self._claim = claim
        self._flights = Flights(
            claim.place,
            claim.incarnation,
            self._base_hash,
            self._fleet.loads,
            lambda flight: self._fleet.choose(flight, self._listened()),
            self._resolver,
        )

    @contextmanager
    def open(self, asks: Iterable[Ask]) -> Iterator[Lines]:
        """Accepts a request's outputs. On leaving, what still runs of them is cancelled: their client has gone."""
        flights, lines = self._held(), Lines()
        try:
            for ask in asks:
                flight, actions = flights.open(ask, time.monotonic())
                self._lines[ask.request_id] = lines.add(flight)
                self._perform(actions)
            yield lines
        finally:
            lines.close()
            for line in lines.all:
                self.cancel(line, Outcome.CANCELLED, "the client went away")

    def cancel(self, line: Line, outcome: Outcome, detail: str = "") -> None:
        """Ends the request, if it has not ended yet."""
        if line.end is None:
            self._perform(self._held().cancel(line.flight.ask.request_id, outcome, detail))

    def cancel_all(self, outcome: Outcome, detail: str) -> None:
        for line in list(self._lines.values()):
            self.cancel(line, outcome, detail)

    async def emptied(self, limit_s: float) -> None:
        """Waits, up to `limit_s`, until no request is open."""
        try:
            async with asyncio.timeout(limit_s):
                while self._lines:
                    self._ended_one.clear()
                    await self._ended_one.wait()
        except TimeoutError:
            return

    def heard(self, batch: TokenBatch, headers: Headers = ()) -> None:
        """A record of this gateway's `tokens` partition."""
        if self._traces is not None:
            self._traces.heard(batch, headers)
        self._perform(self._held().events(batch, time.monotonic()))

    def gap(self) -> None:
        """Records of `tokens` are gone unread."""
        self._perform(self._held().gap(time.monotonic()))

    def lost(self, losses: Iterable[Lost]) -> None:
        """Replica incarnations that will answer no more."""
        if self._flights is not None:
            self._perform(self._flights.lost(losses, time.monotonic()))

    async def run(self, tokens_age: Callable[[float], float], tables_tick: Callable[[float], None]) -> NoReturn:
        """Keeps time. `tokens_age`: seconds since the tokens' reader last heard from Kafka."""
        while True:
            now = time.monotonic()
            heard = self.clock.tick(now, tokens_age(now))
            tables_tick(now)
            self._perform(self._held().tick(now, heard))
            await asyncio.sleep(TICK_S)

    def _held(self) -> Flights:
        assert self._flights is not None, "no place is claimed yet"
        return self._flights

    def _written(self, request_id: str, attempt: int, offset: int) -> None:
        self._held().written(request_id, attempt, offset)

    def _unwritten(self, request_id: str, attempt: int) -> None:
        self._perform(self._held().unwritten(request_id, attempt, time.monotonic()))

    def _perform(self, actions: Iterable[Action]) -> None:
        now = time.monotonic()
        for action in actions:
            match action:
                case Deliver():
                    self._lines[action.request_id].deliver(action.ids, action.scores, now)
                case SendSubmit():
                    headers = () if self._traces is None else self._traces.sent(action.submit)
                    self._dispatch.submit(action.submit, headers)
                case SendCancel():
                    if self._traces is not None:
                        self._traces.left(action.cancel)
                    self._dispatch.cancel(action.replica, action.cancel)
                case End():
                    line = self._lines.pop(action.request_id)
                    line.finish(action)
                    # In the loop's next turn, behind whoever waits for the line: the client's last bytes come first.
                    row = self._row(line, action, now)
                    asyncio.get_running_loop().call_soon(self._ended, row)
                    if self._traces is not None:
                        self._traces.ended(row)
                    self._ended_one.set()

    def _row(self, line: Line, end: End, now: float) -> RequestFinished:
        assert self._claim is not None
        flight = line.flight
        ask, tokens = flight.ask, flight.output.position
        first, last = line.first_token_at, line.last_token_at
        ttft_ms = -1.0 if first is None else (first - ask.arrived_at) * 1000
        tpot_ms = -1.0 if first is None or last is None or tokens < 2 else (last - first) * 1000 / (tokens - 1)
        return RequestFinished(
            request_id=ask.request_id,
            at_unix_ms=time.time_ns() // 1_000_000,
            customer=ask.customer,
            model=ask.model,
            adapter=ask.adapter,
            content_id=ask.content_id,
            tier=flight.tier,
            outcome=end.outcome,
            gateway=self._claim.place,
            gateway_incarnation=self._claim.incarnation,
            replica=flight.replica,
            attempts=flight.attempt + 1,
            prompt_tokens=len(ask.prompt),
            output_tokens=tokens,
            ttft_ms=round(ttft_ms, 3),
            tpot_ms=round(tpot_ms, 3),
            total_ms=round((now - ask.arrived_at) * 1000, 3),
            detail="" if end.outcome is Outcome.OK else f"{end.finish}: {end.detail}",
        )

"""A gateway without its I/O: the production Fleet, Flights and ListeningClock between clients and the log."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gateway.fleet import Fleet
from gateway.flight import Action, Ask, Deliver, End, SendCancel, SendSubmit
from gateway.flights import Flights
from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.reasons import AdapterStatus, Outcome
from schemas.replicas import ReplicaBeat, ReplicaClaim
from schemas.requests import Sampling
from schemas.tokens import TokenBatch
from streams.presence.holders import Holders
from streams.presence.listening import ListeningClock
from tests.simulation.log import Partition
from tests.simulation.process import Process
from tests.simulation.story import told
from tests.simulation.worker import BASE

GREEDY = Sampling(0)
READY = AdapterStatus.READY
WRITE_LIMIT_S = 3.0


@dataclass
class Client:
    """One request, and what its client has seen of it. Times are the world's."""

    request_id: str
    place: int  # of its gateway
    model: str  # an alias, or empty for the base model
    prompt: int
    max_tokens: int
    deadline_s: float
    opens_at: float
    vanishes_after_s: float | None = None
    stops_after: int | None = None  # tokens, as a stop string would
    probe: bool = False  # sent when all is healed: it must succeed
    gateway: Gateway | None = None
    deadline_at: float = 0.0
    content_id: str = ""
    got: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    finish: str = ""
    ended_at: float = 0.0


class Gateway(Process):
    kind = "gateway"

    def __init__(self, world: Any, place: int, take_over: bool) -> None:
        super().__init__(world, place, take_over)
        self.fleet = Fleet(BASE, {})
        self.own_view: Holders[GatewayBeat] = Holders()
        self.reply_clock = ListeningClock()
        self.flights: Flights | None = None
        self.clients: dict[str, Client] = {}

    def partition(self) -> Partition:
        return self.world.broker.tokens[self.place]

    def table(self) -> Partition:
        return self.world.broker.gateways

    def claim_record(self) -> GatewayClaim:
        return GatewayClaim(self.place, self.nonce, self.start_offset, 0)

    def is_free(self) -> bool:
        return self.own_view.free(self.place)

    def apply(self, offset: int, state: Any, live: bool) -> None:
        now = self.clock.now
        match state:
            case ReplicaClaim() | ReplicaBeat():
                lost = self.fleet.apply(offset, state, live, now)
                if lost and self.flights is not None:
                    self._act(self.flights.lost(lost, self.world.now))
            case GatewayClaim():
                self.own_view.claimed(state.gateway, offset, state.start_offset, live, now)
            case GatewayBeat():
                gone = "" if state.gone else None
                self.own_view.beaten(state.gateway, state.incarnation, 0, state, live, now, gone)

    def watch(self, now: float) -> None:
        self.own_view.tick(self.clock.now)
        lost = self.fleet.holders.tick(self.clock.now)
        if lost and self.flights is not None:
            self._act(self.flights.lost(lost, now))

    def took_place(self) -> None:
        self.flights = Flights(
            self.place,
            self.incarnation,
            BASE,
            self.fleet.loads,
            lambda flight: self.fleet.choose(flight, self.clock.now),
            self._resolve,
        )

    def open(self, client: Client) -> None:
        """A client's request, accepted if its model is known here."""
        now = self.world.now
        assert self.flights is not None
        client.gateway, client.deadline_at = self, now + client.deadline_s
        ask = self._ask(client, now)
        if ask is None:
            self.world.client_ended(client, Outcome.FAILED, "no such model")
            return
        self.clients[client.request_id] = client
        _, actions = self.flights.open(ask, now)
        self._act(actions)
        if client.vanishes_after_s is not None:
            self.world.at(now + client.vanishes_after_s, self.run, self._vanish, client)

    def serve(self, now: float) -> None:
        assert self.hot is not None
        assert self.flights is not None
        records = self.hot.poll(now)
        heard = self.reply_clock.tick(now, now - self.hot.fetched_at)
        for _, offset, batch in records:
            if self.world.tracing:
                self.world.trace(f"{self.name} reads tokens@{offset}")
            self._events(batch, now)
        if self.clients:
            self._act(self.flights.tick(now, heard))
        if now >= self.beats_at and self.beat_due(now):
            beat = GatewayBeat(self.place, self.incarnation, self.beats, 0, {})
            self.lane(self.table()).send(beat, limit_s=1.0)

    def lose_place(self) -> None:
        """The position is out of the log's range: the reader goes on at the end."""
        if self.hot is not None and self.flights is not None:
            skipped = len(self.partition().values) - self.hot.positions[0]
            self.world.trace(f"{self.name} skips {skipped} records of tokens")
            self.hot.positions[0] += skipped
            self._act(self.flights.gap(self.world.now))

    def _events(self, batch: TokenBatch, now: float) -> None:
        assert self.flights is not None
        before = self.flights.redrives
        actions = self.flights.events(batch, now)
        self.world.check_accepted(self, batch, actions, self.flights.redrives > before)
        self._act(actions)

    def _act(self, actions: list[Action]) -> None:
        world, broker = self.world, self.world.broker
        for action in actions:
            if world.tracing:
                world.trace(f"{self.name} {told(action)}")
            match action:
                case Deliver(request_id, ids):
                    self._deliver(self.clients[request_id], ids)
                case SendSubmit(submit):
                    world.client_submitted(self.clients[submit.request_id], submit)
                    self.lane(broker.requests[submit.replica]).send(
                        submit,
                        limit_s=WRITE_LIMIT_S,
                        written=partial(self._written, submit.request_id, submit.attempt),
                        failed=partial(self._unwritten, submit.request_id, submit.attempt),
                    )
                case SendCancel(replica, cancel):
                    self.lane(broker.requests[replica]).send(cancel, limit_s=WRITE_LIMIT_S)
                case End(request_id, outcome, finish):
                    world.client_ended(self.clients[request_id], outcome, finish)

    def _deliver(self, client: Client, ids: list[int]) -> None:
        assert self.flights is not None
        self.world.client_got(client, ids)
        if client.stops_after is not None and len(client.got) >= client.stops_after:
            self._act(self.flights.cancel(client.request_id, Outcome.OK))

    def _vanish(self, client: Client) -> None:
        if client.outcome is None and self.flights is not None:
            self._act(self.flights.cancel(client.request_id))

    def _written(self, request_id: str, attempt: int, offset: int) -> None:
        assert self.flights is not None
        self.flights.written(request_id, attempt, offset)

    def _unwritten(self, request_id: str, attempt: int) -> None:
        assert self.flights is not None
        self.world.count("submits in doubt")
        self._act(self.flights.unwritten(request_id, attempt, self.world.now))

    def _ask(self, client: Client, now: float) -> Ask | None:
        ask = Ask(
            client.request_id, "acme", client.model, "", "", [client.prompt], client.max_tokens, GREEDY, [1],
            now, client.deadline_at,
        )  # fmt: skip
        return ask if not client.model else self._resolve(ask)

    def _resolve(self, ask: Ask) -> Ask | None:
        """The alias stands for the newest version that is ready, as this gateway's tables have it just now."""
        ready = [a for a in self.adapters.values() if a.status is READY and a.adapter_id.startswith(ask.model + "@")]
        if not ready:
            return None
        newest = max(ready, key=lambda adapter: adapter.version)
        return replace(ask, adapter=newest.adapter_id, content_id=newest.content_id)

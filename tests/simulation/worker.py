"""A worker without its I/O: the production Inbox and Holders around the simulation's engine."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.reasons import RejectReason, Tier
from schemas.replicas import ENGINE_CRASHED, ReplicaBeat, ReplicaClaim, ReplicaStatus, Residency
from schemas.tokens import Admitted, Finished, Rejected, TokenBatch, TokenEvent
from streams.presence.holders import Holders
from tests.simulation.engine import Engine
from tests.simulation.log import Partition
from tests.simulation.process import Process
from tests.simulation.story import told
from workers.inbox import Act, Admit, Inbox, Reject, Replaced, Stop

BASE = "base"
NOTHING_RESIDENT = Residency()


class Worker(Process):
    kind = "worker"

    def __init__(self, world: Any, place: int, take_over: bool) -> None:
        super().__init__(world, place, take_over)
        self.loaded_at = world.now + 1.0 * world.rng.random()
        self.replica_view: Holders[ReplicaBeat] = Holders()
        self.gateway_view: Holders[GatewayBeat] = Holders()
        self.engine = Engine()
        self.inbox: Inbox | None = None
        self.hung_until = 0.0
        self.steps_per_turn = 1 + int(3 * world.rng.random())
        self.draining = False
        self._words: dict[tuple[int, int], list[TokenEvent]] = {}

    def partition(self) -> Partition:
        return self.world.broker.requests[self.place]

    def table(self) -> Partition:
        return self.world.broker.replicas

    def claim_record(self) -> ReplicaClaim:
        return ReplicaClaim(self.place, self.nonce, self.start_offset, BASE, "simulated", 0)

    def bury(self) -> None:
        holder = self.replica_view.get(self.place)
        if holder is not None and not holder.gone and holder.beat is not None:
            self.world.count("dead replicas buried")
            word = msgspec.structs.replace(holder.beat, status=ReplicaStatus.GONE, reason="died")
            self.lane(self.table()).send(word, sure=True)

    def is_free(self) -> bool:
        return self.replica_view.free(self.place)

    def apply(self, offset: int, state: Any, live: bool) -> None:
        now = self.clock.now
        match state:
            case ReplicaClaim():
                self.replica_view.claimed(state.replica, offset, state.start_offset, live, now)
            case ReplicaBeat():
                gone = state.reason if state.status is ReplicaStatus.GONE else None
                self.replica_view.beaten(state.replica, state.incarnation, state.start_offset, state, live, now, gone)
            case GatewayClaim():
                self.gateway_view.claimed(state.gateway, offset, state.start_offset, live, now)
            case GatewayBeat():
                gone = "" if state.gone else None
                self.gateway_view.beaten(state.gateway, state.incarnation, 0, state, live, now, gone)

    def watch(self, now: float) -> None:
        self.replica_view.tick(self.clock.now)
        self.gateway_view.tick(self.clock.now)

    def took_place(self) -> None:
        limit, is_ghost = self.world.chances.worker_limit, self.gateway_view.is_ghost
        self.inbox = Inbox(self.incarnation, BASE, 10_000, limit, self.adapters.get, is_ghost)

    def serve(self, now: float) -> None:
        assert self.hot is not None
        assert self.inbox is not None
        self.world.count_zombie(self)
        for _, _, record in self.hot.poll(now):
            self._do(self.inbox.read(record, now), now)
            if self.ended:
                return
        late = self.inbox.tick(now)
        if late and isinstance(late[0], Admit):
            self.world.count("late adapters waited for")
        self._do(late, now)
        hung = now < self.hung_until
        for _ in range(self.steps_per_turn if self.engine.rows and not hung else 0):
            for row, event in self.engine.step(now):
                self._say(row.submit.gateway, row.submit.gateway_incarnation, event)
                if isinstance(event, Finished):
                    self.inbox.finished(event.request_id, event.attempt)
            self._publish()
        if self._words:
            self._publish()
        if now >= self.beats_at and not hung and self.beat_due(now):
            self._beat(ReplicaStatus.DRAINING if self.draining else ReplicaStatus.READY)
        if self.draining and not self.inbox.open and not self.engine.rows:
            self._beat(ReplicaStatus.GONE, "drained")
            self.end("drained", last_words=True)
        if self.engine.rows:
            self.world.check_rows(self)

    def drain(self) -> None:
        if self.inbox is not None:
            self.draining = self.inbox.draining = True
            self.world.trace(f"{self.name} drains")

    def hang(self, seconds: float) -> None:
        """The engine makes no step; the rest of the worker goes on."""
        self.hung_until = self.world.now + seconds
        self.world.trace(f"{self.name}: the engine hangs for {seconds:.1f} s")

    def crash_engine(self) -> None:
        if self.serving:
            self._beat(ReplicaStatus.GONE, ENGINE_CRASHED)
        self.end("engine crashed", last_words=True)

    def _do(self, acts: list[Act], now: float) -> None:
        world = self.world
        for act in acts:
            if world.tracing:
                world.trace(f"{self.name} {told(act)}")
            match act:
                case Admit(submit, adapter, deadline_at):
                    world.check_admission(self, submit)
                    cold = adapter is not None and world.rng.random() < 0.3
                    ready_at = now + (1.5 * world.rng.random() if cold else 0.0)
                    self.engine.start(submit, adapter.content_id if adapter else "", ready_at, deadline_at)
                    tier = Tier.NONE if adapter is None else Tier.REMOTE if cold else Tier.GPU
                    event: TokenEvent = Admitted(submit.request_id, submit.attempt, tier)
                    self._say(submit.gateway, submit.gateway_incarnation, event)
                case Reject(submit, reason, detail):
                    if reason is RejectReason.STALE:
                        world.count("stale rejections")
                    event = Rejected(submit.request_id, submit.attempt, reason, detail)
                    self._say(submit.gateway, submit.gateway_incarnation, event)
                case Stop(request_id, attempt, reason):
                    self.engine.rows[request_id, attempt].stop = reason
                    world.count(f"rows stopped: {reason}")
                case Replaced(incarnation):
                    world.count("replaced, by a request")
                    self.end(f"replaced by {incarnation}")
                    return

    def _say(self, gateway: int, gateway_incarnation: int, event: TokenEvent) -> None:
        self._words.setdefault((gateway, gateway_incarnation), []).append(event)

    def _publish(self) -> None:
        """One batch per gateway. One that is given up leaves a gap, and its last words are said again."""
        if not self._words:
            return
        assert self.hot is not None
        words, self._words = self._words, {}
        for (gateway, gateway_incarnation), events in words.items():
            load = self.engine.load(self.hot.positions[0])
            batch = TokenBatch(self.place, self.incarnation, gateway, gateway_incarnation, load, events)
            if self.world.chances.given_up and self.world.rng.random() < self.world.chances.given_up:
                self.world.count("batches given up")
                for event in events:
                    if isinstance(event, Finished | Rejected):
                        self._say(gateway, gateway_incarnation, event)
                if self.world.rng.random() < 0.5:
                    continue
            self.lane(self.world.broker.tokens[gateway]).send(batch)

    def _beat(self, status: ReplicaStatus, reason: str = "") -> None:
        assert self.hot is not None
        beat = ReplicaBeat(
            replica=self.place,
            incarnation=self.incarnation,
            start_offset=self.start_offset,
            beat=self.beats,
            status=status,
            step=self.engine.step_number,
            load=self.engine.load(self.hot.positions[0]),
            residency=NOTHING_RESIDENT,
            base_hash=BASE,
            numeric_class="simulated",
            capacity_tokens=self.world.chances.capacity_tokens,
            at_unix_ms=0,
            reason=reason,
        )
        self.lane(self.table()).send(beat, limit_s=1.0)

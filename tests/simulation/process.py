"""What workers and gateways have in common here: turns, pauses, the tables, and the claim of a place.

The claim's order is DESIGN's: the place is free, the end of its partition is noted, the claim is written, read back,
and only then is anything accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schemas.adapters import AdapterRecord
from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaStatus
from streams.presence.listening import ListeningClock
from tests.simulation.log import Lane, Partition, Reader

if TYPE_CHECKING:
    from tests.simulation.world import World

REPLICAS, GATEWAYS, ADAPTERS = 0, 1, 2  # the tables in the order of the tables' reader
BEAT_S = 1.0
READ_BACK_S = 8.0


class Process:
    """One life of a worker or gateway, from its start to its end. Every time is the world's."""

    kind = ""

    def __init__(self, world: World, place: int, take_over: bool) -> None:
        rng = world.rng
        self.world, self.place, self.take_over = world, place, take_over
        self.name = f"{self.kind}{place}.{world.next_life()}"
        self.ended = self.last_words = False
        self.paused_until = 0.0
        self.sluggish = rng.random()  # in finding a broker that came back
        self.period_s = 0.2 + 0.12 * rng.random()
        self.loaded_at = world.now + 0.3 * rng.random()
        broker = world.broker
        lag, late = world.chances.lag_s, world.chances.late_adapters_s
        lags = [lag * rng.random(), lag * rng.random(), max(lag, late) * rng.random()]
        self.tables = Reader(self, [broker.replicas, broker.gateways, broker.adapters], [0, 0, 0], lags)
        self.clock = ListeningClock()
        self.replay_to: list[int] | None = None  # ends of the tables when it first heard
        self.adapters: dict[str, AdapterRecord] = {}
        self.nonce = ""
        self.start_offset = -1
        self.claims_until = 0.0
        self.buried = False  # whether it has said its predecessor's last word
        self.incarnation = -1
        self.hot: Reader | None = None  # its own partition, once the place is its own
        self.beats = 0
        self.beats_at = 0.0
        self._lanes: dict[Partition, Lane] = {}
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # What a worker and a gateway do differently.
    def partition(self) -> Partition:
        """The partition that this place reads."""
        raise NotImplementedError

    def table(self) -> Partition:
        """The table in which this place is claimed."""
        raise NotImplementedError

    def bury(self) -> None:
        """Says the last word of a predecessor that is known to be dead."""

    def claim_record(self) -> ReplicaClaim | GatewayClaim:
        raise NotImplementedError

    def is_free(self) -> bool:
        raise NotImplementedError

    def apply(self, offset: int, state: Any, live: bool) -> None:
        """A record of `replicas` or `gateways`, into the views."""
        raise NotImplementedError

    def took_place(self) -> None:
        """The incarnation is known."""

    def serve(self, now: float) -> None:
        """One turn of a process that holds its place."""
        raise NotImplementedError

    def watch(self, now: float) -> None:
        """What time alone does to the views."""

    # What they do alike.
    @property
    def serving(self) -> bool:
        return self.hot is not None and not self.ended

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Something of this process' own happens: never after its end, and not while it is paused."""
        if self.ended:
            return
        if self.world.now < self.paused_until:
            self._deferred.append((call, args))
        else:
            call(*args)

    def turn(self) -> None:
        world = self.world
        if self.ended:
            return
        if world.now < self.paused_until:
            world.at(self.paused_until, self.turn)
            return
        while self._deferred and not self.ended:
            call, args = self._deferred.pop(0)
            call(*args)
        # Which of its tasks runs first is the event loop's whim.
        tables_first = self.hot is None or world.rng.random() < 0.5
        if tables_first:
            self._look(world.now)
        if self.serving:
            self.serve(world.now)
        if not tables_first and not self.ended:
            self._look(world.now)
        if not self.ended:
            world.at(world.now + self.period_s * (0.7 + 0.6 * world.rng.random()), self.turn)

    def lane(self, partition: Partition) -> Lane:
        lane = self._lanes.get(partition)
        if lane is None:
            lane = self._lanes[partition] = Lane(self, partition)
        return lane

    def pause(self, seconds: float) -> None:
        self.paused_until = max(self.paused_until, self.world.now + seconds)
        self.world.trace(f"{self.name} paused for {seconds:.1f} s")

    def end(self, why: str, last_words: bool = False) -> None:
        """`last_words`: it went in order, so that what it has sent arrives."""
        if not self.ended:
            self.ended, self.last_words = True, last_words
            self.world.trace(f"{self.name} ended: {why}")
            self.world.process_ended(self)

    def beat_due(self, now: float) -> bool:
        if now < self.beats_at:
            return False
        self.beats_at = now + BEAT_S
        self.beats += 1
        return True

    def _look(self, now: float) -> None:
        records = self.tables.poll(now)
        if self.replay_to is None:
            if self.tables.fetched_at != now:
                return
            self.replay_to = [len(partition.values) for partition in self.tables.partitions]
            if self.world.rng.random() < 0.5:
                records = self._compacted(records)
        self.clock.tick(now, now - self.tables.fetched_at)
        for table, offset, value in records:
            if self.ended:
                return
            if table == ADAPTERS:
                self.adapters[value.adapter_id] = value
            else:
                self.apply(offset, value, offset >= self.replay_to[table])
                if self.tables.partitions[table] is self.table():
                    self._mine(offset, value)
        if not self.ended:
            self.watch(now)
            if self.hot is None:
                self._take_place(now)

    def _compacted(self, records: list[tuple[int, int, Any]]) -> list[tuple[int, int, Any]]:
        """What the log cleaner leaves: the newest record of each key."""
        newest: dict[tuple[int, Any], tuple[int, int, Any]] = {}
        for table, offset, value in records:
            replicas = isinstance(value, ReplicaClaim | ReplicaBeat)
            key = value.adapter_id if table == ADAPTERS else value.replica if replicas else value.gateway
            newest.pop((table, key), None)
            newest[table, key] = (table, offset, value)
        return list(newest.values())

    def _mine(self, offset: int, state: ReplicaClaim | ReplicaBeat | GatewayClaim | GatewayBeat) -> None:
        """A record of the own table: the own claim read back, or the word of one who came after."""
        place = state.replica if isinstance(state, ReplicaClaim | ReplicaBeat) else state.gateway
        if place != self.place:
            return
        claims = isinstance(state, ReplicaClaim | GatewayClaim)
        incarnation = offset if isinstance(state, ReplicaClaim | GatewayClaim) else state.incarnation
        if self.hot is not None and incarnation > self.incarnation:
            self.world.count("replaced processes")
            self.end(f"replaced by {incarnation}")
        elif self.hot is not None and isinstance(state, ReplicaBeat) and state.status is ReplicaStatus.GONE:
            if incarnation == self.incarnation:
                self.world.count("buried alive")
                self.end("taken for dead")
        elif claims and self.hot is None and state.nonce == self.nonce:  # type: ignore[union-attr]
            self.incarnation = offset
            self.world.trace(f"{self.name} holds its place as incarnation {offset} from {self.start_offset}")
            lag = self.world.chances.lag_s * self.world.rng.random()
            self.hot = Reader(self, [self.partition()], [self.start_offset], [lag])
            self.world.took_place(self)
            self.took_place()

    def _take_place(self, now: float) -> None:
        assert self.replay_to is not None
        caught_up = all(at >= to for at, to in zip(self.tables.positions, self.replay_to, strict=True))
        if caught_up and self.take_over and not self.buried and self.world.broker.up:
            self.buried = True
            self.bury()
        if not caught_up or now < self.loaded_at or now < self.claims_until or not self.world.broker.up:
            return
        if not (self.take_over or self.is_free()):
            return
        self.claims_until = now + READ_BACK_S
        self.nonce = f"{self.name}/{now:.3f}"
        self.start_offset = len(self.partition().values)
        self.world.at(now + 0.3 * self.world.rng.random(), self.run, self._claim)

    def _claim(self) -> None:
        self.lane(self.table()).send(self.claim_record(), sure=True)

"""Every table a gateway follows, through one reader: adapters, aliases, customers, replicas, gateways, owner plans.

Owns the reader, its listening clock, and which view each record goes to. Ordering relied on: each table's partitions';
none between tables, so an alias may be seen before its adapter. While Kafka is away the views keep serving what they
have. A crash loses nothing: it is all replayed.
"""

import asyncio
import time
from collections.abc import Callable

from gateway.auth import Keys
from gateway.catalogue import Catalogue
from gateway.fleet import Fleet
from gateway.peers import Peers
from schemas.adapters import AdapterRecord, AliasRecord
from schemas.customers import Customer
from schemas.gateways import GatewayState
from schemas.placement import OwnerPlan
from schemas.replicas import ReplicaBeat, ReplicaState
from schemas.topics import ADAPTERS, ALIASES, CUSTOMERS, GATEWAYS, OWNER_PLANS, REPLICAS, Topic
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader, TableStatus
from streams.presence.claim import Place
from streams.presence.holders import Lost
from streams.presence.listening import ListeningClock

FETCH_WAIT_MS = 100
# What gateways promise to have applied: a change of these is answered when all have.
PROMISED = (ADAPTERS, ALIASES, CUSTOMERS)


class Tables:
    """`lost` is told of replica incarnations that end, `promised` of each live change that others may wait for,
    `beaten` of each live beat of a replica."""

    def __init__(
        self,
        kafka: KafkaSettings,
        place: int,
        keys: Keys,
        catalogue: Catalogue,
        fleet: Fleet,
        plans: dict[str, OwnerPlan],
        lost: Callable[[list[Lost]], None],
        promised: Callable[[], None],
        beaten: Callable[[ReplicaBeat], None],
    ) -> None:
        self.keys, self.catalogue, self.fleet, self._plans = keys, catalogue, fleet, plans
        self.peers = Peers()
        self.place = Place(GATEWAYS, place, self.age)
        self.clock = ListeningClock()
        self.deaf_s = 0.0  # since Kafka last answered, as of the last tick
        self._lost, self._promised, self._beaten = lost, promised, beaten
        self._peers_moved = asyncio.Event()
        tables: list[Table[AdapterRecord] | Table[AliasRecord] | Table[Customer] | Table[OwnerPlan]] = [
            Table(ADAPTERS, self._adapter),
            Table(ALIASES, self._alias),
            Table(CUSTOMERS, self._customer),
            Table(OWNER_PLANS, self._plan),
        ]
        self._reader = TableReader(
            kafka,
            [*tables, Table(REPLICAS, self._replica), Table(GATEWAYS, self._gateway)],
            "gateway tables",
            fetch_wait_ms=FETCH_WAIT_MS,
        )

    async def start(self) -> None:
        """Waits until everything that was written before is applied."""
        await self._reader.start()
        caught_up = asyncio.create_task(self._reader.caught_up(), name="tables caught up")
        try:
            await asyncio.wait({caught_up, self._reader.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._reader.failed.done():
                self._reader.failed.result()
        finally:
            caught_up.cancel()

    async def run(self) -> None:
        """Ends only by raising what ended the reader."""
        await asyncio.shield(self._reader.failed)

    async def stop(self) -> None:
        await self._reader.stop()

    @property
    def status(self) -> TableStatus:
        return self._reader.status

    @property
    def undecodable(self) -> int:
        return self._reader.undecodable

    def age(self, now: float) -> float:
        """Seconds since Kafka last answered. `now`: time.monotonic()."""
        return self._reader.age(now)

    async def barrier(self) -> None:
        """Waits until everything written before is applied. Raises BusUnavailable."""
        await self._reader.barrier()

    def positions(self) -> dict[str, dict[int, int]]:
        """What a beat says: topic -> partition -> next offset, of the tables that others wait for."""
        return {topic.name: self._reader.positions(topic) for topic in PROMISED}

    def tick(self, now: float) -> None:
        """A few times a second: who has fallen silent."""
        self.deaf_s = self.age(now)
        heard = self.clock.tick(now, self.deaf_s)
        self.peers.tick(heard)
        self._peers_moved.set()
        if lost := self.fleet.holders.tick(heard):
            self._lost(lost)

    async def everywhere(self, topic: Topic, partition: int, offset: int, limit_s: float) -> list[int]:
        """Waits until every live gateway has applied the record. The gateways that had not within `limit_s`."""
        end = time.monotonic() + limit_s
        while (behind := self.peers.behind(topic.name, partition, offset)) and (left_s := end - time.monotonic()) > 0:
            self._peers_moved.clear()
            try:
                await asyncio.wait_for(self._peers_moved.wait(), left_s)
            except TimeoutError:
                break
        return behind

    def _adapter(self, change: Change[AdapterRecord]) -> None:
        self.catalogue.apply_adapter(change.key, change.value)
        self._tell(change.live)

    def _alias(self, change: Change[AliasRecord]) -> None:
        self.catalogue.apply_alias(change.key, change.value)
        self._tell(change.live)

    def _customer(self, change: Change[Customer]) -> None:
        self.keys.apply(change.key, change.value)
        self._tell(change.live)

    def _plan(self, change: Change[OwnerPlan]) -> None:
        if change.value is None:
            self._plans.pop(change.key, None)
        else:
            self._plans[change.key] = change.value

    def _replica(self, change: Change[ReplicaState]) -> None:
        if change.value is None:
            return
        if lost := self.fleet.apply(change.offset, change.value, change.live, self.clock.now):
            self._lost(lost)
        if change.live and isinstance(change.value, ReplicaBeat):
            self._beaten(change.value)

    def _gateway(self, change: Change[GatewayState]) -> None:
        self.place.apply(change)
        if change.value is not None:
            self.peers.apply(change.offset, change.value, change.live, self.clock.now)
            self._peers_moved.set()

    def _tell(self, live: bool) -> None:
        if live:
            self._promised()

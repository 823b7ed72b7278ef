"""What the worker knows from the fleet's tables: adapters, who owns and uses them, which gateways and replicas live.

Owns nothing: all of it is replayed from Kafka at start and followed. One reader for all, apart from `requests`,
so that a long table never delays a prompt. While Kafka is away all stays as it was, and nobody is taken for dead.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import NoReturn

from schemas.adapters import AdapterRecord
from schemas.gateways import GatewayBeat, GatewayClaim, GatewayState
from schemas.placement import AdapterStats, OwnerPlan
from schemas.reasons import AdapterStatus
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaState, ReplicaStatus
from schemas.topics import ADAPTER_STATS, ADAPTERS, GATEWAYS, OWNER_PLANS, REPLICAS
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader
from streams.presence.claim import Place
from streams.presence.holders import Holders
from streams.presence.listening import ListeningClock

LOOK_S = 0.2


class Tables:
    """`adapter` and `is_ghost` are what Inbox asks; `place` is for the claim; `reader` has start and stop."""

    def __init__(self, kafka: KafkaSettings, replica: int) -> None:
        self._records: dict[str, AdapterRecord] = {}
        self._ids: dict[str, dict[str, None]] = {}  # content id -> the adapters that are made of it
        self.plans: dict[str, OwnerPlan] = {}
        self.requests: dict[str, float] = {}  # of the whole fleet in the last window, by adapter
        self.version = 0  # rises with every change of the adapters or their plans
        self._replicas: Holders[ReplicaBeat] = Holders()
        self._gateways: Holders[GatewayBeat] = Holders()
        self._clock = ListeningClock()
        adapters: Table[AdapterRecord] = Table(ADAPTERS, self._adapter_changed)
        gateways: Table[GatewayState] = Table(GATEWAYS, self._gateway_changed)
        replicas: Table[ReplicaState] = Table(REPLICAS, self._replica_changed)
        plans: Table[OwnerPlan] = Table(OWNER_PLANS, self._plan_changed)
        stats: Table[AdapterStats] = Table(ADAPTER_STATS, self._stats_changed)
        self.reader = TableReader(kafka, [adapters, gateways, replicas, plans, stats], f"worker-{replica}-tables")
        self.place = Place(REPLICAS, replica, self.reader.age)

    def adapter(self, adapter_id: str) -> AdapterRecord | None:
        return self._records.get(adapter_id)

    def ids(self, content_id: str) -> list[str]:
        """The adapters with this content: almost always one."""
        return list(self._ids.get(content_id, ()))

    def by_content(self, content_id: str) -> AdapterRecord | None:
        """One of the adapters with this content: any of them tells where its bytes are."""
        return next((self._records[adapter_id] for adapter_id in self._ids.get(content_id, ())), None)

    def retired(self, content_id: str) -> bool:
        """Whether every adapter with this content is."""
        ids = self._ids.get(content_id, {})
        return bool(ids) and all(self._records[adapter_id].status is AdapterStatus.RETIRED for adapter_id in ids)

    @property
    def records(self) -> Mapping[str, AdapterRecord]:
        """By adapter id."""
        return self._records

    def live_replicas(self, base_hash: str) -> frozenset[int]:
        """The places that gateways may give work to now."""
        return frozenset(
            holder.place
            for holder in self._replicas.alive(self._clock.now)
            if holder.beat is not None
            and holder.beat.status is ReplicaStatus.READY
            and holder.beat.base_hash == base_hash
        )

    def is_ghost(self, gateway: int, incarnation: int) -> bool:
        """Whether nobody is left to read what is written for this incarnation of the gateway."""
        return self._gateways.is_ghost(gateway, incarnation)

    async def listen(self) -> NoReturn:
        """Ages the silence of gateways; ends with the tables' reader if that fails."""
        while True:
            now = time.monotonic()
            listened = self._clock.tick(now, self.reader.age(now))
            self._gateways.tick(listened)
            self._replicas.tick(listened)
            done, _ = await asyncio.wait({self.reader.failed}, timeout=LOOK_S)
            if done:
                self.reader.failed.result()
                raise RuntimeError("the tables' reader ended")

    def _adapter_changed(self, change: Change[AdapterRecord]) -> None:
        new, old = change.value, self._records.get(change.key)
        if (
            new is not None
            and old is not None
            and new.command_partition == old.command_partition
            and new.command_offset < old.command_offset
        ):
            return  # a late write of a registry that has been replaced since
        self.version += 1
        if old is not None:
            del self._records[change.key]
            self._ids[old.content_id].pop(change.key)
            if not self._ids[old.content_id]:
                del self._ids[old.content_id]
        if new is not None:
            self._records[change.key] = new
            self._ids.setdefault(new.content_id, {})[change.key] = None

    def _gateway_changed(self, change: Change[GatewayState]) -> None:
        match change.value:
            case GatewayClaim() as claim:
                self._gateways.claimed(claim.gateway, change.offset, claim.start_offset, change.live, self._clock.now)
            case GatewayBeat() as beat:
                word = "" if beat.gone else None
                self._gateways.beaten(beat.gateway, beat.incarnation, 0, beat, change.live, self._clock.now, word)

    def _replica_changed(self, change: Change[ReplicaState]) -> None:
        self.place.apply(change)
        match change.value:
            case ReplicaClaim() as claim:
                self._replicas.claimed(claim.replica, change.offset, claim.start_offset, change.live, self._clock.now)
            case ReplicaBeat() as beat:
                word = beat.reason if beat.status is ReplicaStatus.GONE else None
                self._replicas.beaten(
                    beat.replica, beat.incarnation, beat.start_offset, beat, change.live, self._clock.now, word
                )

    def _plan_changed(self, change: Change[OwnerPlan]) -> None:
        self.version += 1
        if change.value is None:
            self.plans.pop(change.key, None)
        else:
            self.plans[change.key] = change.value

    def _stats_changed(self, change: Change[AdapterStats]) -> None:
        if change.value is None:
            self.requests.pop(change.key, None)
        else:
            self.requests[change.key] = change.value.requests

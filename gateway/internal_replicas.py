"""/internal/replicas: what each replica says of itself, and commands that move adapters on it."""

import uuid
from typing import Any

import msgspec
from aiohttp import web

from gateway.auth import Keys
from gateway.catalogue import Catalogue
from gateway.errors import ApiError
from gateway.fleet import Fleet
from gateway.internal_auth import operator
from gateway.middleware import json_answer
from gateway.readiness import Readiness
from gateway.tables import Tables
from schemas.placement import Drain, Load, ReplicaCommand, Unload
from schemas.replicas import ReplicaBeat
from schemas.topics import REPLICA_COMMANDS
from streams.bus.errors import BusUnavailable, NotWritten
from streams.bus.writer import Writer
from streams.presence.holders import SUSPECT_S, Holder

SEND_LIMIT_S = 5.0


class InternalReplicas:
    def __init__(
        self,
        keys: Keys,
        catalogue: Catalogue,
        fleet: Fleet,
        tables: Tables,
        writer: Writer,
        readiness: Readiness,
        places: int,
    ) -> None:
        self._keys, self._catalogue, self._fleet, self._tables = keys, catalogue, fleet, tables
        self._writer, self._readiness, self._places = writer, readiness, places

    async def list(self, request: web.Request) -> web.Response:
        """Every place that was ever held."""
        self._allow(request)
        now = self._tables.clock.now
        holders = (self._fleet.holders.get(place) for place in range(self._places))
        states = [_state(holder, now) for holder in holders if holder is not None]
        return json_answer(msgspec.json.encode({"replicas": states}))

    async def state(self, request: web.Request) -> web.Response:
        self._allow(request)
        return json_answer(msgspec.json.encode(_state(self._holder(request), self._tables.clock.now)))

    async def load(self, request: web.Request) -> web.Response:
        """202: the replica was told. Its state shows when the adapter is there."""
        self._allow(request)
        adapter_id = request.match_info["adapter_id"]
        if self._catalogue.adapter(adapter_id) is None:
            raise ApiError("not_found", f"adapter {adapter_id} is not registered", "adapter_id")
        return await self._tell(request, Load(uuid.uuid4().hex, adapter_id))

    async def unload(self, request: web.Request) -> web.Response:
        self._allow(request)
        return await self._tell(request, Unload(uuid.uuid4().hex, request.match_info["adapter_id"]))

    async def drain(self, request: web.Request) -> web.Response:
        self._allow(request)
        return await self._tell(request, Drain(uuid.uuid4().hex))

    def _allow(self, request: web.Request) -> None:
        self._readiness.check_tables()
        operator(self._keys, request.headers.get("Authorization"))

    def _holder(self, request: web.Request) -> Holder[ReplicaBeat]:
        text = request.match_info["replica_id"]
        known = text.isascii() and text.isdecimal() and len(text) < 6
        holder = self._fleet.holders.get(int(text)) if known else None
        if holder is None:
            raise ApiError("not_found", f"replica {text[:40]} was never there", "replica_id")
        return holder

    async def _tell(self, request: web.Request, command: ReplicaCommand) -> web.Response:
        self._readiness.check()
        holder = self._holder(request)
        if holder.gone or holder.lost:
            raise ApiError("no_replica", f"replica {holder.place} is not live", "replica_id")
        try:
            await self._writer.send(
                REPLICA_COMMANDS, command, key=command.command_id, partition=holder.place, timeout_s=SEND_LIMIT_S
            )
        except NotWritten as error:
            raise ApiError("broker", f"the command was not sent: {error}") from None
        except BusUnavailable as error:
            raise ApiError("unconfirmed", f"the command may not have been sent: {error}") from None
        return json_answer(msgspec.json.encode({"command_id": command.command_id, "replica": holder.place}), 202)


def _state(holder: Holder[ReplicaBeat], now: float) -> dict[str, Any]:
    """The brief's five fields first, then what else an operator asks. Everything is as of the replica's last beat."""
    beat = holder.beat
    told: dict[str, Any] = {"replica_id": str(holder.place), "incarnation": holder.incarnation}
    told["status"] = _status(holder, now)
    if beat is None:
        return {
            "gpu_adapters": [], "ram_adapters": [], "queue_depth": 0, "tokens_in_flight": 0, "evictions_per_min": 0.0,
        } | told  # fmt: skip
    return {
        "gpu_adapters": beat.residency.gpu_adapters,
        "ram_adapters": beat.residency.ram_adapters,
        "queue_depth": beat.load.waiting,
        "tokens_in_flight": beat.load.tokens_in_flight,
        "evictions_per_min": beat.residency.evictions_per_min,
        **told,
        "disk_adapters": beat.residency.disk_adapters,
        "loads_per_min": beat.residency.loads_per_min,
        "running": beat.load.running,
        "capacity_tokens": beat.capacity_tokens,
        "step": beat.step,
        "mixed_steps": beat.mixed_steps,
        "max_adapters_in_step": beat.max_adapters_in_step,
        "base_hash": beat.base_hash,
        "numeric_class": beat.numeric_class,
        "beat_unix_ms": beat.at_unix_ms,
        "reason": beat.reason,
    }


def _status(holder: Holder[ReplicaBeat], now: float) -> str:
    """gone, dead, suspect, or its own word (ready, draining); claimed and replayed before its first live beat."""
    if holder.gone:
        return "gone"
    if holder.lost:
        return "dead"
    if holder.beat is None or not holder.live:
        return "claimed" if holder.beat is None else "unheard"
    return "suspect" if now - holder.heard_at > SUSPECT_S else holder.beat.status

"""/internal/replicas: what each replica says of itself, and commands that move adapters on it. For operators.

Whether an adapter can leave its slot is the replica's to say: only it knows its leases (workers/unloading.py).
"""

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
from gateway.orders import Orders
from gateway.readiness import Readiness
from gateway.tables import Tables
from schemas.placement import Drain, Load, Unload
from schemas.replicas import Answer, Answered, ReplicaBeat
from streams.presence.holders import SUSPECT_S, Holder

ANSWER_S = 10.0  # for a replica's word on what needs no waiting
LONGEST_WAIT_S, DRAIN_S = 300, 60


class InternalReplicas:
    def __init__(
        self,
        keys: Keys,
        catalogue: Catalogue,
        fleet: Fleet,
        tables: Tables,
        orders: Orders,
        readiness: Readiness,
        places: int,
    ) -> None:
        self._keys, self._catalogue, self._fleet, self._tables = keys, catalogue, fleet, tables
        self._orders, self._readiness, self._places = orders, readiness, places

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
        """200 when the adapter is in a slot there; 202 when `?wait=` (0 unless given) ends before."""
        self._allow(request, "wait")
        wait_s, adapter_id = _wait_s(request, 0), request.match_info["adapter_id"]
        if self._catalogue.adapter(adapter_id) is None:
            raise ApiError("not_found", f"adapter {adapter_id} is not registered", "adapter_id")
        holder = self._ready(request)
        command = Load(uuid.uuid4().hex, adapter_id)
        answer = await self._orders.tell(holder.place, command, wait_s)
        return _told(holder.place, adapter_id, command.command_id, answer)

    async def unload(self, request: web.Request) -> web.Response:
        """409 while it is in use; `?drain=true` waits for what runs (`?wait=` seconds), new requests go elsewhere."""
        self._allow(request, "drain", "wait")
        drains, adapter_id = _drains(request), request.match_info["adapter_id"]
        if not drains and "wait" in request.query:
            raise ApiError("invalid_request", "wait: goes with drain=true, an unload alone waits for nothing", "wait")
        if self._catalogue.adapter(adapter_id) is None:
            raise ApiError("not_found", f"adapter {adapter_id} is not registered", "adapter_id")
        drain_s, holder = (_wait_s(request, DRAIN_S) if drains else 0), self._ready(request)
        command = Unload(uuid.uuid4().hex, adapter_id, drain_s)
        answer = await self._orders.tell(holder.place, command, drain_s + ANSWER_S)
        if answer is None:
            raise ApiError("unconfirmed", f"replica {holder.place} did not answer; its state shows what it has")
        return _told(holder.place, adapter_id, command.command_id, answer)

    async def drain(self, request: web.Request) -> web.Response:
        """202: the replica was told to take nothing new."""
        self._allow(request)
        holder, command = self._ready(request), Drain(uuid.uuid4().hex)
        await self._orders.tell(holder.place, command, 0)
        return json_answer(msgspec.json.encode({"command_id": command.command_id, "replica": holder.place}), 202)

    def _allow(self, request: web.Request, *known: str) -> None:
        """`known`: the parameters that the call has."""
        self._readiness.check_tables()
        operator(self._keys, request.headers.get("Authorization"))
        for name in request.query:
            if name not in known:
                raise ApiError("invalid_request", f"{name[:40]}: unknown; known are {', '.join(known) or 'none'}", name)

    def _holder(self, request: web.Request) -> Holder[ReplicaBeat]:
        text = request.match_info["replica_id"]
        known = text.isascii() and text.isdecimal() and len(text) < 6
        holder = self._fleet.holders.get(int(text)) if known else None
        if holder is None:
            raise ApiError("not_found", f"replica {text[:40]} was never there", "replica_id")
        return holder

    def _ready(self, request: web.Request) -> Holder[ReplicaBeat]:
        """The replica that is to be told something."""
        self._readiness.check()
        return self._holder(request)


def _told(place: int, adapter_id: str, command_id: str, answer: Answer | None) -> web.Response:
    """The replica's answer as this API's. Raises ApiError where it is a refusal."""
    match answer:
        case None | Answer(outcome=Answered.DONE):
            told = {"command_id": command_id, "replica": place, "adapter_id": adapter_id, "done": answer is not None}
            return json_answer(msgspec.json.encode(told), 202 if answer is None else 200)
        case Answer(outcome=Answered.IN_USE):
            raise ApiError("in_use", answer.reason, "adapter_id")
        case Answer(outcome=Answered.NOT_THERE):
            raise ApiError("not_found", answer.reason, "adapter_id")
        case _:
            raise ApiError("load_failed", f"replica {place}: {answer.reason}", "adapter_id")


def _wait_s(request: web.Request, default: int) -> int:
    text = request.query.get("wait", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= LONGEST_WAIT_S):
        raise ApiError("invalid_request", f"wait: whole seconds from 0 to {LONGEST_WAIT_S} are needed", "wait")
    return int(text)


def _drains(request: web.Request) -> bool:
    text = request.query.get("drain", "false")
    if text not in ("true", "false"):
        raise ApiError("invalid_request", f"drain: true or false is needed, not {text[:20]!r}", "drain")
    return text == "true"


def _state(holder: Holder[ReplicaBeat], now: float) -> dict[str, Any]:
    """The brief's five fields first, then what else an operator asks. Everything is as of the replica's last beat."""
    beat = holder.beat
    told: dict[str, Any] = {"replica_id": str(holder.place), "incarnation": holder.incarnation}
    told["status"] = _status(holder, now)
    if beat is None:
        return {
            "gpu_adapters": [], "ram_adapters": [], "queue_depth": 0, "tokens_in_flight": 0, "evictions_per_min": 0.0,
        } | told  # fmt: skip
    tiers = beat.tiers
    held = {
        "gpu": (tiers.gpu_bytes, 0),
        "ram": (tiers.ram_bytes, tiers.ram_limit_bytes),
        "disk": (tiers.disk_bytes, tiers.disk_limit_bytes),
    }
    return {
        "gpu_adapters": beat.residency.gpu_adapters,
        "ram_adapters": beat.residency.ram_adapters,
        "queue_depth": beat.load.waiting,
        "tokens_in_flight": beat.load.tokens_in_flight,
        "evictions_per_min": beat.residency.evictions_per_min,
        **told,
        "disk_adapters": beat.residency.disk_adapters,
        "loads_per_min": beat.residency.loads_per_min,
        "bytes": {tier: used for tier, (used, _) in held.items()},
        "limit_bytes": {tier: limit for tier, (_, limit) in held.items() if limit},
        "slot_leases": tiers.slot_leases,
        "kv_blocks": tiers.kv_blocks,
        "file_leases": tiers.file_leases,
        "loads_on_their_way": tiers.loads,
        "owned_and_missing": tiers.missing,
        "thrashing": tiers.thrashing,
        "failed_loads": beat.failed_loads,
        "lease_incidents": tiers.incidents,
        "last_lease_incident": tiers.incident,
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

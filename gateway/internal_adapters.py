"""/internal/adapters and /internal/aliases: what the fine-tuning pipeline calls. Deciding is the registry's.

A caller that may have to send a change twice gives it an id, in the header Idempotency-Key: the registry knows one that
has moved an alias before. Ids are the customer's own: whoever waits for one sees no other customer's answer.
"""

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.auth import Identity, Keys
from gateway.body import read_body
from gateway.catalogue import Catalogue
from gateway.errors import ApiError
from gateway.fleet import Fleet
from gateway.history import History
from gateway.internal_auth import operator, pipeline
from gateway.middleware import json_answer
from gateway.readiness import Readiness
from gateway.registrar import RESULT_LIMIT_S, Registrar
from schemas.adapters import (
    CommandResult,
    QuarantineAdapter,
    Refusal,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from schemas.reasons import AdapterStatus, Role
from streams.adapters.names import AdapterName, AliasName, InvalidName, parse_adapter, parse_alias

C = TypeVar("C", RegisterAdapter, QuarantineAdapter, SetAlias)
N = TypeVar("N", AdapterName, AliasName)
LONGEST_KEY = 64


class InternalAdapters:
    def __init__(
        self,
        keys: Keys,
        catalogue: Catalogue,
        registrar: Registrar,
        history: History,
        readiness: Readiness,
        fleet: Fleet,
        now: Callable[[], float],
    ) -> None:
        self._keys, self._catalogue, self._registrar, self._readiness = keys, catalogue, registrar, readiness
        self._history, self._fleet, self._now = history, fleet, now

    async def register(self, request: web.Request) -> web.Response:
        """201, or 200 for the same adapter again."""
        self._readiness.check_tables()
        pipeline(self._keys, _key(request))
        command = read(RegisterAdapter, await read_body(request), {"command_id": "", "by": ""})
        customer = _named(parse_adapter, command.adapter_id, "adapter_id").customer
        identity = pipeline(self._keys, _key(request), customer)
        command = msgspec.structs.replace(command, command_id=_command_id(request, customer), by=identity.principal)
        self._readiness.check()
        result = await self._registrar.decide(customer, command)
        return _told(
            result, adapter_id=command.adapter_id, content_id=result.content_id, status=self._status(command.adapter_id)
        )

    async def set_alias(self, request: web.Request) -> web.Response:
        """Answers when no live gateway resolves the alias to the old adapter any more; 202 if `?wait=` ends before.

        With a `share` below 1 in the body: when each live gateway gives the adapter that share of the conversations.
        """
        self._readiness.check_tables()
        identity, customer, alias = self._alias(request)
        given = {"alias": alias, "command_id": _command_id(request, customer), "by": identity.principal}
        command = read(SetAlias, await read_body(request), given)
        return await self._move(customer, command, _wait_s(request))

    async def rollback(self, request: web.Request) -> web.Response:
        """To the alias' previous adapter; otherwise as `set_alias`."""
        identity, customer, alias = self._alias(request)
        command = RollbackAlias(_command_id(request, customer), alias, identity.principal)
        return await self._move(customer, command, _wait_s(request))

    async def _move(self, customer: str, command: SetAlias | RollbackAlias, wait_s: float) -> web.Response:
        self._readiness.check()
        result = await self._registrar.decide(customer, command, wait_s)
        told: dict[str, object] = {
            "alias": command.alias,
            "adapter_id": result.adapter_id,
            "previous_adapter_id": result.previous_adapter_id,
        }
        if result.trial_adapter_id:
            told |= {"trial_adapter_id": result.trial_adapter_id, "trial_share": result.trial_share}
        if pending := result.pending_adapter_id:
            told |= {"pending_adapter_id": pending, "waits_for": f"{self._cold(pending)} to load {pending}"}
        return _told(result, **told)

    def _cold(self, adapter_id: str) -> str:
        """The owners that the registry waits for, as this gateway sees them."""
        cold = self._fleet.cold(adapter_id, self._now())
        return f"replicas {cold}" if cold else "the registry, and replicas it has not heard,"

    async def retire(self, request: web.Request) -> web.Response:
        """409, which names them, while aliases point at it."""
        identity, customer, adapter_id = self._adapter(request)
        self._readiness.check()
        command = RetireAdapter(_command_id(request, customer), adapter_id, identity.principal)
        result = await self._registrar.decide(customer, command)
        return _told(result, adapter_id=adapter_id, status=AdapterStatus.RETIRED)

    async def quarantine(self, request: web.Request) -> web.Response:
        """Answers when no live gateway serves it any more. An operator's alone: a pipeline retires what is its own."""
        customer, given = self._judged(request)
        command = read(QuarantineAdapter, await read_body(request), given)
        return await self._judge(customer, command, AdapterStatus.QUARANTINED)

    async def release(self, request: web.Request) -> web.Response:
        """It is served again. An operator's alone."""
        customer, given = self._judged(request)
        return await self._judge(customer, ReleaseAdapter(**given), AdapterStatus.READY)

    def _judged(self, request: web.Request) -> tuple[str, dict[str, str]]:
        """The customer whose adapter the path names, and what a command has besides its body. Raises ApiError."""
        self._readiness.check_tables()
        identity, adapter_id = operator(self._keys, _key(request)), request.match_info["adapter_id"]
        customer = _named(parse_adapter, adapter_id, "adapter_id").customer
        return customer, {
            "command_id": _command_id(request, customer), "adapter_id": adapter_id, "by": identity.principal
        }  # fmt: skip

    async def _judge(
        self, customer: str, command: QuarantineAdapter | ReleaseAdapter, status: AdapterStatus
    ) -> web.Response:
        self._readiness.check()
        result = await self._registrar.decide(customer, command)
        return _told(result, adapter_id=command.adapter_id, status=status)

    async def adapter(self, request: web.Request) -> web.Response:
        """The row, and the aliases that point at it, for some conversations or all, or will."""
        _, customer, adapter_id = self._adapter(request)
        record = self._catalogue.adapter(adapter_id)
        if record is None:
            raise ApiError("not_found", f"adapter {adapter_id} is not registered", "adapter_id")
        pointing = [row.alias for row in self._catalogue.aliases(customer) if adapter_id in row.ends]
        return json_answer(msgspec.json.encode(msgspec.to_builtins(record) | {"aliases": pointing}))

    async def alias(self, request: web.Request) -> web.Response:
        _, customer, alias = self._alias(request)
        found = [row for row in self._catalogue.aliases(customer) if row.alias == alias]
        if not found:
            raise ApiError("not_found", f"alias {alias} is not there", "alias")
        return json_answer(msgspec.json.encode(found[0]))

    async def adapters(self, request: web.Request) -> web.Response:
        return json_answer(msgspec.json.encode({"adapters": self._catalogue.adapters(self._whose(request))}))

    async def aliases(self, request: web.Request) -> web.Response:
        return json_answer(msgspec.json.encode({"aliases": self._catalogue.aliases(self._whose(request))}))

    def _whose(self, request: web.Request) -> str | None:
        self._readiness.check_tables()
        identity = pipeline(self._keys, _key(request))
        return None if identity.role is Role.OPERATOR else identity.customer.customer

    async def adapter_history(self, request: web.Request) -> web.Response:
        """Of a refused registration, too, which is all that is left of it."""
        _, customer, adapter_id = self._adapter(request)
        return await self._events(customer, "adapter_id", adapter_id)

    async def alias_history(self, request: web.Request) -> web.Response:
        _, customer, alias = self._alias(request)
        return await self._events(customer, "alias", alias)

    async def _events(self, customer: str, field: str, name: str) -> web.Response:
        self._readiness.check()
        events = await self._history.of(customer, name)
        if not events:
            raise ApiError("not_found", f"nothing is known of {name}", field)
        return json_answer(msgspec.json.encode({field: name, "events": events}))

    def _adapter(self, request: web.Request) -> tuple[Identity, str, str]:
        """Who asks, the customer whose adapter the path names, and its id. Raises ApiError (401, 403, 422)."""
        return self._named(request, parse_adapter, "adapter_id")

    def _alias(self, request: web.Request) -> tuple[Identity, str, str]:
        """Likewise of an alias."""
        return self._named(request, parse_alias, "alias")

    def _named(self, request: web.Request, parse: Callable[[str], N], field: str) -> tuple[Identity, str, str]:
        self._readiness.check_tables()
        pipeline(self._keys, _key(request))
        text = request.match_info[field]
        customer = _named(parse, text, field).customer
        return pipeline(self._keys, _key(request), customer), customer, text

    def _status(self, adapter_id: str) -> str:
        record = self._catalogue.adapter(adapter_id)
        return AdapterStatus.READY if record is None else record.status


def read(kind: type[C], body: bytes, given: dict[str, str]) -> C:
    """A command out of a body that has its fields, but for those `given`. Raises ApiError.

    Unlike a decoder, which stops at the first fault, this tells all of them at once.
    """
    try:
        told: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError("invalid_request", f"the body is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise ApiError("invalid_request", "the body is not a JSON object")
    fields: dict[str, Any] = {**given}
    refusals = []
    wanted = [field for field in msgspec.structs.fields(kind) if field.name not in fields]
    for field in wanted:
        if field.name not in told:
            if field.required:
                refusals.append(Refusal(field.name, "missing"))
            continue
        try:
            fields[field.name] = msgspec.convert(told[field.name], field.type)
        except msgspec.ValidationError as error:
            refusals.append(Refusal(field.name, str(error)))
    known = [field.name for field in wanted]
    refusals += [Refusal(name, f"unknown; known are {', '.join(known)}") for name in told if name not in known]
    if refusals:
        raise _refusal(refusals)
    return kind(**fields)


def _named(parse: Callable[[str], N], text: str, field: str) -> N:
    try:
        return parse(text)
    except InvalidName as error:
        raise _refusal([Refusal(field, str(error))]) from None


def _refusal(refusals: list[Refusal]) -> ApiError:
    message = "; ".join(f"{refusal.field}: {refusal.message}" for refusal in refusals)
    return ApiError("refused", message, refusals[0].field, refusals)


def _command_id(request: web.Request, customer: str) -> str:
    """The caller's own id for this change, if it gave one. Raises ApiError."""
    given = request.headers.get("Idempotency-Key")
    if given is None:
        return uuid.uuid4().hex
    if not (given.isascii() and given.isprintable() and 0 < len(given) <= LONGEST_KEY):
        raise ApiError(
            "invalid_request", f"Idempotency-Key: 1 to {LONGEST_KEY} printable characters", "Idempotency-Key"
        )
    return f"{customer}/{given}"


def _wait_s(request: web.Request) -> float:
    """How long the call may take until it answers 202. Raises ApiError."""
    text = request.query.get("wait", f"{RESULT_LIMIT_S:g}")
    if not (text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= RESULT_LIMIT_S):
        raise ApiError("invalid_request", f"wait: whole seconds from 0 to {RESULT_LIMIT_S:g} are needed", "wait")
    return int(text)


def _told(result: CommandResult, **fields: object) -> web.Response:
    return json_answer(msgspec.json.encode({**fields, "command_id": result.command_id}), result.status)


def _key(request: web.Request) -> str | None:
    return request.headers.get("Authorization")

"""/internal/adapters and /internal/aliases: what the fine-tuning pipeline calls. Deciding is the registry's."""

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.auth import Keys
from gateway.body import read_body
from gateway.catalogue import Catalogue
from gateway.errors import ApiError
from gateway.internal_auth import pipeline
from gateway.middleware import json_answer
from gateway.readiness import Readiness
from gateway.registrar import Registrar
from schemas.adapters import CommandResult, Refusal, RegisterAdapter, RetireAdapter, SetAlias
from schemas.reasons import AdapterStatus, Role
from streams.adapters.names import AdapterName, AliasName, InvalidName, parse_adapter, parse_alias

C = TypeVar("C", RegisterAdapter, SetAlias)
N = TypeVar("N", AdapterName, AliasName)


class InternalAdapters:
    def __init__(self, keys: Keys, catalogue: Catalogue, registrar: Registrar, readiness: Readiness) -> None:
        self._keys, self._catalogue, self._registrar, self._readiness = keys, catalogue, registrar, readiness

    async def register(self, request: web.Request) -> web.Response:
        """201, or 200 for the same adapter again."""
        self._readiness.check_tables()
        pipeline(self._keys, _key(request))
        command = read(RegisterAdapter, await read_body(request), {})
        customer = _named(parse_adapter, command.adapter_id, "adapter_id").customer
        pipeline(self._keys, _key(request), customer)
        self._readiness.check()
        result = await self._registrar.decide(customer, command)
        return _told(
            result, adapter_id=command.adapter_id, content_id=result.content_id, status=self._status(command.adapter_id)
        )

    async def set_alias(self, request: web.Request) -> web.Response:
        """Answers when no live gateway resolves the alias to the old adapter any more."""
        self._readiness.check_tables()
        alias = request.match_info["alias"]
        pipeline(self._keys, _key(request))
        customer = _named(parse_alias, alias, "alias").customer
        pipeline(self._keys, _key(request), customer)
        command = read(SetAlias, await read_body(request), {"alias": alias})
        self._readiness.check()
        result = await self._registrar.decide(customer, command)
        return _told(result, alias=alias, adapter_id=command.adapter_id, previous_adapter_id=result.previous_adapter_id)

    async def retire(self, request: web.Request) -> web.Response:
        self._readiness.check_tables()
        adapter_id = request.match_info["adapter_id"]
        pipeline(self._keys, _key(request))
        customer = _named(parse_adapter, adapter_id, "adapter_id").customer
        pipeline(self._keys, _key(request), customer)
        self._readiness.check()
        result = await self._registrar.decide(customer, RetireAdapter(uuid.uuid4().hex, adapter_id))
        return _told(result, adapter_id=adapter_id, status=AdapterStatus.RETIRED)

    async def adapters(self, request: web.Request) -> web.Response:
        return json_answer(msgspec.json.encode({"adapters": self._catalogue.adapters(self._whose(request))}))

    async def aliases(self, request: web.Request) -> web.Response:
        return json_answer(msgspec.json.encode({"aliases": self._catalogue.aliases(self._whose(request))}))

    def _whose(self, request: web.Request) -> str | None:
        self._readiness.check_tables()
        identity = pipeline(self._keys, _key(request))
        return None if identity.role is Role.OPERATOR else identity.customer.customer

    def _status(self, adapter_id: str) -> str:
        record = self._catalogue.adapter(adapter_id)
        return AdapterStatus.READY if record is None else record.status


def read(kind: type[C], body: bytes, given: dict[str, str]) -> C:
    """A command out of a body that has its fields, but for command_id and those `given`. Raises ApiError.

    Unlike a decoder, which stops at the first fault, this tells all of them at once.
    """
    try:
        told: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError("invalid_request", f"the body is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise ApiError("invalid_request", "the body is not a JSON object")
    fields: dict[str, Any] = {"command_id": uuid.uuid4().hex, **given}
    refusals = []
    wanted = [field for field in msgspec.structs.fields(kind) if field.name not in fields]
    for field in wanted:
        if field.name not in told:
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


def _told(result: CommandResult, **fields: str) -> web.Response:
    return json_answer(msgspec.json.encode({**fields, "command_id": result.command_id}), result.status)


def _key(request: web.Request) -> str | None:
    return request.headers.get("Authorization")

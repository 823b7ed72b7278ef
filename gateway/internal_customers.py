"""/internal/customers/{id}: makes customers and their keys. A key is shown once, in the answer that makes it.

The `customers` table has no single writer: of two changes to one customer at the same time, one is lost.
"""

import secrets
import time
from hashlib import sha256
from typing import Any

import msgspec
from aiohttp import web

from gateway.auth import Keys
from gateway.body import read_body
from gateway.decoding import check_within, decode
from gateway.errors import ApiError
from gateway.internal_auth import operator
from gateway.middleware import json_answer
from gateway.readiness import Readiness
from gateway.registrar import confirmed
from gateway.tables import Tables
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role
from schemas.topics import CUSTOMERS
from streams.adapters.names import InvalidName, parse_customer
from streams.bus.errors import BusUnavailable, NotWritten
from streams.bus.writer import Writer

SEND_LIMIT_S = 5.0
LIMITS = ("max_in_flight", "requests_per_minute", "tokens_per_minute", "max_input_tokens", "max_output_tokens")
MOST = 1_000_000_000
HINT = 9  # characters: the prefix, and six of 43


class CustomerChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays as it is. `role` is the new key's. `revoke`: hints of keys that end here.

    The limits are those of schemas/customers.py; 0 lifts one.
    """

    role: Role = Role.CUSTOMER
    max_in_flight: int | None = None
    weight: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    revoke: list[str] = []


_DECODER = msgspec.json.Decoder(CustomerChange)
_WORDS = {"role": ", ".join(Role)}


class InternalCustomers:
    def __init__(self, keys: Keys, tables: Tables, writer: Writer, readiness: Readiness) -> None:
        self._keys, self._tables, self._writer, self._readiness = keys, tables, writer, readiness

    async def get(self, request: web.Request) -> web.Response:
        self._allow(request)
        name = _name(request)
        customer = self._keys.customer(name)
        if customer is None:
            raise ApiError("not_found", f"customer {name} is not there")
        return json_answer(msgspec.json.encode(_told(customer)))

    async def put(self, request: web.Request) -> web.Response:
        """Makes the customer if need be, and a new key. Answers when every live gateway knows the key."""
        self._allow(request)
        name = _name(request)
        change: CustomerChange = decode(_DECODER, await read_body(request) or b"{}", _WORDS)
        self._readiness.check()
        before = self._keys.customer(name)
        key = f"lf-{secrets.token_urlsafe(32)}"
        customer = changed(before, name, change, key, time.time_ns() // 1_000_000)
        try:
            written = await self._writer.send(CUSTOMERS, customer, key=name, timeout_s=SEND_LIMIT_S)
        except NotWritten as error:
            raise ApiError("broker", f"the customer was not written: {error}") from None
        except BusUnavailable as error:
            raise ApiError("unconfirmed", f"the customer may not have been written: {error}") from None
        await confirmed(self._tables, CUSTOMERS, written.partition, written.offset)
        told = {"key": key, "role": change.role} | _told(customer)
        return json_answer(msgspec.json.encode(told), 201 if before is None else 200)

    def _allow(self, request: web.Request) -> None:
        self._readiness.check_tables()
        operator(self._keys, request.headers.get("Authorization"))


def changed(before: Customer | None, name: str, change: CustomerChange, key: str, now_unix_ms: int) -> Customer:
    """The customer with the change and the new key. Raises ApiError."""
    for limit in LIMITS:
        check_within(limit, getattr(change, limit), 0, MOST)
    if change.weight is not None and not 0 < change.weight <= 1000:
        raise ApiError("invalid_request", f"weight is {change.weight:g}: give a number above 0, to 1000", "weight")
    customer = before if before is not None else Customer(name, [])
    kept = [old for old in customer.keys if old.hint not in change.revoke]
    if unknown := set(change.revoke) - {old.hint for old in customer.keys}:
        raise ApiError("invalid_request", f"revoke: no key has the hint {sorted(unknown)[0][:20]}", "revoke")
    new = ApiKey(sha256(key.encode()).hexdigest(), key[:HINT], change.role)
    limits = {limit: value for limit in (*LIMITS, "weight") if (value := getattr(change, limit)) is not None}
    return msgspec.structs.replace(customer, keys=[*kept, new], updated_unix_ms=now_unix_ms, **limits)


def _name(request: web.Request) -> str:
    try:
        return parse_customer(request.match_info["customer"])
    except InvalidName as error:
        raise ApiError("invalid_request", str(error), "customer") from None


def _told(customer: Customer) -> dict[str, Any]:
    """Without the keys' hashes."""
    return {
        "customer": customer.customer,
        "weight": customer.weight,
        **{limit: getattr(customer, limit) for limit in LIMITS},
        "keys": [{"hint": key.hint, "role": key.role} for key in customer.keys],
    }

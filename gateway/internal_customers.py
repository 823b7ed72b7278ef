"""/internal/customers: who they are, and their limits. Making one makes its first key, shown in that answer."""

import msgspec
from aiohttp import web

from gateway.body import read_body
from gateway.customer_changes import CustomerChanges, there, told_of
from gateway.decoding import check_within, decode
from gateway.errors import ApiError
from gateway.internal_keys import new_key
from gateway.middleware import json_answer
from schemas.customers import Customer
from schemas.reasons import Role

LIMITS = ("max_in_flight", "requests_per_minute", "tokens_per_minute", "max_input_tokens", "max_output_tokens")
MOST = 1_000_000_000
MOST_WEIGHT = 1000


class CustomerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays as it is. The limits are those of schemas/customers.py; 0 lifts one."""

    max_in_flight: int | None = None
    weight: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    def check(self) -> None:
        """Raises ApiError."""
        for limit in LIMITS:
            check_within(limit, getattr(self, limit), 0, MOST)
        if self.weight is not None and not 0 < self.weight <= MOST_WEIGHT:
            fix = f"give a number above 0, to {MOST_WEIGHT}"
            raise ApiError("invalid_request", f"weight is {self.weight:g}: {fix}", "weight")

    def given(self) -> dict[str, float]:
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


_DECODER = msgspec.json.Decoder(CustomerLimits)


class InternalCustomers:
    def __init__(self, changes: CustomerChanges) -> None:
        self._changes = changes

    async def list(self, request: web.Request) -> web.Response:
        self._changes.allow(request)
        return json_answer(msgspec.json.encode({"customers": [told_of(customer) for customer in self._changes.all()]}))

    async def get(self, request: web.Request) -> web.Response:
        return json_answer(msgspec.json.encode(told_of(there(*self._changes.asked(request)))))

    async def put(self, request: web.Request) -> web.Response:
        """201, with a key, for one that is new. Answers when every live gateway knows."""
        name, _ = self._changes.asked(request)
        limits: CustomerLimits = decode(_DECODER, await read_body(request) or b"{}", {})
        limits.check()
        made: list[str] = []

        def change(before: Customer | None, now_unix_ms: int) -> Customer:
            if before is None:
                key, secret = new_key(Role.CUSTOMER, now_unix_ms)
                made.append(secret)
                before = Customer(name, [key])
            return msgspec.structs.replace(before, updated_unix_ms=now_unix_ms, **limits.given())

        told = told_of(await self._changes.make(name, change))
        return json_answer(msgspec.json.encode(told | ({"key": made[0]} if made else {})), 201 if made else 200)

"""/internal/customers/{id}/keys: made, listed, revoked. A key is shown once, in the answer that makes it.

To rotate one: make another, let its users take it, revoke the old one. Revoking names a key by its hint, and is
answered when every live gateway refuses it. A key that has expired is forgotten with the next change of its customer.
"""

import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated

import msgspec
from aiohttp import web

from gateway.body import read_body
from gateway.customer_changes import CustomerChanges, there, told_of
from gateway.decoding import bad, check_within, decode
from gateway.errors import ApiError
from gateway.middleware import json_answer
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role
from streams.adapters.names import InvalidName, parse_model

HINT = 9  # characters: the prefix, and six of 43
MOST_KEYS = 16  # of one customer
MOST_MODELS = 100
LONGEST_S = 10 * 366 * 86_400
WORDS = {"role": ", ".join(Role)}


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`expires_in_s` 0: never. `models`: what it may name as `model`, as schemas/customers.py has it; empty: all."""

    role: Role = Role.CUSTOMER
    expires_in_s: int = 0
    models: Annotated[list[str], msgspec.Meta(max_length=MOST_MODELS)] = []


_DECODER = msgspec.json.Decoder(NewKey)


class InternalKeys:
    """`base_name`: the base model's, which a key may be bound to as well."""

    def __init__(self, changes: CustomerChanges, base_name: str) -> None:
        self._changes, self._base_name = changes, base_name

    async def list(self, request: web.Request) -> web.Response:
        told = told_of(there(*self._changes.asked(request)))
        return json_answer(msgspec.json.encode({"customer": told["customer"], "keys": told["keys"]}))

    async def make(self, request: web.Request) -> web.Response:
        """201. Answers when every live gateway knows the key."""
        name, _ = self._changes.asked(request)
        asked: NewKey = decode(_DECODER, await read_body(request) or b"{}", WORDS)
        check_within("expires_in_s", asked.expires_in_s, 0, LONGEST_S)
        for model in asked.models:
            self._check_model(name, model)
        made: list[tuple[ApiKey, str]] = []

        def change(before: Customer | None, now_unix_ms: int) -> Customer:
            kept = _live(there(name, before).keys, now_unix_ms)
            if len(kept) >= MOST_KEYS:
                raise ApiError("conflict", f"customer {name} has {len(kept)} keys: revoke one first", "customer")
            expires = now_unix_ms + asked.expires_in_s * 1000 if asked.expires_in_s else 0
            made[:] = [new_key(asked.role, now_unix_ms, expires, asked.models)]
            return msgspec.structs.replace(there(name, before), keys=[*kept, made[0][0]], updated_unix_ms=now_unix_ms)

        await self._changes.make(name, change)
        key, secret = made[0]
        shown = {field: getattr(key, field) for field in key.__struct_fields__ if field != "sha256"}
        return json_answer(msgspec.json.encode({"customer": name, "key": secret} | shown), 201)

    async def revoke(self, request: web.Request) -> web.Response:
        """Answers when no live gateway takes the key any more. Streams that it began go on."""
        name, _ = self._changes.asked(request)
        hint = request.match_info["hint"]

        def change(before: Customer | None, now_unix_ms: int) -> Customer:
            kept = [key for key in there(name, before).keys if key.hint != hint]
            if len(kept) == len(there(name, before).keys):
                raise ApiError("not_found", f"customer {name} has no key with the hint {hint[:20]}", "hint")
            return msgspec.structs.replace(
                there(name, before), keys=_live(kept, now_unix_ms), updated_unix_ms=now_unix_ms
            )

        customer = await self._changes.make(name, change)
        return json_answer(msgspec.json.encode({"revoked": hint} | told_of(customer)))

    def _check_model(self, customer: str, model: str) -> None:
        """Raises ApiError for a name that no model of this customer can ever have."""
        if model == self._base_name:
            return
        try:
            named = parse_model(model if "@" in model or ":" in model else f"{model}@1")
        except InvalidName as error:
            raise bad("models", model, str(error)) from None
        if named.customer != customer:
            raise bad("models", model, f"give names of {customer}'s, or {self._base_name}")


def new_key(role: Role, now_unix_ms: int, expires_unix_ms: int = 0, models: Sequence[str] = ()) -> tuple[ApiKey, str]:
    """A random key, and the secret itself, which is nowhere else."""
    secret = f"lf-{secrets.token_urlsafe(32)}"
    digest = sha256(secret.encode()).hexdigest()
    return ApiKey(digest, secret[:HINT], role, now_unix_ms, expires_unix_ms, tuple(models)), secret


def _live(keys: list[ApiKey], now_unix_ms: int) -> list[ApiKey]:
    return [key for key in keys if not key.expires_unix_ms or key.expires_unix_ms > now_unix_ms]

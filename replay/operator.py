"""The operator's hand on a running stack: customers, adapters, aliases and replica states through `/internal/*`."""

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp
from yarl import URL

from replay.tenant import Tenant
from schemas.adapters import RegisterAdapter
from schemas.reasons import Role

KEY_S = 3600


class OperatorError(Exception):
    """What the internal API `said` instead, with which HTTP status."""

    def __init__(self, message: str, status: int, said: str = "") -> None:
        super().__init__(message)
        self.status, self.said = status, said


class Operator:
    """`async with Operator(internal_url, key) as operator`. Every call raises OperatorError unless it succeeded."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def make_customer(self, customer: str) -> Tenant:
        """Makes the customer if need be, and a key for it that is good for an hour."""
        return Tenant(customer, str((await self.make_key(customer, Role.CUSTOMER, KEY_S))["key"]))

    async def make_key(self, customer: str, role: Role, expires_in_s: int) -> dict[str, Any]:
        """Likewise; the key as it was made, the secret in `key` among the rest."""
        path = await self._put_customer(customer)
        return await self._call("POST", f"{path}/keys", {"role": role, "expires_in_s": expires_in_s})

    async def add_customer(self, customer: str) -> None:
        """Makes the customer if need be, without a key."""
        await self._put_customer(customer)

    async def _put_customer(self, customer: str) -> str:
        path = f"/internal/customers/{quote(customer, safe='')}"
        await self._call("PUT", path, {})
        return path

    async def limits(self, customer: str, **limits: int) -> None:
        """Those of schemas/customers.py; the others stay. Returns when every gateway keeps to them."""
        await self._call("PUT", f"/internal/customers/{quote(customer, safe='')}", limits)

    async def revoke(self, customer: str, hint: str) -> None:
        await self._call("DELETE", f"/internal/customers/{quote(customer, safe='')}/keys/{quote(hint, safe='')}")

    async def register(self, command: RegisterAdapter) -> dict[str, Any]:
        body = {name: getattr(command, name) for name in command.__struct_fields__ if name not in ("command_id", "by")}
        return await self.register_as(body)

    async def register_as(self, body: dict[str, Any]) -> dict[str, Any]:
        """Of a body as the API takes it."""
        return await self._call("POST", "/internal/adapters", body)

    async def adapter(self, adapter_id: str) -> dict[str, Any] | None:
        """Its row; None for one that was never registered."""
        try:
            return await self._call("GET", f"/internal/adapters/{quote(adapter_id, safe='')}")
        except OperatorError as error:
            if error.status == 404:
                return None
            raise

    async def quarantine(self, adapter_id: str, why: str, key: str) -> None:
        """Returns when no gateway serves it any more. `key`: in whose name, as history tells it."""
        await self._call("POST", f"/internal/adapters/{quote(adapter_id, safe='')}/quarantine", {"why": why}, key)

    async def load(self, replica: int, adapter_id: str, wait_s: int) -> None:
        """Returns when the adapter is in a slot there."""
        path = f"/internal/replicas/{replica}/adapters/{quote(adapter_id, safe='')}/load"
        if not (await self._call("POST", f"{path}?wait={wait_s}"))["done"]:
            raise OperatorError(f"{adapter_id} was not in a slot within {wait_s} s", 202)

    async def unload(self, replica: int, adapter_id: str) -> None:
        """Returns when the adapter is in no slot there any more, after what runs with it."""
        path = f"/internal/replicas/{replica}/adapters/{quote(adapter_id, safe='')}/unload"
        await self._call("POST", f"{path}?drain=true")

    async def drain(self, replica: int, key: str) -> None:
        """Returns when the replica was told; its state shows that it takes nothing new. `key`: likewise."""
        await self._call("POST", f"/internal/replicas/{replica}/drain", key=key)

    async def adapters(self) -> list[dict[str, Any]]:
        """The rows of all, retired ones too."""
        return list((await self._call("GET", "/internal/adapters"))["adapters"])

    async def retire(self, adapter_id: str) -> None:
        """Returns when no gateway takes a request for it any more. Refused (409) while an alias points at it."""
        await self._call("DELETE", f"/internal/adapters/{quote(adapter_id, safe='')}")

    async def set_alias(self, alias: str, adapter_id: str, share: float = 1.0) -> dict[str, Any]:
        """Returns when no gateway resolves the alias to the old adapter any more, but for those not in the `share`."""
        body = {"adapter_id": adapter_id, "share": share}
        return await self._call("PUT", f"/internal/aliases/{quote(alias, safe='')}", body)

    async def alias(self, alias: str) -> dict[str, Any]:
        """Its row."""
        return await self._call("GET", f"/internal/aliases/{quote(alias, safe='')}")

    async def rollback(self, alias: str) -> dict[str, Any]:
        """To the adapter before, or off a trial; otherwise as `set_alias`."""
        return await self._call("POST", f"/internal/aliases/{quote(alias, safe='')}/rollback")

    async def history(self, kind: str, name: str) -> list[dict[str, Any]]:
        """The events of one of the `adapters` or `aliases`, oldest first."""
        return list((await self._call("GET", f"/internal/{kind}/{quote(name, safe='')}/history"))["events"])

    async def replicas(self) -> list[dict[str, Any]]:
        """Every replica place that was ever held, with its state."""
        answer = await self._call("GET", "/internal/replicas")
        return list(answer["replicas"])

    async def _call(self, method: str, path: str, body: object = None, key: str = "") -> dict[str, Any]:
        """`key`: instead of the operator's own."""
        headers = {"Authorization": f"Bearer {key or self._key}"}
        url = URL(self._url + path, encoded=True)
        async with self._session.request(method, url, json=body, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise OperatorError(f"{method} {path}: {answer.status} {text}", answer.status, _said(text))
            return dict(json.loads(text))


def _said(text: str) -> str:
    """The message of an error's answer."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text


def registration(folder: Path, adapter_id: str, base_hash: str, weights_uri: str) -> RegisterAdapter:
    """The command that registers a PEFT folder whose weights were put at `weights_uri`."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    weights = (folder / "adapter_model.safetensors").read_bytes()
    return RegisterAdapter(
        command_id=uuid.uuid4().hex,
        adapter_id=adapter_id,
        version=int(adapter_id.rpartition("@")[2]),
        base_model_hash=base_hash,
        rank=config["r"],
        alpha=config["lora_alpha"],
        target_modules=sorted(config["target_modules"]),
        weights_uri=weights_uri,
        checksum=hashlib.sha256(weights).hexdigest(),
    )

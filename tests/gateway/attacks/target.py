"""What is attacked: a gateway with one replica, an innocent customer on it, one with secrets, and who attacks them."""

import asyncio
import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import psutil
from yarl import URL

from schemas.adapters import AdapterRecord, AliasRecord
from schemas.reasons import AdapterStatus, Role
from schemas.topics import ADAPTERS, ALIASES, CUSTOMERS
from streams.bus.writer import Writer
from tests.gateway.rig import ACME, NOTHING, Door, Rig, customer, text_of, until

MALLORY, THROTTLED, VICTIM = "lf-mallory", "lf-throttled", "lf-victim"
CHATS = "/v1/chat/completions"
RATE = 5  # of THROTTLED, per minute
ENDLESS = 4_000  # tokens
INNOCENT, WORDS = "is anybody hurt?", 20


@dataclass(frozen=True)
class Got:
    """`told` is what the attack got, for the table; `held` whether that is as it should be."""

    told: str
    held: bool


@dataclass(frozen=True)
class Attack:
    kind: str
    name: str
    run: Callable[["Target"], Awaitable[Got]]


Answer = tuple[int, dict[str, str], Any]


@dataclass(frozen=True)
class Target:
    rig: Rig
    door: Door

    @property
    def model(self) -> str:
        return self.rig.model.name

    def chat(self, text: str = "hi", count: int = 2, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": count} | more

    async def prepare(self) -> None:
        """Customers and the victim's adapter, as the tables have them."""
        made = [
            customer("mallory", (MALLORY, Role.CUSTOMER)),
            msgspec.structs.replace(customer("throttled", (THROTTLED, Role.CUSTOMER)), requests_per_minute=RATE),
            customer("victim", (VICTIM, Role.CUSTOMER)),
        ]
        adapter = AdapterRecord(
            "victim/secret@1", "victim", 1, self.rig.model.base_hash, 4, 8.0, ["q_proj"], 1, "s3://a/b", "c" * 64,
            "s3://a/c", "c" * 64, "d" * 64, AdapterStatus.READY, 0, 0, 0,
        )  # fmt: skip
        async with Writer(self.rig.settings, "target") as writer:
            for one in made:
                await writer.send(CUSTOMERS, one, key=one.customer)
            await writer.send(ADAPTERS, adapter, key=adapter.adapter_id)
            alias = AliasRecord("victim/secret:prod", "victim", adapter.adapter_id, "", 0, 0, 0)
            await writer.send(ALIASES, alias, key=alias.alias)
        for key, path in ((THROTTLED, "/v1/models"), (VICTIM, "/v1/models/victim/secret:prod")):
            end = time.monotonic() + 20
            while (await self.ask(path, None, key))[0] != 200:
                assert time.monotonic() < end, f"{path}: not there"
                await asyncio.sleep(0.05)

    async def ask(
        self,
        path: str,
        body: dict[str, Any] | bytes | None,
        key: str = MALLORY,
        internal: bool = False,
        headers: Mapping[str, str] = NOTHING,
    ) -> Answer:
        text = json.dumps(body).encode() if isinstance(body, dict) else body
        data = None if text is None else io.BytesIO(text)
        said = {"Authorization": f"Bearer {key}"} if key else {}
        said |= headers
        url = URL((self.door.internal if internal else self.door.url) + path, encoded=True)
        method = "GET" if data is None else "POST"
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
            session.request(method, url, data=data, headers=said) as answer,
        ):
            said_back = await answer.text()
            told = json.loads(said_back) if said_back.startswith("{") else said_back
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, told

    async def raw(self, data: bytes | Sequence[bytes], limit_s: float = 10, pause_s: float = 0.0) -> bytes:
        """What comes back until the gateway closes, or `limit_s` is over. It is read while `data` is written."""
        host, port = self.door.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = bytearray()

        async def read() -> None:
            with contextlib.suppress(ConnectionError):
                while more := await reader.read(1 << 16):
                    answer.extend(more)

        reading = asyncio.create_task(read())
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(limit_s):
                for part in [data] if isinstance(data, bytes) else data:
                    if reading.done():
                        break
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
        await asyncio.wait({reading}, timeout=limit_s)
        reading.cancel()
        writer.transport.abort()
        return bytes(answer)

    def posted(self, body: bytes, *headers: str, path: str = CHATS) -> bytes:
        """A request by hand."""
        length = (
            [] if any(line.lower().startswith(("content-length", "transfer-")) for line in headers) else [len(body)]
        )
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {MALLORY}", *headers]
        return "\r\n".join([*head, *(f"Content-Length: {size}" for size in length), "", ""]).encode("latin1") + body

    def memory_mb(self) -> float:
        return float(psutil.Process(self.door.child.pid).memory_info().rss) / 1e6

    async def quiet(self) -> bool:
        """Whether all that was asked is over: no request open, no row computed."""
        try:
            await until(lambda: self.door.metric("lorafleet_gateway_open_requests") == 0, 30, "no open request")
            await until(lambda: self.door.rows() == 0, 30, "no rows")
        except AssertionError:
            return False
        return True

    async def unharmed(self) -> bool:
        """Whether the innocent customer's chat comes out right, and the gateway is the one that it was."""
        right = await text_of(self.door, self.model, INNOCENT, WORDS, ACME) == self.rig.answer(INNOCENT, WORDS)
        output = self.door.child.output()
        return right and self.door.child.returncode() is None and "Traceback" not in output


def status(answer: bytes) -> int:
    """Of a raw answer; 0: the connection was closed, or nothing came."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def counted(what: Iterable[object]) -> str:
    found = Counter("closed" if one == 0 else str(one) for one in what)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in sorted(found.items()))


def all_are(got: Sequence[int], *right: int) -> Got:
    return Got(counted(got), set(got) <= set(right))

"""Clients that walk out, in every phase of a chat: what of theirs is left behind. All of it must be none.

Chats with more adapters than slots, through tiers too small for them, so that many wait for a place or for their load
when their client aborts its connection, at a random moment. Which phase that was, the worker's own row of the attempt
tells: it was never admitted, it waited for its adapter or a place, its prompt was read, or it was being answered.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import clickhouse_connect
import msgspec

from replay.churn.leaks import Leaks, look
from replay.kills import metric
from replay.peft_adapters import write_random
from replay.stage import Stage
from replay.streams import PROMPTS
from streams.adapters.shape import ModelShape

CUSTOMER, RANK = "walkouts", 8
AT_ONCE = 64
LONGEST_S = 6.0
ROWS_WITHIN_S = 30.0
PHASES = """
    SELECT multiIf(load_ms < 0, 'load', queue_ms < 0, 'queue', first_token_ms < 0, 'prefill', 'decode'), count()
    FROM attempts WHERE customer = {customer:String} AND reason = 'cancelled' GROUP BY 1
"""


class Walkouts(msgspec.Struct, frozen=True):
    """`phases`: of the attempts that ended so; the rest of `walked_out` never reached a worker, or had ended by then.

    `reserved_tokens`, `open_requests`: what the gateway still counts.
    """

    clients: int
    walked_out: int
    phases: dict[str, int]
    reserved_tokens: int
    open_requests: int
    leaks: Leaks

    @property
    def held(self) -> bool:
        return self.leaks.none and not self.reserved_tokens and not self.open_requests


async def measure(stage: Stage, clients: int, adapters: int, seed: int, told: Callable[[str], None]) -> Walkouts:
    """On a running stack."""
    draw, left = random.Random(seed), Counter[str]()
    async with stage.operator() as operator:
        tenant = await operator.make_customer(CUSTOMER)
        shape = await asyncio.to_thread(ModelShape.of, stage.model)
        names = [f"{CUSTOMER}/voice-{number}@1" for number in range(adapters)]
        for number, name in enumerate(names):
            told(f"adapters: {number} of {adapters}")
            with tempfile.TemporaryDirectory() as folder:
                await asyncio.to_thread(write_random, Path(folder), shape, 9000 + number, RANK)
                await operator.register(await stage.upload(Path(folder), name))
        places = asyncio.Semaphore(AT_ONCE)

        async def visit() -> None:
            async with places:
                body = {
                    "model": draw.choice(names),
                    "messages": [{"role": "user", "content": draw.choice(PROMPTS) * draw.choice((1, 1, 8))}],
                    "max_tokens": 400,
                    "stream": draw.random() < 0.8,
                }
                ended = await walk_out(stage.url, tenant.key, body, LONGEST_S * draw.random() ** 2)
            left["ended" if ended else "left"] += 1
            told(f"clients: {left.total()} of {clients}")

        await asyncio.gather(*(visit() for _ in range(clients)))
        told("what is left")
        leaks = await look(stage, operator)
    phases = await asyncio.to_thread(_phases, stage.environment["CLICKHOUSE_URL"], left["left"])
    return Walkouts(
        clients=clients,
        walked_out=left["left"],
        phases=phases,
        reserved_tokens=int(await metric(stage, "reserved_tokens")),
        open_requests=int(await metric(stage, "open_requests")),
        leaks=leaks,
    )


async def walk_out(url: str, key: str, body: dict[str, object], after_s: float) -> bool:
    """Asks, reads for so long, and aborts the connection. Whether the answer had ended before."""
    at, content = urlsplit(url), msgspec.json.encode(body)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(after_s):
            while await reader.read(1 << 16):
                pass
    ended = reader.at_eof()
    writer.transport.abort()
    return ended


def _phases(url: str, most: int) -> dict[str, int]:
    """As ClickHouse has them once no more come."""
    end, before = time.monotonic() + ROWS_WITHIN_S, -1
    with clickhouse_connect.get_client(dsn=url) as client:
        while True:
            rows = client.query(PHASES, parameters={"customer": CUSTOMER}).result_rows
            count = sum(number for _, number in rows)
            if count in (before, most) or time.monotonic() > end:
                return dict(sorted(rows))
            before = count
            time.sleep(2)

"""Too much at once, and too slow for too long."""

import asyncio
import json
import socket

from tests.gateway.attacks.target import (
    CHATS,
    ENDLESS,
    INNOCENT,
    RATE,
    THROTTLED,
    WORDS,
    Attack,
    Got,
    Target,
    all_are,
    counted,
    status,
)  # fmt: skip
from tests.gateway.rig import ACME, GLOBEX, text_of, until

BEGUN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


async def in_flight(target: Target) -> Got:
    """Two may be open for this customer."""
    asked = [target.ask(CHATS, target.chat(f"{n}", 100), GLOBEX) for n in range(50)]
    answers = await asyncio.gather(*asked)
    told = [code for code, *_ in answers]
    retry = all("retry-after" in headers for code, headers, _ in answers if code == 429)
    return Got(counted(told), set(told) == {200, 429} and told.count(200) < 10 and retry)


async def rate(target: Target) -> Got:
    got = [(await target.ask(CHATS, target.chat(), THROTTLED))[0] for _ in range(40)]
    return Got(counted(got), got.count(200) in (RATE, RATE + 1) and set(got) == {200, 429})


async def bad_keys(target: Target) -> Got:
    """Beside them an innocent chat runs."""
    innocent = asyncio.create_task(text_of(target.door, target.model, INNOCENT, WORDS, ACME))
    flood = [target.ask("/v1/models", None, f"lf-guess-{number}") for number in range(500)]
    got = [code for code, *_ in await asyncio.gather(*flood)]
    right = await innocent == target.rig.answer(INNOCENT, WORDS)
    return Got(counted(got), set(got) == {401} and right)


async def choices(target: Target) -> Got:
    got = [
        (await target.ask(CHATS, target.chat(n=17)))[0],
        (await target.ask("/v1/completions", {"model": target.model, "prompt": ["x"] * 1000}))[0],
        (await target.ask(CHATS, target.chat(count=10**9)))[0],
        (await target.ask(CHATS, target.chat(stop=["x" * 100_000])))[0],
        (await target.ask(CHATS, target.chat(logit_bias={str(n): 1 for n in range(5000)})))[0],
    ]
    return all_are(got, 400)


async def abandoned(target: Target) -> Got:
    """Long streams that their client leaves at once."""
    begun = target.posted(_dumped(target, 60))
    await asyncio.gather(*(target.raw(begun, limit_s=0.3) for _ in range(60)))
    return Got("60 streams begun and left", await target.quiet())


async def connections(target: Target) -> Got:
    """Half of a request each, and an innocent chat among them."""
    host, port = target.door.url.removeprefix("http://").split(":")
    held = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(400)))
    for number, (_, writer) in enumerate(held):
        writer.write(BEGUN[: number % len(BEGUN)])
    unharmed = await target.unharmed()
    closed = await asyncio.gather(*(_closed(reader) for reader, _ in held))
    for _, writer in held:
        writer.transport.abort()
    return Got(f"400 half-open connections: {sum(closed)} closed by the gateway", unharmed and all(closed))


async def trickle(target: Target) -> Got:
    """A header, and a body, byte by byte."""
    head = [bytes([byte]) for byte in BEGUN + b"X: " + b"x" * 4000]
    text = target.posted(b"", "Content-Length: 4000")
    answers = await asyncio.gather(
        target.raw(head, limit_s=110, pause_s=0.1), target.raw([text, *[b" "] * 4000], limit_s=110, pause_s=0.1)
    )
    got = [status(answer) for answer in answers]
    return Got(f"header: {counted(got[:1])}; body: {counted(got[1:])}", got[0] in (0, 408) and got[1] == 408)


async def slow_reader(target: Target) -> Got:
    """Asks for more than the buffers hold, and reads nothing."""
    cancelled = 'lorafleet_gateway_requests_total{outcome="cancelled"}'
    before, held = target.door.metric(cancelled), []
    loop = asyncio.get_running_loop()
    host, port = target.door.url.removeprefix("http://").split(":")
    for _ in range(4):
        held.append(connection := socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, int(port)))
        await loop.sock_sendall(connection, target.posted(_dumped(target, ENDLESS)))
    try:
        await until(lambda: target.door.metric(cancelled) - before >= 4, 100, "all cut off")
        cut = True
    except AssertionError:
        cut = False
    for connection in held:
        connection.close()
    return Got(f"{int(target.door.metric(cancelled) - before)} of 4 cut off", cut and await target.quiet())


async def _closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(110):
            await reader.read()
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def _dumped(target: Target, count: int) -> bytes:
    return json.dumps(target.chat("tell", count, stream=True, logprobs=True, top_logprobs=20)).encode()


ATTACKS = [
    Attack("floods", "50 chats at once, of a customer who may have 2 open", in_flight),
    Attack("floods", f"40 chats in a row, of a customer who may send {RATE} a minute", rate),
    Attack("floods", "500 wrong keys at once beside an innocent chat", bad_keys),
    Attack("floods", "too many choices, prompts, tokens, stops and biases in one request", choices),
    Attack("floods", "60 streams that are left as soon as they have begun", abandoned),
]
SLOW = [
    Attack("slow clients", "connections that say half of a request and then nothing", connections),
    Attack("slow clients", "a header and a body that come byte by byte", trickle),
    Attack("slow clients", "streams that nobody reads", slow_reader),
]

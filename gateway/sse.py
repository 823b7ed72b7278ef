"""An answer over HTTP: whole, or as server-sent events.

One `data:` line per chunk, comments to keep a connection alive. Headers leave with the first token, so that an error
before it has its true status; after a while without one they leave with a comment. A client that does not read is cut
off: what waits for it is bounded by the socket's buffers and its own max_tokens.
"""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing, nullcontext

import msgspec
from aiohttp import web

from gateway import slow_reader
from gateway.answer import Answer
from gateway.errors import ApiError
from gateway.middleware import STREAMING

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
# A comment alone: clients in use stumble over events without data.
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def events(chunks: Iterable[bytes], last: bool = False) -> bytes:
    """As they stand on the wire."""
    return b"".join([b"data: " + chunk + b"\n\n" for chunk in chunks]) + (DONE if last else b"")


class Stream(web.StreamResponse):
    """Its headers wait for the first events, which follow at once: a packet for both, not one for each."""

    _send_headers_immediately = False


async def whole(answer: Answer) -> web.Response:
    """Raises ApiError."""
    body = msgspec.json.encode(await answer.whole())
    return web.Response(body=body, headers=_about(answer) | {"Content-Type": "application/json"})


async def stream(answer: Answer, request: web.Request) -> web.StreamResponse:
    """Raises ApiError as long as no headers have left."""
    response: web.StreamResponse | None = None
    try:
        async with aclosing(answer.told()) as parts:
            async for told in parts:
                if response is None:
                    response = await _opened(answer, request)
                out = events(told.chunks, told.last) or KEEP_ALIVE
                if not await _taken(response, out, told.last, answer, request):
                    break
    except ApiError as problem:
        if response is None:
            raise
        response.force_close()  # no [DONE] follows
        await _taken(response, events([problem.body()]), True, answer, request)
    assert response is not None
    return response


async def _opened(answer: Answer, request: web.Request) -> web.StreamResponse:
    slow_reader.bound(request)
    response = Stream(headers=HEADERS | _about(answer))
    request[STREAMING] = True
    await response.prepare(request)
    return response


async def _taken(response: web.StreamResponse, out: bytes, last: bool, answer: Answer, request: web.Request) -> bool:
    """False: the client is gone, or does not read."""
    at_once = slow_reader.has_room(request, len(out))  # as most have: a timer for each token would cost a tenth of it
    writing = response.write_eof(out) if last else response.write(out)
    try:
        async with nullcontext() if at_once else asyncio.timeout(slow_reader.WRITE_LIMIT_S):
            await writing
    except TimeoutError:
        answer.cancel("the client reads too slowly")
        if request.transport is not None:
            request.transport.abort()
        return False
    except ConnectionError:
        return False
    return True


def _about(answer: Answer) -> dict[str, str]:
    headers = {"x-request-id": answer.request_id, "x-adapter-id": answer.adapter}
    if (tier := answer.tier) is not None:
        headers["x-adapter-tier"] = tier
    for what, standing in answer.limits.items():
        headers[f"x-ratelimit-limit-{what}"] = str(standing.limit)
        headers[f"x-ratelimit-remaining-{what}"] = str(standing.remaining)
        headers[f"x-ratelimit-reset-{what}"] = f"{standing.reset_s:.3f}s"
    return headers

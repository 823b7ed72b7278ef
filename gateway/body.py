"""A request's body: whole, as it was sent, and in time."""

import asyncio

from aiohttp import web

from gateway.errors import ApiError

BODY_LIMIT_S = 30.0


async def read_body(request: web.Request) -> bytes:
    """Raises ApiError: 408 when it does not come in time, 400 when it is packed or its frame is broken.

    Packed bodies are not unpacked: a few KB may hold hundreds of MB. web.HTTPException when it is too large.
    """
    packing = request.headers.get("Content-Encoding", "identity")
    if packing.lower() != "identity":
        shown = f"Content-Encoding is {packing[:40]}: send the body as it is"
        raise ApiError("invalid_request", shown, "Content-Encoding")
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError("body_too_slow", f"the body did not arrive within {BODY_LIMIT_S:g} s") from None
    except web.RequestPayloadError:
        raise ApiError("invalid_request", "the body is not framed as its headers say: send it anew") from None

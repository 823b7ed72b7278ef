"""Which pages of other origins may call the public API from a browser. None do unless GATEWAY_CORS_ORIGINS names them.

Own code, since it is so little: aiohttp-cors has had no release since March 2025, wants every route told, and answers
refusals without a body. What is sent with a key needs no more than this: nothing here depends on cookies, so
credentials are not allowed. Websockets are none of CORS' business; they have their key in the subprotocol.
"""

import re
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.errors import ApiError
from gateway.openapi import HEADERS

MAX_AGE_S = 600
EXPOSED = ", ".join((*HEADERS, "retry-after", "x-should-retry"))
API = "/v1/"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?")
_NAMES = re.compile(r"[a-zA-Z0-9_-]{1,64}(?:,[ \t]*[a-zA-Z0-9_-]{1,64}){0,63}")


def allow(app: web.Application, origins: Collection[str]) -> None:
    """Answers preflights for the API's routes, and lets these origins read every answer of theirs."""

    @web.middleware
    async def preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
        routed = request.match_info.http_exception
        if request.method != "OPTIONS" or not isinstance(routed, web.HTTPMethodNotAllowed) or not _ours(request):
            return await handler(request)
        return _preflight(request, routed.allowed_methods, origins)

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        if not _ours(request):
            return
        response.headers.add("Vary", "Origin")
        if (origin := request.headers.get("Origin", "")) in origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    app.middlewares.append(preflights)
    app.on_response_prepare.append(mark)


def _ours(request: web.Request) -> bool:
    return request.path.startswith(API)


def _preflight(request: web.Request, methods: Collection[str], origins: Collection[str]) -> web.Response:
    """Raises ApiError."""
    origin, asked = request.headers.get("Origin", ""), request.headers.get("Access-Control-Request-Headers", "")
    if origin not in origins:
        raise ApiError("origin_not_allowed", f"Origin is {origin[:80]!r}: pages of it may not call this API", "Origin")
    headers = {
        "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
        "Access-Control-Max-Age": str(MAX_AGE_S),
        "Vary": "Access-Control-Request-Headers",
    }
    if _NAMES.fullmatch(asked):  # whatever they are: what means nothing here is not read
        headers["Access-Control-Allow-Headers"] = asked
    return web.Response(status=204, headers=headers)

"""The header x-lorafleet-replica: an operator's request goes to this one replica, and to no other if that is lost.

For probes, which must know who answered. Whoever else sends it is refused, and so is every request that would not obey
it: a probe that was routed like any other request would vouch for a replica that it has never asked.
"""

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.errors import ApiError

HEADER = "x-lorafleet-replica"
OBEYED = ("/v1/chat/completions", "/v1/completions")


def place_of(values: Sequence[str]) -> int:
    """The place that the header's `values` name. Raises ApiError (400)."""
    text = values[0].strip()
    if len(values) != 1 or not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise ApiError("invalid_request", f"{HEADER} is {', '.join(values)[:40]}: give one replica's number", HEADER)
    return int(text)


def not_live(place: int) -> ApiError:
    return ApiError("not_found", f"{HEADER} is {place}: that replica takes no work: give one that is ready", HEADER)


@web.middleware
async def only_where_it_is_obeyed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises ApiError (400)."""
    if HEADER in request.headers and request.path not in OBEYED:
        raise ApiError("invalid_request", f"{HEADER}: only with {' and '.join(OBEYED)}", HEADER)
    return await handler(request)

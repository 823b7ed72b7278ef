"""What HTTP itself costs: a bare aiohttp server that answers every chat at once with the chunks the gateway would send.

`python -m replay.barehttp MODEL` serves on a free port of 127.0.0.1, until killed, and prints `ready URL KEY`. The same
server library, event loop and bytes as the gateway's, with nothing of its work behind them. With a broker's address
behind MODEL each answer waits for a bare Kafka round trip that passes an engine's double (replay/pingpong.py): the same
four processes and five protocols as the product's road, and none of its work. No code on that road can take less.
"""

import asyncio
import sys
import time
import uuid
from contextlib import nullcontext

import uvloop
from aiohttp import web

from gateway import sse
from gateway.chunks import ChatChunks
from gateway.openai_api import PromptDetails, Usage
from replay.openloop import Request
from replay.pingpong import round_trips


async def serve(model: str, bootstrap: str = "") -> None:
    """Until killed."""
    async with round_trips(bootstrap, engine=True) if bootstrap else nullcontext(None) as trip:
        runner = web.AppRunner(_app(model, trip), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"ready http://127.0.0.1:{runner.addresses[0][1]} none", flush=True)
        await asyncio.Future[None]()


def _app(model: str, trip: Request | None) -> web.Application:
    async def post(request: web.Request) -> web.StreamResponse:
        await request.read()
        if trip is not None:
            await trip(0)
        chunks = ChatChunks(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model, False)
        response = web.StreamResponse(headers=sse.HEADERS)
        await response.prepare(request)
        usage = Usage(1, 1, 2, PromptDetails(0))
        told = [*chunks.begin(0), chunks.text(0, "token"), chunks.finish(0, "length"), *chunks.usage(usage)]
        await response.write(sse.events(told, last=True))
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", post)
    return app


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:3]))

"""What streaming itself costs: a bare aiohttp server that sends the chunks of replay/paced_replicas.py at their pace.

`python -m replay.barestream MODEL_FOLDER COUNT STEP_MS` serves on a free port of 127.0.0.1 and prints `ready URL KEY`.
The gateway's server library, event loop, chunks and headers; no keys, no prompt, no Kafka and no replica behind them.
Its streams are spread over COUNT rhythms of STEP_MS, as those of COUNT replicas are.
"""

import asyncio
import sys
import threading
import time
import uuid
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from gateway import sse
from gateway.base_model import BaseModel
from gateway.chunks import ChatChunks
from gateway.openai_api import PromptDetails, Usage
from replay.beside import end_with_stdin
from replay.stamps import Stamps


class _Asked(msgspec.Struct):
    model: str
    max_tokens: int
    seed: int


class Rhythm:
    """Steps at a steady pace; `step` is what those wait for who want the next one."""

    def __init__(self) -> None:
        self.step = asyncio.Event()

    async def run(self, step_s: float, phase_s: float) -> None:
        due = time.monotonic() // step_s * step_s + phase_s
        while True:
            due += step_s
            await asyncio.sleep(due - time.monotonic())
            told, self.step = self.step, asyncio.Event()
            told.set()


def _app(stamps: Stamps, rhythms: list[Rhythm]) -> web.Application:
    turns, decoder = cycle(rhythms), msgspec.json.Decoder(_Asked)

    async def post(request: web.Request) -> web.StreamResponse:
        asked, rhythm = decoder.decode(await request.read()), next(turns)
        chunks = ChatChunks(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), asked.model, False)
        response = sse.Stream(headers=sse.HEADERS)
        with suppress(ConnectionError):  # it is cut off
            await stream(request, response, asked, rhythm, chunks)
        return response

    async def stream(
        request: web.Request, response: web.StreamResponse, asked: _Asked, rhythm: Rhythm, chunks: ChatChunks
    ) -> None:
        await response.prepare(request)
        for position in range(asked.max_tokens):
            for _ in range(asked.seed if position else 0):
                await rhythm.step.wait()
            word = stamps.words[stamps.moment(time.monotonic())].decode()
            told = [*(chunks.begin(0) if not position else ()), chunks.text(0, f" {word}")]
            if position + 1 < asked.max_tokens:
                await response.write(sse.events(told))
        usage = Usage(1, asked.max_tokens, asked.max_tokens + 1, PromptDetails(0))
        await response.write_eof(sse.events([*told, chunks.finish(0, "length"), *chunks.usage(usage)], last=True))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", post)
    return app


async def serve(folder: str, count: int, step_ms: float) -> None:
    """Until killed."""
    stamps = Stamps(BaseModel.load(Path(folder)).vocabulary.pieces)
    rhythms = [Rhythm() for _ in range(count)]
    runner = web.AppRunner(_app(stamps, rhythms), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    async with asyncio.TaskGroup() as tasks:
        for number, rhythm in enumerate(rhythms):
            tasks.create_task(rhythm.run(step_ms / 1000, number * step_ms / 1000 / count), name=f"rhythm {number}")
        print(f"ready http://127.0.0.1:{runner.addresses[0][1]} none", flush=True)


if __name__ == "__main__":
    threading.Thread(target=end_with_stdin, daemon=True).start()
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))

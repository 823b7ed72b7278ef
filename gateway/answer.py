"""An accepted request's answer, streamed or whole, from its first token to its last.

Headers leave with the first token, so that an error before it has its true status; after HEADERS_AFTER_S without one
they leave with a comment. A client that does not read is cut off: what waits for it is bounded by the socket's buffers
and its own max_tokens. Whatever ends an answer early, the switchboard cancels what still runs.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable

import msgspec
from aiohttp import web

from gateway import openai_api, sse
from gateway.base_model import BaseModel
from gateway.choice import Choice, Piece
from gateway.endings import failure
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.line import Lines
from gateway.middleware import REQUEST_ID, STREAMING
from gateway.openai_api import PromptDetails, Usage
from gateway.shown_text import Scored, ShownText
from gateway.style import Style
from gateway.switchboard import Switchboard
from schemas.reasons import Outcome, Tier

HEADERS_AFTER_S = 10.0
KEEP_ALIVE_S = 15.0
WRITE_LIMIT_S = 10.0
SEND_BUFFER_BYTES = 64 << 10


class Stream(web.StreamResponse):
    """Its headers wait for the first frames, which follow at once: a packet for both, not one for each."""

    _send_headers_immediately = False


class Answer:
    """`lines` are `asked.choices` for each prompt, in order."""

    def __init__(
        self,
        switchboard: Switchboard,
        model: BaseModel,
        request: web.Request,
        asked: Generation,
        lines: Lines,
        style: Style,
    ) -> None:
        self._switchboard, self._request, self._asked, self._lines = switchboard, request, asked, lines
        self._style = style
        self._scored = asked.top_logprobs_asked is not None
        self._choices = {
            line: Choice(index, line, ShownText(model.vocabulary, asked.stops, model.stop_ids), self._scored)
            for index, line in enumerate(lines.all)
        }
        self._scorers = [style.scorer(model.vocabulary) for _ in lines.all]
        self._created = int(time.time())
        self._id = f"{style.prefix}{request[REQUEST_ID]}"

    async def whole(self) -> web.Response:
        """Raises ApiError."""
        texts = [""] * len(self._choices)
        scores: list[list[Scored]] = [[] for _ in texts]
        finishes = [""] * len(texts)
        while not self._over:
            for choice, piece in await self._pieces():
                if piece.failed is not None:
                    raise self._failure(piece)
                texts[choice.index] += piece.text
                scores[choice.index] += piece.scored
                finishes[choice.index] = piece.finish or ""
        told = [
            self._style.choice(index, text, self._logprobs(index, scores[index]), finishes[index])
            for index, text in enumerate(texts)
        ]
        answer = openai_api.Answer(self._id, self._style.kind, self._created, self._asked.model, told, self._usage())
        headers = self._headers() | {"Content-Type": "application/json"}
        return web.Response(body=msgspec.json.encode(answer), headers=headers)

    async def stream(self) -> web.StreamResponse:
        """Raises ApiError as long as no headers have left."""
        frames = self._style.frames(self._id, self._created, self._asked.model, self._asked.include_usage)
        response: web.StreamResponse | None = None
        begun: set[int] = set()
        while True:
            pieces = await self._pieces(HEADERS_AFTER_S if response is None else KEEP_ALIVE_S)
            out, failed = b"" if pieces else sse.KEEP_ALIVE, False
            for choice, piece in pieces:
                if piece.failed is not None and response is None and not out and not piece.text:
                    raise self._failure(piece)
                if choice.index not in begun:
                    begun.add(choice.index)
                    out += frames.begin(choice.index)
                if piece.text or piece.scored:
                    out += frames.text(choice.index, piece.text, self._logprobs(choice.index, piece.scored))
                if piece.finish is not None:
                    out += frames.finish(choice.index, piece.finish)
                elif piece.failed is not None:  # what came before it is shown first
                    out, failed = out + sse.error(self._failure(piece)), True
                    break
            over = self._over
            if over and not failed:
                out += frames.done(self._usage())
            if response is None:
                self._bound_socket()
                response = Stream(headers=sse.HEADERS | self._headers())
                self._request[STREAMING] = True
                await response.prepare(self._request)
            if failed:
                response.force_close()
            taken = await self._taken(response.write_eof(out) if over or failed else response.write(out))
            if over or failed or not taken:
                return response

    @property
    def _over(self) -> bool:
        return all(choice.over for choice in self._choices.values())

    async def _pieces(self, timeout_s: float | None = None) -> list[tuple[Choice, Piece]]:
        """What is new, of each choice that is not over; nothing if nothing came within `timeout_s`."""
        pieces = []
        for news in await self._lines.news(timeout_s):
            choice = self._choices[news.line]
            if choice.over:  # a stop string ended it
                continue
            pieces.append((choice, choice.take(news)))
            if choice.stopped:
                self._switchboard.cancel(news.line, Outcome.OK)
        return pieces

    def _failure(self, piece: Piece) -> ApiError:
        assert piece.failed is not None
        return failure(piece.failed, self._asked.model, self._request[REQUEST_ID])

    def _logprobs(self, index: int, scored: list[Scored]) -> bytes:
        return self._scorers[index](scored) if self._scored else sse.NO_LOGPROBS

    def _bound_socket(self) -> None:
        """The kernel would otherwise take megabytes for a client that reads nothing."""
        if self._request.transport is not None:
            connection = self._request.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    async def _taken(self, writing: Awaitable[None]) -> bool:
        """False: the client is gone, or does not read."""
        try:
            async with asyncio.timeout(WRITE_LIMIT_S):
                await writing
        except TimeoutError:
            for line in self._lines.all:
                self._switchboard.cancel(line, Outcome.CANCELLED, "the client reads too slowly")
            if self._request.transport is not None:
                self._request.transport.abort()
            return False
        except ConnectionError:
            return False
        return True

    def _headers(self) -> dict[str, str]:
        """The tier is left out while no worker has said it: for an adapter, none would be wrong."""
        flight = self._lines.all[0].flight
        headers = {"x-request-id": self._request[REQUEST_ID], "x-adapter-id": flight.ask.adapter or "none"}
        if flight.tier is not Tier.NONE or not flight.ask.adapter:
            headers["x-adapter-tier"] = flight.tier
        return headers

    def _usage(self) -> Usage:
        """A prompt counts once, however many choices it has; its cached tokens are its first choice's."""
        flights = [line.flight for line in self._lines.all]
        firsts = flights[:: self._asked.choices]
        prompt = sum(len(flight.ask.prompt) for flight in firsts)
        output = sum(flight.output.position for flight in flights)
        return Usage(prompt, output, prompt + output, PromptDetails(sum(flight.cached for flight in firsts)))

"""POST /v1/chat/completions: one request from its body to its last token, streamed or whole.

Headers leave with the first token, so that an error before it has its true status; after HEADERS_AFTER_S without one
they leave with a comment. The client's going away cancels the handler, in whatever phase, and with it the request. A
client that does not read is cut off: what waits for it is bounded by the socket's buffers and its own max_tokens.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable

import msgspec
from aiohttp import web

from gateway import sse
from gateway.auth import Keys
from gateway.base_model import BaseModel
from gateway.body import read_body
from gateway.catalogue import Catalogue, not_found
from gateway.errors import ApiError
from gateway.flight import Ask, End
from gateway.limits import InFlight
from gateway.line import Line, News
from gateway.middleware import REQUEST_ID, STREAMING
from gateway.openai_api import AnswerMessage, ChatAnswer, ChatRequest, Choice, Usage, parse_chat
from gateway.readiness import Readiness
from gateway.shown_text import ShownText
from gateway.switchboard import Switchboard
from schemas.reasons import Outcome, Role, Tier
from schemas.requests import Sampling

log = logging.getLogger(__name__)

HEARD_WITHIN_S = 1.0
HEADERS_AFTER_S = 10.0
KEEP_ALIVE_S = 15.0
WRITE_LIMIT_S = 10.0
SEND_BUFFER_BYTES = 64 << 10
DEFAULT_MAX_TOKENS = 256
LONG_TEXT = 1_000  # characters; tokenizing more than this would hold up other streams
MARKS = 40  # characters that a template puts around a message, about


# What an End's finish means to whoever asked, and the parameter it is about.
TOLD: dict[str, tuple[str, str | None]] = {
    "too_long": ("the prompt and max_tokens do not fit the context: shorten the prompt or ask for less", "messages"),
    "overloaded": ("every replica is full: try again a little later", None),
    "no_replica": ("no replica is live: try again a little later", None),
    "draining": ("the replicas are being replaced: try again a little later", None),
    "stale": ("the replicas are being replaced: try again a little later", None),
    "gateway_lost": ("the replicas take this gateway for dead: try again a little later", None),
    "broker": ("the broker did not take the request: try again a little later", None),
    "unavailable": ("this gateway is shutting down: try again", None),
    "deadline": ("the request's time is over: ask for fewer tokens, or try again", None),
    "load_failed": ("the adapter could not be loaded: try again, and if that does not help tell the operator", "model"),
    "unknown_adapter": ("the replicas do not know the adapter yet: try again a little later", "model"),
    "quarantined": ("the adapter is quarantined: it crashed the engine", "model"),
    "base_mismatch": ("the replicas serve another base model than the adapter's: tell the operator", "model"),
    "content_mismatch": ("the replicas hold other content under the adapter's id: tell the operator", "model"),
    "error": ("the engine failed on this request", None),
    "redrives_used_up": ("every replica that worked on the request was lost", None),
}


class Chat:
    """`limit_s`: how long a request may take, all attempts together."""

    def __init__(
        self,
        model: BaseModel,
        keys: Keys,
        catalogue: Catalogue,
        switchboard: Switchboard,
        readiness: Readiness,
        limit_s: float,
    ) -> None:
        self._model, self._keys, self._catalogue = model, keys, catalogue
        self._switchboard, self._readiness, self._limit_s = switchboard, readiness, limit_s
        self._in_flight = InFlight()

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Raises ApiError until the first token has come."""
        arrived_at = time.monotonic()
        await self._heard()
        customer = self._keys.allow(request.headers.get("Authorization"), Role.CUSTOMER).customer
        if not self._in_flight.enter(customer.customer, customer.max_in_flight):
            raise ApiError("too_many_in_flight", f"{customer.max_in_flight} requests of this customer are open already")
        try:
            chat = parse_chat(await read_body(request))
            ask = await self._ask(request[REQUEST_ID], customer.customer, chat, arrived_at)
            with self._switchboard.open(ask) as line:
                answer = Answer(self._switchboard, self._model, request, chat, line)
                return await (answer.stream() if chat.stream else answer.whole())
        finally:
            self._in_flight.leave(customer.customer)

    async def _heard(self) -> None:
        """A pause of this process looks like the broker's silence until its readers have run: no reason to refuse.

        Raises ApiError.
        """
        end = time.monotonic() + HEARD_WITHIN_S
        while self._readiness.deaf and time.monotonic() < end:  # noqa: ASYNC110 - a clock's tick tells, not an event
            await asyncio.sleep(0.02)
        self._readiness.check()

    async def _ask(self, request_id: str, customer: str, chat: ChatRequest, arrived_at: float) -> Ask:
        target = self._catalogue.resolve(customer, chat.model)
        prompt = await self._prompt(chat)
        left = self._model.context - len(prompt)
        if left < 1:
            raise ApiError(
                "context_length_exceeded",
                f"messages: the prompt is {self._model.context} tokens or more, and the context of this model "
                f"{self._model.context}, output included: shorten it",
                "messages",
            )
        if chat.limit is not None and chat.limit > left:
            raise ApiError(
                "context_length_exceeded",
                f"{chat.limit_name} is {chat.limit}: the context of this model is {self._model.context} tokens, and "
                f"the prompt has {len(prompt)}: give at most {left}",
                chat.limit_name,
            )
        return Ask(
            request_id=request_id,
            customer=customer,
            model=chat.model,
            adapter=target.adapter,
            content_id=target.content_id,
            prompt=prompt,
            max_tokens=chat.limit if chat.limit is not None else min(DEFAULT_MAX_TOKENS, left),
            sampling=Sampling(
                seed=secrets.randbits(63) if chat.seed is None else chat.seed & ((1 << 63) - 1),
                temperature=1.0 if chat.temperature is None else chat.temperature,
                top_p=1.0 if chat.top_p is None else chat.top_p,
            ),
            stop_ids=self._model.stop_ids,
            arrived_at=arrived_at,
            deadline_at=arrived_at + self._limit_s,
        )

    async def _prompt(self, chat: ChatRequest) -> list[int]:
        if sum(len(message.text) + MARKS for message in chat.messages) <= LONG_TEXT:
            return self._encode(chat)
        return await asyncio.to_thread(self._encode, chat)

    def _encode(self, chat: ChatRequest) -> list[int]:
        return self._model.vocabulary.encode_within(self._model.template.render(chat.messages), self._model.context)


class Stream(web.StreamResponse):
    """Its headers wait for the first frames, which follow at once: a packet for both, not one for each."""

    _send_headers_immediately = False


class Answer:
    """One request's answer. Whatever ends it early, the switchboard cancels what still runs."""

    def __init__(
        self, switchboard: Switchboard, model: BaseModel, request: web.Request, chat: ChatRequest, line: Line
    ) -> None:
        self._switchboard, self._request, self._chat, self._line = switchboard, request, chat, line
        self._text = ShownText(model.vocabulary, chat.stops, model.stop_ids)
        self._created = int(time.time())
        self._id = f"chatcmpl-{request[REQUEST_ID]}"

    async def whole(self) -> web.Response:
        """Raises ApiError."""
        text = ""
        while True:
            news = await self._line.news()
            assert news is not None
            text += self._text.push(news.ids)
            if (finish := self._finish(news)) is not None:
                text += self._text.flush()
                break
        message = AnswerMessage("assistant", text)
        answer = ChatAnswer(
            self._id, self._created, self._chat.model, [Choice(0, message, None, finish)], self._usage()
        )
        headers = self._headers() | {"Content-Type": "application/json"}
        return web.Response(body=msgspec.json.encode(answer), headers=headers)

    async def stream(self) -> web.StreamResponse:
        """Raises ApiError as long as no headers have left."""
        frames = sse.Frames(self._id, self._created, self._chat.model, self._chat.include_usage)
        response: web.StreamResponse | None = None
        lead = frames.role
        while True:
            news = await self._line.news(HEADERS_AFTER_S if response is None else KEEP_ALIVE_S)
            finish, out = None, sse.KEEP_ALIVE
            if news is not None:
                out, lead = lead + frames.content(self._text.push(news.ids)), b""
                try:
                    finish = self._finish(news)
                except ApiError as problem:
                    if response is None:
                        raise
                    # What came before it is shown first.
                    out, finish = out + sse.error(problem), "error"
                else:
                    if finish is not None:
                        out += frames.content(self._text.flush()) + frames.last(finish, self._usage())
            if response is None:
                self._bound_socket()
                response = Stream(headers=sse.HEADERS | self._headers())
                self._request[STREAMING] = True
                await response.prepare(self._request)
            if finish == "error":
                response.force_close()
            taken = await self._taken(response.write(out) if finish is None else response.write_eof(out))
            if finish is not None or not taken:
                return response

    def _finish(self, news: News) -> str | None:
        """The finish reason, once there is one. Raises ApiError where the request failed."""
        if self._text.hit:
            self._switchboard.cancel(self._line, Outcome.OK)
            return "stop"
        if news.end is None:
            return None
        if news.end.outcome is not Outcome.OK:
            raise failure(news.end, self._chat.model, self._request[REQUEST_ID])
        return news.end.finish

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
            self._switchboard.cancel(self._line, Outcome.CANCELLED, "the client reads too slowly")
            if self._request.transport is not None:
                self._request.transport.abort()
            return False
        except ConnectionError:
            return False
        return True

    def _headers(self) -> dict[str, str]:
        """The tier is left out while no worker has said it: for an adapter, none would be wrong."""
        flight = self._line.flight
        headers = {"x-request-id": self._request[REQUEST_ID], "x-adapter-id": flight.ask.adapter or "none"}
        if flight.tier is not Tier.NONE or not flight.ask.adapter:
            headers["x-adapter-tier"] = flight.tier
        return headers

    def _usage(self) -> Usage:
        prompt, output = len(self._line.flight.ask.prompt), self._line.flight.output.position
        return Usage(prompt, output, prompt + output)


def failure(end: End, model: str, request_id: str) -> ApiError:
    """What a client is told of a request that ended like this: the reason in this table's words.

    The end's own detail names replicas, files and machines: it goes into our log and into the request's row alone.
    """
    if end.finish == "retired":
        return not_found(model)
    log.warning("request %s ended: %s: %s", request_id, end.finish, end.detail)
    message, param = TOLD.get(end.finish, ("the request failed", None))
    return ApiError(end.finish, f"{message} (request {request_id})", param)

"""GET /v1/chat/ws: many chats over one websocket. Messages are JSON text; nothing else is taken.

From the client: {"type": "chat", "id": ..., "request": {...}}, whose request is a chat's body, and {"type": "cancel",
"id": ...}. `id` is the client's own name for the chat, free again after its last word. To the client, each with its
`id`: {"type": "chunk", "chunk": {...}}, as a stream's; before the first of them {"type": "started"} with request id,
adapter and tier; at last {"type": "done"}, {"type": "cancelled"} or {"type": "error", "error": {...}}. What a chat may
be is as over HTTP, and so are its limits; `stream` changes nothing here.

The key comes as Authorization, or from browsers, which cannot set headers, as the subprotocol `key.KEY` beside
SUBPROTOCOL. It is looked at again for each chat. Close codes: 1003 a message that is no JSON text of these, 1008 a
client that does not read, 1009 a message too large, 1001 this gateway shuts down. A socket's end cancels its chats.
"""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from gateway import slow_reader
from gateway.auth import Keys
from gateway.chat import CHAT, Chat
from gateway.errors import ApiError
from gateway.limits import MAX_BODY_BYTES
from gateway.readiness import Readiness
from schemas.reasons import Role

if TYPE_CHECKING:
    from gateway.traces import Traces

SUBPROTOCOL = "lorafleet.chat"
KEY_PREFIX = "key."
MOST_CHATS = 64  # open on one socket
MAX_ID = 64  # characters
HEARTBEAT_S = 20.0
CLOSE_LIMIT_S = 1.0


class ChatMessage(msgspec.Struct, frozen=True, tag="chat", forbid_unknown_fields=True):
    id: str
    request: msgspec.Raw


class CancelMessage(msgspec.Struct, frozen=True, tag="cancel", forbid_unknown_fields=True):
    id: str


_DECODER = msgspec.json.Decoder(ChatMessage | CancelMessage)


class Started(msgspec.Struct, frozen=True, tag="started"):
    """`tier` is null while no worker has said it."""

    id: str
    request_id: str
    adapter: str
    tier: str | None


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    id: str
    chunk: msgspec.Raw


class Done(msgspec.Struct, frozen=True, tag="done"):
    id: str


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    id: str


class Failed(msgspec.Struct, frozen=True, tag="error"):
    id: str
    error: msgspec.Raw


class TooSlow(Exception):
    """The client does not read."""


class ChatSockets:
    """All open ones. `traces`: where chats are traced, if they are."""

    def __init__(self, chat: Chat, keys: Keys, readiness: Readiness, traces: "Traces | None" = None) -> None:
        self._chat, self._keys, self._readiness, self._traces = chat, keys, readiness, traces
        self._open: set[ChatSocket] = set()

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Raises ApiError before the upgrade: 401, 403, 503, and 400 for what is no websocket."""
        authorization = request.headers.get("Authorization") or _offered_key(request)
        self._readiness.check()
        self._keys.allow(authorization, Role.CUSTOMER)
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S,
            max_msg_size=MAX_BODY_BYTES,
            protocols=(SUBPROTOCOL,),
            compress=False,
            writer_limit=slow_reader.SEND_BUFFER_BYTES,
        )
        if not socket.can_prepare(request).ok:
            raise ApiError("invalid_request", "this address speaks websocket: send Upgrade: websocket", "Upgrade")
        await socket.prepare(request)
        slow_reader.bound(request)
        served = ChatSocket(self._chat, socket, authorization, self._traced(request))
        self._open.add(served)
        try:
            await served.serve()
        finally:
            self._open.discard(served)
            if request.transport is not None and not socket.closed:
                request.transport.abort()
        return socket

    def _traced(self, request: web.Request) -> Callable[[], AbstractContextManager[object]]:
        """What each chat of this socket is done in: a span that continues the trace of the socket's opening."""
        if self._traces is None:
            return nullcontext
        about = {"http.route": request.path, "network.protocol.name": "websocket", "gen_ai.operation.name": "chat"}
        return partial(self._traces.request, f"chat {request.path}", list(request.headers.items()), about)

    async def close(self) -> None:
        """Says to all of them that this gateway is going."""
        await asyncio.gather(*(served.close() for served in list(self._open)))


class ChatSocket:
    """`traced` is what each chat is done in."""

    def __init__(
        self,
        chat: Chat,
        socket: web.WebSocketResponse,
        authorization: str | None,
        traced: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._chat, self._socket, self._authorization, self._traced = chat, socket, authorization, traced
        self._chats: dict[str, asyncio.Task[None]] = {}
        self._unwanted: set[str] = set()

    async def serve(self) -> None:
        """Until the client has gone, or reads or says what it should not."""
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._read(tasks)
                finally:
                    for task in self._chats.values():
                        task.cancel()
        except* TooSlow:
            await self._end(WSCloseCode.POLICY_VIOLATION, b"the client reads too slowly")
        except* ConnectionError:
            pass

    async def close(self) -> None:
        await self._end(WSCloseCode.GOING_AWAY, b"this gateway is shutting down")

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                await self._end(WSCloseCode.UNSUPPORTED_DATA, b"send JSON as text")
                return
            try:
                told = _DECODER.decode(message.data)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                await self._end(WSCloseCode.UNSUPPORTED_DATA, f"not a message: {error}".encode()[:120])
                return
            if isinstance(told, CancelMessage):
                # In the loop's next turn: a task that is cancelled before it has begun runs none of its code, and its
                # chat would have no last word.
                asyncio.get_running_loop().call_soon(self._cancel, told.id)
            elif problem := self._refused(told):
                await self._say(Failed(told.id[:MAX_ID], _error(problem)))
            else:
                self._chats[told.id] = tasks.create_task(self._served(told), name="chat")

    def _cancel(self, name: str) -> None:
        if (task := self._chats.get(name)) is not None:
            self._unwanted.add(name)
            task.cancel()

    def _refused(self, told: ChatMessage) -> ApiError | None:
        if not 0 < len(told.id) <= MAX_ID:
            return ApiError("invalid_request", f"id: give 1 to {MAX_ID} characters", "id")
        if told.id in self._chats:
            return ApiError("invalid_request", "id: a chat of this name is open on this socket: give another", "id")
        if len(self._chats) >= MOST_CHATS:
            return ApiError("too_many_in_flight", f"{MOST_CHATS} chats are open on this socket already")
        return None

    async def _served(self, told: ChatMessage) -> None:
        """One chat, from its request to its last word. Its name is free once the client has read that."""
        last: Done | Cancelled | Failed = Done(told.id)
        try:
            with self._traced():
                await self._answered(told)
        except ApiError as problem:
            last = Failed(told.id, _error(problem))
        except asyncio.CancelledError:
            if told.id not in self._unwanted:
                raise
            last = Cancelled(told.id)
        finally:
            del self._chats[told.id]
            self._unwanted.discard(told.id)
        await self._say(last)

    async def _answered(self, told: ChatMessage) -> None:
        async def body() -> bytes:
            return bytes(told.request)

        started = False
        async with (
            self._chat.answer(self._authorization, uuid.uuid4().hex, CHAT, body) as answer,
            aclosing(answer.told()) as parts,
        ):
            async for part in parts:
                if part.chunks and not started:
                    started = True
                    await self._say(Started(told.id, answer.request_id, answer.adapter, answer.tier))
                for chunk in part.chunks:
                    await self._say(Chunk(told.id, msgspec.Raw(chunk)))

    async def _say(self, message: Started | Chunk | Done | Cancelled | Failed) -> None:
        """Raises TooSlow, ConnectionError."""
        try:
            async with asyncio.timeout(slow_reader.WRITE_LIMIT_S):
                await self._socket.send_frame(msgspec.json.encode(message), WSMsgType.TEXT)
        except TimeoutError:
            raise TooSlow from None

    async def _end(self, code: int, why: bytes) -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._socket.close(code=code, message=why)
        except TimeoutError:
            return


def _offered_key(request: web.Request) -> str | None:
    """The key among the subprotocols, as an Authorization header would have it. Raises ApiError.

    Without SUBPROTOCOL beside it aiohttp would log what was offered, the key with it.
    """
    offered = [one.strip() for one in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if one.strip()]
    if offered and SUBPROTOCOL not in offered:
        raise ApiError("invalid_request", f"Sec-WebSocket-Protocol: {SUBPROTOCOL} must be among them", None)
    key = next((one.removeprefix(KEY_PREFIX) for one in offered if one.startswith(KEY_PREFIX)), None)
    return None if key is None else f"Bearer {key}"


def _error(problem: ApiError) -> msgspec.Raw:
    error: Any = msgspec.json.decode(problem.body())["error"]
    return msgspec.Raw(msgspec.json.encode(error))

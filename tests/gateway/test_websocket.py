"""Chats over one websocket, spoken to by a client that is not ours."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from tests.gateway.rig import ACME, GLOBEX, OPERATOR, Door, Rig, until

pytestmark = pytest.mark.real
KEYED = (Subprotocol("lorafleet.chat"), Subprotocol(f"key.{ACME}"))


@asynccontextmanager
async def opened(door: Door, key: str = ACME) -> AsyncIterator[ClientConnection]:
    url = door.url.replace("http", "ws") + "/v1/chat/ws"
    async with connect(url, additional_headers={"Authorization": f"Bearer {key}"}, max_size=None) as client:
        yield client


def chat(fleet: Rig, name: str, text: str, count: int, **more: Any) -> str:
    request = {"model": fleet.model.name, "messages": [{"role": "user", "content": text}], "max_tokens": count} | more
    return json.dumps({"type": "chat", "id": name, "request": request})


async def told(client: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(await asyncio.wait_for(client.recv(), 20))
    return message


async def lasts(client: ClientConnection, count: int) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The texts of the chats that end, and the last words, once there are `count` of these."""
    texts: dict[str, str] = {}
    ends: dict[str, dict[str, Any]] = {}
    while len(ends) < count:
        message = await told(client)
        name = message["id"]
        if message["type"] == "chunk":
            assert message["chunk"]["object"] == "chat.completion.chunk"
            for choice in message["chunk"]["choices"]:
                texts[name] = texts.get(name, "") + (choice["delta"].get("content") or "")
        elif message["type"] == "started":
            assert (message["adapter"], message["tier"]) == ("none", "none")
            assert name not in texts
            texts[name] = ""
        else:
            ends[name] = message
    return texts, ends


async def test_many_chats_at_once(door: Door, fleet: Rig) -> None:
    async with opened(door) as client:
        for number in range(8):
            await client.send(chat(fleet, f"c{number}", f"question {number}", 40))
        texts, ends = await lasts(client, 8)
        assert {end["type"] for end in ends.values()} == {"done"}
        assert texts == {f"c{number}": fleet.answer(f"question {number}", 40) for number in range(8)}
        await client.send(chat(fleet, "c0", "again", 5))  # a name is free after its last word
        texts, _ = await lasts(client, 1)
        assert texts["c0"] == fleet.answer("again", 5)


async def test_a_browser_s_key_is_a_subprotocol(door: Door, fleet: Rig) -> None:
    url = door.url.replace("http", "ws") + "/v1/chat/ws"
    async with connect(url, subprotocols=KEYED) as client:
        assert client.subprotocol == "lorafleet.chat"
        await client.send(chat(fleet, "c", "browser", 5))
        texts, _ = await lasts(client, 1)
    assert texts["c"] == fleet.answer("browser", 5)


@pytest.mark.parametrize("key", ["lf-nobody", OPERATOR])
async def test_no_customer_no_socket(door: Door, key: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with opened(door, key):
            pass
    assert refused.value.response.status_code in (401, 403)
    assert json.loads(refused.value.response.body)["error"]["message"]


async def test_a_key_that_is_offered_alone_is_refused_before_anybody_logs_it(door: Door, fleet: Rig) -> None:
    url = door.url.replace("http", "ws") + "/v1/chat/ws"
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, subprotocols=KEYED[1:]):
            pass
    assert refused.value.response.status_code == 400
    assert ACME not in (fleet.folder / "gateway-0" / "log").read_text()


async def test_a_chat_that_is_cancelled_leaves_the_batch_and_the_others_alone(door: Door, fleet: Rig) -> None:
    async with opened(door) as client:
        await client.send(chat(fleet, "long", "long", 4000))
        await client.send(chat(fleet, "short", "short", 60))
        while (await told(client))["type"] != "chunk":
            pass
        await client.send(json.dumps({"type": "cancel", "id": "long"}))
        await client.send(json.dumps({"type": "cancel", "id": "nobody"}))
        _, ends = await lasts(client, 2)
        assert (ends["long"]["type"], ends["short"]["type"]) == ("cancelled", "done")
        await until(lambda: door.rows() == 0, 10, "no rows")


async def test_a_cancel_right_behind_its_chat_has_a_last_word(door: Door, fleet: Rig) -> None:
    async with opened(door) as client:
        for _ in range(20):
            # In one piece, so that both are read before the chat has begun.
            await asyncio.gather(
                client.send(chat(fleet, "hasty", "hasty", 4000)),
                client.send(json.dumps({"type": "cancel", "id": "hasty"})),
            )
            _, ends = await lasts(client, 1)
            assert ends["hasty"]["type"] == "cancelled"  # and its name is free again
    await until(lambda: door.rows() == 0, 10, "no rows")


async def test_errors_are_of_one_chat_alone(door: Door, fleet: Rig) -> None:
    async with opened(door) as client:
        await client.send(chat(fleet, "model", "x", 5, model="nobody/nothing"))
        await client.send(chat(fleet, "field", "x", 5, top_p=7))
        await client.send(json.dumps({"type": "chat", "id": "empty", "request": 3}))
        await client.send(chat(fleet, "n" * 65, "x", 5))
        await client.send(chat(fleet, "good", "x", 5))
        await client.send(chat(fleet, "good", "x", 5))
        seen = [await told(client) for _ in range(5)]
    errors = {message["id"]: message["error"] for message in seen if message["type"] == "error"}
    assert errors["model"]["code"] == "model_not_found"
    assert errors["field"]["param"] == "top_p"
    assert errors["empty"]["type"] == "invalid_request_error"
    assert errors["n" * 64]["param"] == "id"
    assert errors["good"]["message"].startswith("id: a chat of this name is open")


async def test_limits_are_those_of_the_customer(door: Door, fleet: Rig) -> None:
    async with opened(door, GLOBEX) as client:  # two at once
        for name in ("a", "b", "c"):
            await client.send(chat(fleet, name, name, 200))
        _, ends = await lasts(client, 3)
    assert sorted(end["type"] for end in ends.values()) == ["done", "done", "error"]


@pytest.mark.parametrize("message", ["no json", "{}", '{"type":"chat","id":1}', '{"type":"chat"}', "[" * 5000, b"\x00"])
async def test_what_is_no_message_closes_the_socket(door: Door, message: str | bytes) -> None:
    async with opened(door) as client:
        await client.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(client.recv(), 10)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1003


async def test_a_message_too_large_closes_the_socket(door: Door) -> None:
    async with opened(door) as client:
        with contextlib.suppress(ConnectionClosed):
            await client.send("x" * (5 << 20))
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(client.recv(), 10)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


async def test_a_socket_that_ends_takes_its_chats_along(door: Door, fleet: Rig) -> None:
    async with opened(door) as client:
        for number in range(4):
            await client.send(chat(fleet, f"c{number}", f"gone {number}", 4000))
        while (await told(client))["type"] != "chunk":
            pass
        client.transport.abort()
    await until(lambda: door.rows() == 0, 10, "no rows")


async def test_a_client_that_does_not_read_is_cut_off(door: Door, fleet: Rig) -> None:
    cancelled = 'lorafleet_gateway_requests_total{outcome="cancelled"}'
    before, count = door.metric(cancelled), 4
    with socket.create_connection(("127.0.0.1", int(door.url.rpartition(":")[2]))) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = door.url.replace("http", "ws") + "/v1/chat/ws"
        async with connect(url, sock=raw, subprotocols=KEYED, max_queue=1) as client:
            client.transport.pause_reading()
            for number in range(count):
                await client.send(chat(fleet, f"c{number}", f"slow {number}", 3000, logprobs=True, top_logprobs=20))
            await until(lambda: door.metric(cancelled) - before == count, 60, "all cancelled")
            client.transport.abort()

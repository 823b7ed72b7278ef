"""Chats through real processes: gateway, broker, worker with the simulated engine; and the official client."""

import asyncio
import io
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from gateway.limits import MAX_BODY_BYTES
from tests.gateway.rig import ACME, GLOBEX, OPERATOR, PIPELINE, Door, Rig, body

pytestmark = pytest.mark.real


def messages(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


async def post(door: Door, body: bytes, key: str = ACME) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and JSON of a chat as any client may send it."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{door.url}/v1/chat/completions", data=io.BytesIO(body), headers=headers) as answer,
    ):
        return answer.status, answer.headers, await answer.json()


async def test_whole(door: Door, fleet: Rig) -> None:
    async with door.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=fleet.model.name, messages=messages("hello"), max_tokens=20
        )
    answer = raw.parse()
    assert answer.choices[0].message.content == fleet.answer("hello", 20)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(fleet.prompt("hello")), 20)
    assert raw.headers["x-adapter-id"] == "none"
    assert raw.headers["x-adapter-tier"] == "none"
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"


async def test_streams_at_once(door: Door, fleet: Rig) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> None:
        raw = await client.chat.completions.with_raw_response.create(
            model=fleet.model.name, messages=messages(text), max_tokens=60, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["x-adapter-tier"] == "none"
        chunks = [chunk async for chunk in raw.parse()]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == fleet.answer(text, 60)
        assert len({(c.id, c.created) for c in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(fleet.prompt(text)), 60)

    async with door.client() as client, asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(one(client, f"question {number}"))


async def test_what_is_known_at_once_is_sent_at_once(door: Door, fleet: Rig) -> None:
    chat = body(fleet.model.name, "one token", 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(door.url.rpartition(":")[2]))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ACME}\r\n"
    for _ in range(5):
        writer.write(f"{head}Content-Length: {len(chat)}\r\n\r\n".encode() + chat)
        answer = await reader.read(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")  # headers, frames and end: one packet
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_it(door: Door, fleet: Rig, stream: bool) -> None:
    whole = fleet.answer("stop here", 200)
    stop = whole[40:44]
    async with door.client() as client:
        if stream:
            chunks = await client.chat.completions.create(
                model=fleet.model.name, messages=messages("stop here"), max_tokens=4000, stop=stop, stream=True
            )
            choices = [chunk.choices[0] async for chunk in chunks]
            text, finish = "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason
        else:
            answer = await client.chat.completions.create(
                model=fleet.model.name, messages=messages("stop here"), max_tokens=4000, stop=[stop]
            )
            text, finish = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (text, finish) == (whole[: whole.index(stop)], "stop")


async def test_max_tokens_absent_is_256(door: Door, fleet: Rig) -> None:
    async with door.client() as client:
        answer = await client.chat.completions.create(model=fleet.model.name, messages=messages("long"))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 256


async def test_no_valid_key(door: Door, fleet: Rig) -> None:
    async with door.client("lf-nobody") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model=fleet.model.name, messages=messages("x"))
    assert refused.value.code == "invalid_api_key"
    status, _, told = await post(door, b"{}", key="")
    assert (status, told["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("key", [OPERATOR, PIPELINE])
async def test_only_a_customers_key_chats(door: Door, fleet: Rig, key: str) -> None:
    async with door.client(key) as client:
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(model=fleet.model.name, messages=messages("x"))


async def test_unknown_and_foreign_models_look_the_same(door: Door) -> None:
    answers = set()
    async with door.client() as client:
        for name in ("acme/never@1", "globex/sales@1", "globex/sales:prod", "gpt-4o"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.chat.completions.create(model=name, messages=messages("x"))
            answers.add(json.dumps(refused.value.body).replace(name, ""))
            assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert len(answers) == 1


async def test_what_does_not_fit_the_context(door: Door, fleet: Rig) -> None:
    context, prompt = fleet.model.context, len(fleet.prompt("x"))
    async with door.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=fleet.model.name, messages=messages("word " * context))
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=fleet.model.name, messages=messages("x"), max_tokens=context - prompt + 1
            )
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
        assert str(context - prompt) in refused.value.message


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b'{"messages":[]}', 400, "messages"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[]}', 400, "tools"),
        (b" " * (MAX_BODY_BYTES + 1), 413, None),
    ],
)
async def test_bad_bodies(door: Door, body: bytes, status: int, param: str | None) -> None:
    found, headers, told = await post(door, body)
    assert (found, told["error"]["param"]) == (status, param)
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert headers["x-request-id"]


async def test_too_many_in_flight(door: Door, fleet: Rig) -> None:
    async with door.client(GLOBEX) as client:
        streams = [
            await client.chat.completions.create(
                model=fleet.model.name, messages=messages("x"), max_tokens=2000, stream=True
            )
            for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model=fleet.model.name, messages=messages("x"))
        assert refused.value.response.headers["retry-after"] == "1"
        await streams[0].close()
        for _ in range(100):  # its place is free as soon as the gateway has seen it go
            try:
                await client.chat.completions.create(model=fleet.model.name, messages=messages("x"), max_tokens=1)
                break
            except openai.RateLimitError:
                await asyncio.sleep(0.05)
        else:
            pytest.fail("the place was never free again")
        await streams[1].close()


async def test_models(door: Door, fleet: Rig) -> None:
    async with door.client() as client:
        assert [model.id async for model in client.models.list()] == [fleet.model.name]
        assert (await client.models.retrieve(fleet.model.name)).owned_by == "lorafleet"
        with pytest.raises(openai.NotFoundError) as refused:
            await client.models.retrieve("globex/sales@1")
        assert refused.value.code == "model_not_found"


async def test_health_and_unknown_paths(door: Door) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{door.url}/healthz") as answer:
            assert answer.status == 200
        async with session.get(f"{door.url}/readyz") as answer:
            told = await answer.json()
            assert (answer.status, told["ready"], told["live_replicas"]) == (200, True, 1)
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
            async with session.request(method, door.url + path) as answer:
                assert answer.status == status
                assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
        async with session.get(f"{door.url}/internal/replicas") as answer:
            assert answer.status == 404  # not on this port

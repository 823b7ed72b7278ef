"""response_format, by the official client: what comes back fits; what cannot be held is refused, and never sent."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway import formats
from gateway.errors import ApiError
from gateway.formats import Formats
from gateway.response_format import PARAM
from schemas.topics import REQUESTS
from streams.formats.grammars import Grammars
from tests.gateway.rig import Door, Rig
from tests.gateway.test_chat import messages
from tests.gateway.test_websocket import chat, lasts, opened
from tests.stack import Stack

pytestmark = pytest.mark.real
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "kind": {"enum": ["film", "book"]},
    },
    "required": ["title", "year", "kind"],
    "additionalProperties": False,
}


def held(schema: object) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "work", "schema": schema, "strict": True}}


async def submits(fleet: Rig) -> int:
    """How many records `requests` has ever had."""
    async with AIOKafkaConsumer(bootstrap_servers=fleet.settings.bootstrap_servers) as consumer:
        topic = f"{fleet.settings.namespace}{REQUESTS.name}"
        ends = await consumer.end_offsets([TopicPartition(topic, n) for n in range(fleet.settings.replica_places)])
    return sum(ends.values())


class Line(pydantic.BaseModel):
    what: Literal["tea", "coffee"]
    cups: int = pydantic.Field(ge=1, le=9)


class Order(pydantic.BaseModel):
    lines: list[Line] = pydantic.Field(min_length=1, max_length=2)
    paid: bool


async def test_whole_streamed_and_many(door: Door, fleet: Rig) -> None:
    asked: Any = {"model": fleet.model.name, "messages": messages("a film"), "max_tokens": 300, "seed": 3}
    async with door.client() as client:
        whole = await client.chat.completions.create(
            **asked, response_format=held(SCHEMA), n=2, logprobs=True, top_logprobs=1
        )
        for choice in whole.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
            assert choice.logprobs is not None
        chunks = await client.chat.completions.create(**asked, response_format=held(SCHEMA), stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    assert text == whole.choices[0].message.content


async def test_pydantic_types_are_parsed(door: Door, fleet: Rig) -> None:
    async with door.client() as client:
        answer = await client.chat.completions.parse(
            model=fleet.model.name, messages=messages("order"), max_tokens=300, response_format=Order
        )
    assert isinstance(answer.choices[0].message.parsed, Order)


async def test_text_is_anything_and_an_object_begins_one(door: Door, fleet: Rig) -> None:
    asked: Any = {"model": fleet.model.name, "messages": messages("hello"), "max_tokens": 20}
    async with door.client() as client:
        text = await client.chat.completions.create(**asked, response_format={"type": "text"})
        some = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
        cut = await client.chat.completions.create(
            **asked | {"max_tokens": 3}, response_format=held(SCHEMA), stop=["zzzz"]
        )
    assert text.choices[0].message.content == fleet.answer("hello", 20)
    assert (some.choices[0].message.content or "").startswith("{")
    assert cut.choices[0].finish_reason == "length"


async def test_a_stop_string_ends_it_first(door: Door, fleet: Rig) -> None:
    async with door.client() as client:
        answer = await client.chat.completions.create(
            model=fleet.model.name, messages=messages("a film"), max_tokens=300, stop='"year"',
            response_format=held(SCHEMA),
        )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(r'\{\s*"title"\s*:\s*".*"\s*,\s*', answer.choices[0].message.content or "", re.DOTALL)


async def test_over_the_websocket(door: Door, fleet: Rig) -> None:
    async with opened(door) as client:
        await client.send(chat(fleet, "a", "a film", 300, response_format=held(SCHEMA)))
        await client.send(chat(fleet, "b", "a film", 300, response_format=held({"type": "strnig"})))
        texts, ends = await lasts(client, 2)
    jsonschema.validate(json.loads(texts["a"]), SCHEMA)
    assert ends["a"]["type"] == "done"
    assert ends["b"]["error"]["param"] == f"{PARAM}.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "pattern": "("}, "regex|parse"),
        ({"type": "string", "format": "wonder"}, "wonder"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "#"}, "can fit"),
        ({"$ref": "https://example.com/a.json"}, "retriev"),
        ({"type": "integer", "multipleOf": 100_003}, "multipleOf"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
async def test_what_cannot_be_held_is_refused_by_name_and_never_sent(
    door: Door, fleet: Rig, schema: dict[str, Any], word: str
) -> None:
    before = await submits(fleet)
    async with door.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model=fleet.model.name, messages=messages("x"), max_tokens=5, response_format=held(schema)
            )
    assert refused.value.param == f"{PARAM}.json_schema.schema"
    assert re.search(word, refused.value.message)
    assert await submits(fleet) == before


async def test_verdicts_are_kept_and_not_for_ever(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    begin = Grammars.start

    def counted(self: Grammars, schema: str) -> Any:
        tried.append(schema)
        return begin(self, schema)

    monkeypatch.setattr(Grammars, "start", counted)
    monkeypatch.setattr(formats, "MOST_VERDICTS", 2)
    checked, good, bad = Formats(Grammars(model)), '{"type":"string"}', '{"type":"strnig"}'
    await asyncio.gather(*(checked.check(good) for _ in range(5)))
    for _ in range(2):
        with pytest.raises(ApiError, match="strnig"):
            await checked.check(bad)
    await checked.check("")
    assert tried == [good, bad]
    await checked.check("{}")
    await checked.check(good)  # the one that was not asked for longest has gone
    assert tried == [good, bad, "{}", good]
    assert checked._bytes == sum(map(len, checked._verdicts))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_engine_that_is_killed_changes_nothing(rig: Rig, stack: Stack, temperature: float) -> None:
    """The real engine, on two replicas; the one that answers is killed in the middle."""
    door = rig.gateway(stack.ports.allot("formats-public"), stack.ports.allot("formats-internal"))
    workers = [rig.worker(n, WORKER_ENGINE="torch", WORKER_THREADS="1", WORKER_KV_TOKENS="2048") for n in range(2)]
    rig.ready(door.child, *workers)
    await asyncio.to_thread(door.sees, 2)
    schema = {"type": "array", "items": SCHEMA, "minItems": 6, "maxItems": 8}
    asked: Any = {
        "model": rig.model.name, "messages": messages("Some films, as JSON."), "max_tokens": 500, "stream": True,
        "seed": 11, "temperature": temperature, "response_format": held(schema),
    }  # fmt: skip
    async with door.client() as client:
        whole = [chunk async for chunk in await client.chat.completions.create(**asked)]
        expected = "".join(chunk.choices[0].delta.content or "" for chunk in whole)
        jsonschema.validate(json.loads(expected), schema)
        text, killed = "", False
        async for chunk in await client.chat.completions.create(**asked):
            text += chunk.choices[0].delta.content or ""
            if len(text) > 60 and not killed:
                _, told = await asyncio.to_thread(door.told, "/internal/replicas")
                [busy] = [int(r["replica_id"]) for r in told["replicas"] if r.get("running", 0)]
                os.kill(int(re.findall(r"engine torch: process (\d+)", workers[busy].output())[-1]), signal.SIGKILL)
                killed = True
    assert killed
    assert text == expected
    assert door.metric("lorafleet_gateway_redrives_total") == 1

"""Chats through real processes: gateway, broker, worker with the simulated engine; and the official client."""

import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.gateway.rig import Door, Rig

pytestmark = pytest.mark.real


def messages(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


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

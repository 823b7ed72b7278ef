"""Where a prompt is made: what takes long is made beside the event loop, whatever makes it long."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.openai_api import ChatRequest, Message
from gateway.prompts import Prompts


@pytest.mark.parametrize(
    ("messages", "beside"),
    [
        ([Message("user", "hello")], False),
        ([Message("user", "hello " * 1_000)], True),
        ([Message("user", "")] * 1_000, True),
    ],
)
async def test_long_prompts_do_not_hold_up_the_loop(messages: list[Message], beside: bool) -> None:
    threads: list[threading.Thread] = []

    def render(_: object) -> str:
        threads.append(threading.current_thread())
        return ""

    parts: Any = SimpleNamespace(
        context=8, vocabulary=SimpleNamespace(encode_within=lambda *_: [1]), template=SimpleNamespace(render=render)
    )
    assert await Prompts(parts).chat(ChatRequest(model="m", messages=messages)) == [[1]]
    assert (threads[0] is not threading.main_thread()) is beside

"""Frames are what the official client takes."""

import json

import pytest
from openai.types.chat import ChatCompletionChunk

from gateway import sse
from gateway.chunks import ChatChunks
from gateway.errors import ApiError
from gateway.openai_api import PromptDetails, Usage


def chunks(raw: bytes) -> list[str]:
    frames = raw.decode().split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_whole_answer(include_usage: bool) -> None:
    made = ChatChunks("chatcmpl-1", 5, 'acme/"x":prod', include_usage)
    text = 'né "\\\n\u2028🙂\x00'
    usage = Usage(3, 4, 7, PromptDetails(2))
    raw = sse.events([*made.begin(0), made.text(0, text), made.finish(0, "stop"), *made.usage(usage)], last=True)
    *told, done = chunks(raw)
    assert done == "[DONE]"
    parsed = [ChatCompletionChunk.model_validate_json(chunk, strict=True) for chunk in told]
    assert {(c.id, c.created, c.model, c.object) for c in parsed} == {
        ("chatcmpl-1", 5, 'acme/"x":prod', "chat.completion.chunk")
    }
    assert [c.choices[0].delta.content for c in parsed[:2]] == ["", text]
    assert parsed[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in parsed[:3]] == [None, None, "stop"]
    assert len(parsed) == (4 if include_usage else 3)
    assert all(("usage" in json.loads(chunk)) == include_usage for chunk in told)
    if include_usage:
        assert parsed[3].choices == []
        assert parsed[3].usage is not None
        assert parsed[3].usage.total_tokens == 7
        assert parsed[3].usage.prompt_tokens_details is not None
        assert parsed[3].usage.prompt_tokens_details.cached_tokens == 2


def test_an_error_is_one_frame() -> None:
    [told] = chunks(sse.events([ApiError("error", "a\nb").body()]))
    assert json.loads(told)["error"]["message"] == "a\nb"


def test_keep_alive_is_a_comment_alone() -> None:
    assert sse.KEEP_ALIVE.startswith(b":")
    assert sse.KEEP_ALIVE.endswith(b"\n\n")

"""What the chat API refuses, and which parameter it names."""

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.openai_api import ChatRequest, parse_chat, parse_completion
from schemas.requests import Sampling

GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def body(**more: Any) -> bytes:
    return json.dumps(GOOD | more).encode()


def test_everything_that_is_served() -> None:
    request = parse_chat(
        body(
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": ""},
            ],
            max_completion_tokens=5, temperature=2, top_p=0.5, n=1, stop=["a", "b", "c", "d"], seed=-1, stream=True,
            stream_options={"include_usage": True}, user="u", metadata={"a": "b"}, presence_penalty=-2,
            frequency_penalty=2, repetition_penalty=1.1, top_k=40, min_p=0.05, logit_bias={"7": -100, "8": 2.5},
            logprobs=True, top_logprobs=20,
        )
    )  # fmt: skip
    assert [message.text for message in request.messages] == ["be brief", "ab", ""]
    assert (request.limit, request.stops, request.include_usage) == (5, ["a", "b", "c", "d"], True)
    assert request.sampling() == [
        Sampling((1 << 63) - 1, 2, 0.5, 40, 0.05, 1.1, -2, 2, {7: -100, 8: 2.5}, top_logprobs=20)
    ]


def test_each_choice_has_a_seed_of_its_own() -> None:
    seeds = [sampling.seed for sampling in parse_chat(body(n=3, seed=(1 << 63) - 1)).sampling()]
    assert seeds == [(1 << 63) - 1, 0, 1]
    assert len({sampling.seed for sampling in parse_chat(body(n=16)).sampling()}) == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_of_a_completion(prompt: Any, prompts: list[Any]) -> None:
    request = parse_completion(json.dumps({"model": "m", "prompt": prompt, "logprobs": 5}).encode())
    assert request.prompts == prompts
    assert (request.default_max_tokens, request.top_logprobs_asked) == (16, 5)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["a"] * 6, "n": 3}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
        ({"n": 0}, "n"),
    ],
)
def test_a_completion_refused_by_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_completion(json.dumps({"model": "m", "prompt": "a"} | more).encode())
    assert (refused.value.status, refused.value.param) == (400, param)


def test_null_is_as_good_as_absent() -> None:
    names = {*ChatRequest.__struct_fields__} - {"model", "messages"}
    assert parse_chat(body(**dict.fromkeys(names))) == parse_chat(body())


def schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema} | more}


def nested(levels: int) -> dict[str, Any]:
    return {} if levels == 0 else {"items": nested(levels - 1)}


REFUSED = [
    ({"tools": []}, "tools"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1 << 31}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": schema({}, name="a b")}, "response_format.json_schema.name"),
    ({"response_format": schema(True)}, "response_format.json_schema.schema"),
    ({"response_format": schema({}, strict=1)}, "response_format.json_schema.strict"),
    ({"response_format": schema({"maxLenght": 3})}, "response_format.json_schema.schema"),
    ({"response_format": schema({"enum": ["x" * 33_000]})}, "response_format.json_schema.schema"),
    ({"response_format": schema(nested(70))}, "response_format.json_schema.schema"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": ["a", "x" * 257]}, "stop"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"user": 1}, "user"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "b"}]}, "messages[0].name"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=[str(more)[:60] for more, _ in REFUSED])
def test_refused_by_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(body(**more))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message


HALF_A_CHARACTER = body().replace(b"hi", b"\\ud800")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", body()[:-1], HALF_A_CHARACTER])
def test_no_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(raw)
    assert refused.value.status == 400


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(b'{"messages":[{"role":"user","content":"x"}]}')
    assert refused.value.param == "model"


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(body(**{"x" * 5000: 1}))
    assert len(refused.value.body()) < 500


def test_a_long_name_is_cut_before_it_is_looked_at() -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(body(messages=[{"role": "user", "content": "x", "n" * 3_000_000: 1}]))
    assert "is not served here" in refused.value.message
    assert len(refused.value.message) < 200


def test_the_longest_stop_string_is_taken() -> None:
    assert parse_chat(body(stop="x" * 256)).stops == ["x" * 256]

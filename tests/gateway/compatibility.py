"""The compatibility table: each field that the openai client knows, whether it is served, and the test that shows it.

`python -m tests.gateway.compatibility` prints it. What is in a refused field is refused with it, and named no further.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion, Model
from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chats
from pydantic import BaseModel

from gateway.generation import Generation
from tests.gateway.openai_fields import Asked, answered, asked

SHOWN_BY = "tests/gateway/test_compatibility.py"
DRAWN = {
    "model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed", "stop",
    "stream", "stream_options", "stream_options.include_usage", "temperature", "top_p", "user",
}  # fmt: skip
ROLES = ("system", "user", "assistant")
FORMAT = "response_format[json_schema].json_schema"
IGNORED = {"metadata", *(f"{FORMAT}.{name}" for name in ("name", "description", "strict"))}
SCHEMA: Mapping[str, Any] = {"name": "x", "schema": {}}


@dataclass(frozen=True)
class Endpoint:
    """`least` is a body that is served; `samples` are values where the type alone does not tell a good one, `beside`
    what else must then be said (None: left out)."""

    name: str
    path: str
    params: Any
    least: Mapping[str, Any]
    served: Collection[str]
    refused: Collection[str]
    samples: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def fields(self) -> list[Asked]:
        ours = [Asked(name, name, 1, lambda value, name=name: {name: value}) for name in Generation.extensions]  # type: ignore[misc]
        return [*asked(self.params), *ours]

    def refused_with(self, path: str) -> str | None:
        """The outermost refused field around it, or itself."""
        return next((one for one in self.refused if path == one or path.startswith((f"{one}.", f"{one}["))), None)


CHATS = Endpoint(
    "chat",
    "/v1/chat/completions",
    chats.CompletionCreateParamsStreaming,
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    served={
        *DRAWN, *Generation.extensions, "max_completion_tokens", "top_logprobs", "metadata", "messages",
        *(f"messages[{role}]" for role in ROLES),
        *(f"messages[{role}].content{inner}" for role in ROLES for inner in ("", "[text]", "[text].text")),
        "response_format", "response_format[text]", "response_format[json_object]", "response_format[json_schema]",
        FORMAT, *(f"{FORMAT}.{name}" for name in ("name", "description", "schema", "strict")),
    },
    refused={
        "audio", "function_call", "functions", "modalities", "moderation", "parallel_tool_calls", "prediction",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
        "service_tier", "store", "tool_choice", "tools", "verbosity", "web_search_options",
        "stream_options.include_obfuscation", "messages[developer]", "messages[tool]", "messages[function]",
        *(f"messages[{role}].{name}" for role in ROLES for name in ("name", "content[text].prompt_cache_breakpoint")),
        *(f"messages[user].content[{kind}]" for kind in ("image_url", "input_audio", "file")),
        *(f"messages[assistant].{name}" for name in ("audio", "function_call", "refusal", "tool_calls")),
        "messages[assistant].content[refusal]",
    },
    samples={
        "messages": [{"role": "user", "content": "hi"}],
        "logit_bias": {"7": 1},
        "response_format": {"type": "text"},
        # Optional for OpenAI, and here not: what an assistant has said, and the schema.
        "messages[assistant]": {"role": "assistant", "content": "x"},
        "response_format[json_schema]": {"type": "json_schema", "json_schema": SCHEMA},
        FORMAT: SCHEMA,
        "stream_options": {"include_usage": True},
    },
    beside={
        "max_completion_tokens": {"max_tokens": None},
        "top_logprobs": {"logprobs": True},
        "stream_options": {"stream": True},
        "stream_options.include_usage": {"stream": True},
        **{
            f"{FORMAT}.{name}": {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, name: value}}}
            for name, value in (("name", "y"), ("description", "of what"), ("strict", True))
        },
    },
)  # fmt: skip
COMPLETIONS = Endpoint(
    "completion",
    "/v1/completions",
    completions.CompletionCreateParamsStreaming,
    {"prompt": "hi", "max_tokens": 2},
    served={*DRAWN, *Generation.extensions, "prompt"},
    refused={"best_of", "echo", "suffix", "stream_options.include_obfuscation"},
    samples={"logit_bias": {"7": 1}, "stream_options": {"include_usage": True}},
    beside={"stream_options": {"stream": True}, "stream_options.include_usage": {"stream": True}},
)

USAGE = (
    "usage", "usage.completion_tokens", "usage.prompt_tokens", "usage.total_tokens", "usage.prompt_tokens_details",
    "usage.prompt_tokens_details.cached_tokens",
)  # fmt: skip
NO_USAGE = (
    "usage.completion_tokens_details",
    *(f"usage.prompt_tokens_details.{kind}_tokens" for kind in ("audio", "cache_write", "image", "text")),
)
HEAD = (
    "id",
    "choices[]",
    "choices[].finish_reason",
    "choices[].index",
    "choices[].logprobs",
    "created",
    "model",
    "object",
)
SCORES = "choices[].logprobs.content[]"
CHAT_SCORES = (
    SCORES, f"{SCORES}.token", f"{SCORES}.bytes[]", f"{SCORES}.logprob", f"{SCORES}.top_logprobs[]",
    *(f"{SCORES}.top_logprobs[].{name}" for name in ("token", "bytes[]", "logprob")),
    "choices[].logprobs.refusal[]",  # always null
)  # fmt: skip
NO_SCORES = [f"choices[].logprobs.refusal[].{name}" for name in ("token", "bytes[]", "logprob", "top_logprobs[]")]


@dataclass(frozen=True)
class Answered:
    """`ours`: what the client's types do not have."""

    name: str
    model: type[BaseModel]
    given: Collection[str]
    absent: Collection[str]
    ours: Collection[str] = ()

    def absent_with(self, path: str) -> str | None:
        return next((one for one in self.absent if path == one or path.startswith((f"{one}.", f"{one}[]"))), None)


ANSWERS = (
    Answered(
        "ChatCompletion",
        ChatCompletion,
        {*HEAD, *CHAT_SCORES, *USAGE, *(f"choices[].message{name}" for name in ("", ".content", ".refusal", ".role"))},
        {
            *NO_USAGE, *NO_SCORES, "metadata", "moderation", "service_tier", "system_fingerprint",
            *(f"choices[].message.{name}" for name in ("annotations[]", "audio", "function_call", "tool_calls[]")),
        },
    ),
    Answered(
        "ChatCompletionChunk",
        ChatCompletionChunk,
        {*HEAD, *CHAT_SCORES, *USAGE, "choices[].delta", "choices[].delta.content", "choices[].delta.role"},
        {
            *NO_USAGE, *NO_SCORES, "moderation", "obfuscation", "service_tier", "system_fingerprint",
            *(f"choices[].delta.{name}" for name in ("audio", "function_call", "refusal", "tool_calls[]")),
        },
    ),
    Answered(
        "Completion",
        Completion,
        {
            *HEAD, *USAGE, "choices[].text",
            *(f"choices[].logprobs.{name}[]" for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")),
        },
        {*NO_USAGE, "system_fingerprint"},
    ),
    Answered("Model", Model, {"id", "created", "object", "owned_by"}, {"shutdown_date"}, ours={"root", "parent"}),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    of: str
    path: str
    verdict: str
    test: str


def rows() -> Iterator[Row]:
    for endpoint in (CHATS, COMPLETIONS):
        for one in endpoint.fields():
            refused = endpoint.refused_with(one.path)
            verdict = "served" if one.path in endpoint.served else "refused"
            ignored = ", and changes nothing" if one.path in IGNORED else ""
            inside = f", with {refused}" if refused not in (None, one.path) else ""
            yield Row(
                endpoint.path,
                one.path,
                verdict + ignored + inside,
                f"test_a_request_s_field[{endpoint.name}-{one.path}]",
            )
    for answer in ANSWERS:
        for path in (*answered(answer.model), *answer.ours):
            verdict = "absent" if answer.absent_with(path) else "given"
            beyond = ", ours" if path in answer.ours else ""
            yield Row(answer.name, path, verdict + beyond, f"test_an_answer_s_fields[{answer.name}]")


def table() -> str:
    lines = ["| of | field | | shown by |", "|---|---|---|---|"]
    lines += [f"| {row.of} | `{row.path}` | {row.verdict} | `{SHOWN_BY}::{row.test}` |" for row in rows()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

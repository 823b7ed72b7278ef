"""The public API as OpenAPI 3.1, made out of the types that read and write it. Pure.

What a type cannot say (ranges, lengths) comes out of the same tables that check it. Answers are described by hand,
since they are encoded piece by piece; tests hold them against real ones.
"""

from typing import Any

import msgspec

from gateway.errors import REASONS
from gateway.generation import MAX_BIASES, MAX_STOP_CHARACTERS, MAX_STOPS, Generation
from gateway.openai_api import ChatRequest, CompletionRequest, Model, ModelList, Usage

Json = dict[str, Any]
REF = "#/components/schemas/{name}"
NULL: Json = {"type": "null"}
TEXT: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
HEADERS = {
    "x-request-id": "This request's name, in every log line and row about it.",
    "x-adapter-id": "The adapter that answers, with its version; `none` for the base model.",
    "x-adapter-tier": "Where the adapter was when the request came: gpu, ram, disk, remote; none for the base model.",
    "x-ratelimit-limit-requests": "Requests a minute, where the customer has a limit.",
    "x-ratelimit-limit-tokens": "Tokens a minute, where the customer has a limit.",
    "x-ratelimit-remaining-requests": "What is left of it.",
    "x-ratelimit-remaining-tokens": "What is left of it.",
    "x-ratelimit-reset-requests": "When it is whole again, as `1.500s`.",
    "x-ratelimit-reset-tokens": "When it is whole again, as `1.500s`.",
}
GENERATING = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
LISTING = (401, 403, 503)


def document() -> bytes:
    """The document, as JSON."""
    schemas = {**_requests(), **_answers()}
    paths = {
        "/v1/chat/completions": {"post": _generating("chat", "Answer a chat", "ChatRequest", "ChatChunk")},
        "/v1/completions": {"post": _generating("text", "Go on with a text", "CompletionRequest", "TextChunk")},
        "/v1/models": {"get": _listing("list_models", "The models this key may use", "ModelList", LISTING)},
        "/v1/models/{model}": {
            "parameters": [_in_path("model", "An alias, an adapter or the base model; `/` may stay as it is.")],
            "get": _listing("get_model", "One of them", "Model", (*LISTING, 404)),
        },
        "/healthz": {"get": _plain("healthz", "Whether this gateway runs", {"200": "It does."})},
        "/readyz": {"get": _plain("readyz", "Whether it takes chats", {"200": "It does.", "503": "It does not: why."})},
    }
    told = {
        "openapi": "3.1.0",
        "info": {
            "title": "lorafleet",
            "version": "1",
            "description": "OpenAI's chat, completions and models for your own adapters. Many chats over one websocket:"
            " `/v1/chat/ws`. What a request says and is not named here is refused, never ignored.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in {*GENERATING, *LISTING}},
            "headers": {name: {"description": about, "schema": TEXT} for name, about in HEADERS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Your API key."}},
        },
    }
    return msgspec.json.encode(told)


def _requests() -> dict[str, Json]:
    _, found = msgspec.json.schema_components(
        [ChatRequest, CompletionRequest, Model, ModelList, Usage], ref_template=REF
    )
    for kind in (ChatRequest, CompletionRequest):
        fields = found[kind.__name__]["properties"]
        for name, (least, most) in kind.ranges.items():
            _narrow(fields[name], "number", "integer", minimum=least, maximum=most)
        _narrow(fields["top_p"], "number", exclusiveMinimum=0, maximum=1)
        _narrow(fields["max_tokens"], "integer", minimum=1)
        for one in fields["stop"]["anyOf"]:
            _stop(one)
        biases = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}, "maxProperties": MAX_BIASES}
        bias = {"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
        _narrow(fields["logit_bias"], "object", **biases, **bias)
        found[kind.__name__]["description"] = (
            f"`{'`, `'.join(Generation.extensions)}` are extensions. `user` is taken and ignored."
        )
    _narrow(found["ChatRequest"]["properties"]["max_completion_tokens"], "integer", minimum=1)
    return found


def _narrow(field: Json, *types: str, **by: Any) -> None:
    for one in field["anyOf"]:
        if one.get("type") in types:
            one.update(by)


def _stop(one: Json) -> None:
    length = {"minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
    if one["type"] == "string":
        one.update(length)
    elif one["type"] == "array":
        one.update(maxItems=MAX_STOPS, items=TEXT | length)


def _answers() -> dict[str, Json]:
    scores = {"anyOf": [{"type": "object"}, NULL], "description": "Of each token, where they were asked for."}
    ends: Json = {"enum": ["stop", "length"]}
    message = _object(role={"const": "assistant"}, content=TEXT, refusal=NULL)
    delta: Json = {"type": "object", "properties": {"role": {"const": "assistant"}, "content": TEXT}}
    maybe = {"anyOf": [ends, NULL]}
    usage = {"$ref": REF.format(name="Usage")}
    error = _object(message=TEXT, type=TEXT, param={"anyOf": [TEXT, NULL]}, code={"anyOf": [TEXT, NULL]})
    return {
        "ChatAnswer": _answer("chat.completion", usage, message=message, logprobs=scores, finish_reason=ends),
        "TextAnswer": _answer("text_completion", usage, text=TEXT, logprobs=scores, finish_reason=ends),
        "ChatChunk": _answer("chat.completion.chunk", None, delta=delta, logprobs=scores, finish_reason=maybe),
        "TextChunk": _answer("text_completion", None, text=TEXT, logprobs=scores, finish_reason=maybe),
        "Error": _object(error=error),
    }


def _answer(kind: str, usage: Json | None, **choice: Json) -> Json:
    """`usage` None: it comes in one chunk, and only where it was asked for."""
    choices = {"type": "array", "items": _object(index=INTEGER, **choice)}
    told = _object(id=TEXT, object={"const": kind}, created=INTEGER, model=TEXT, choices=choices)
    if usage is not None:
        told["properties"]["usage"] = usage
        told["required"].append("usage")
    else:
        told["properties"]["usage"] = {"anyOf": [{"$ref": REF.format(name="Usage")}, NULL]}
    return told


def _object(**fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _generating(kind: str, summary: str, request: str, chunk: str) -> Json:
    answer = {"$ref": REF.format(name=request.replace("Request", "Answer").replace("Completion", "Text"))}
    events = (
        f"With `stream: true`: a `data:` line for each {chunk}, then `data: [DONE]`. An error after the first of them"
        ' comes as `data: {"error": ...}` and ends the stream. Comments (`: keep-alive`) mean nothing.'
    )
    return {
        "operationId": f"create_{kind}_completion",
        "tags": ["generation"],
        "summary": summary,
        "requestBody": {"required": True, "content": _json({"$ref": REF.format(name=request)})},
        "responses": {
            "200": {
                "description": f"The answer, whole or in pieces. {events}",
                "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS},
                "content": _json(answer) | {"text/event-stream": {}},  # OpenAPI 3.1 has no words for events
            }
        }
        | _errors(GENERATING),
    }


def _listing(name: str, summary: str, answer: str, errors: tuple[int, ...]) -> Json:
    told = {"description": "What there is.", "content": _json({"$ref": REF.format(name=answer)})}
    return {"operationId": name, "tags": ["models"], "summary": summary, "responses": {"200": told} | _errors(errors)}


def _plain(name: str, summary: str, answers: dict[str, str]) -> Json:
    told = {status: {"description": about, "content": _json({"type": "object"})} for status, about in answers.items()}
    return {"operationId": name, "tags": ["health"], "summary": summary, "security": [], "responses": told}


def _in_path(name: str, about: str) -> Json:
    return {"name": name, "in": "path", "required": True, "description": about, "schema": TEXT | {"minLength": 1}}


def _errors(statuses: tuple[int, ...]) -> Json:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _error(status: int) -> Json:
    """All of a status' codes, and whether it helps to come again."""
    shapes = [shape for shape in REASONS.values() if shape.status == status]
    codes = ", ".join(f"`{code}`" for code in dict.fromkeys(shape.code or shape.type for shape in shapes))
    told: Json = {"description": codes, "content": _json({"$ref": REF.format(name="Error")})}
    if any(shape.retry_after_s is not None for shape in shapes):
        told["headers"] = {"Retry-After": {"description": "Seconds; absent: do not.", "schema": INTEGER}}
    return told


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}

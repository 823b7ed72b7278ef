"""The API's description: valid, whole, and true of what the gateway really answers."""

import copy
import json
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import validate
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from gateway.app import public_app
from gateway.openapi import document
from tests.gateway.rig import ACME, Door, Rig

AUTH = {"Authorization": f"Bearer {ACME}"}
DOCUMENT: dict[str, Any] = json.loads(document())
ELSEWHERE = ("/chat", "/docs", "/openapi.json", "/v1/chat/ws")  # pages; a websocket is none of OpenAPI's business
# Two fields that exclude each other are refused, and a schema does not say so.
BEYOND_SCHEMAS = [positive_data_acceptance]


def test_it_is_valid() -> None:
    validate(DOCUMENT)


def test_it_has_every_route() -> None:
    class Anything:
        def __getattr__(self, _: str) -> Any:
            async def handle(request: Any) -> Any:
                return request

            return handle

    any_: Any = Anything()
    app = public_app(any_, any_, any_, any_, any_, any_, any_)
    served = {
        (resource.canonical.replace("{model:.+}", "{model}"), route.method.lower())
        for resource in app.router.resources()
        for route in resource
        if route.method != "HEAD" and resource.canonical != "/" and not resource.canonical.startswith(ELSEWHERE)
    }
    described = {
        (path, method) for path, item in DOCUMENT["paths"].items() for method in item if method != "parameters"
    }
    assert served == described


def strict(name: str) -> dict[str, Any]:
    """A component, with nothing allowed that it does not name."""
    components = copy.deepcopy(DOCUMENT["components"])

    def close(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "object" and "properties" in node:
                node["additionalProperties"] = False
            for part in node.values():
                close(part)
        elif isinstance(node, list):
            for part in node:
                close(part)

    close(components["schemas"])
    return {"$ref": f"#/components/schemas/{name}", "components": components}


def as_described(name: str, answer: str) -> None:
    jsonschema_rs.validator_for(strict(name)).validate(json.loads(answer))


@pytest.mark.real
async def test_answers_are_as_described(door: Door, fleet: Rig) -> None:
    chat = {"model": fleet.model.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2}
    text = {"model": fleet.model.name, "prompt": "Hi", "max_tokens": 3}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=door.url, headers=AUTH) as client:
        for name, path, asked in (
            ("ChatAnswer", "/v1/chat/completions", chat),
            ("ChatAnswer", "/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
            ("TextAnswer", "/v1/completions", text),
            ("TextAnswer", "/v1/completions", text | {"logprobs": 2}),
            ("Error", "/v1/completions", text | {"n": 0}),
        ):
            as_described(name, (await client.post(path, json=asked)).text)
        for name, path in (
            ("ModelList", "/v1/models"),
            ("Model", f"/v1/models/{fleet.model.name}"),
            ("Error", "/v1/models/nothing"),
        ):
            as_described(name, (await client.get(path)).text)
        refused = await client.put("/v1/chat/completions", json=chat)
        as_described("Error", refused.text)
        assert (refused.status_code, refused.headers["Allow"]) == (405, "POST")
        for name, path, asked in (
            ("ChatChunk", "/v1/chat/completions", chat),
            ("ChatChunk", "/v1/chat/completions", chat | {"logprobs": True}),
            ("TextChunk", "/v1/completions", text),
        ):
            events = (await client.post(path, json=asked | streamed)).text.split("\n\n")
            chunks = [event.removeprefix("data: ") for event in events if event.startswith("data: {")]
            assert len(chunks) >= 3
            for chunk in chunks:
                as_described(name, chunk)


@pytest.mark.real
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", DOCUMENT["paths"])
def test_whatever_is_asked_is_answered_as_described(door: Door, fleet: Rig, path: str, mode: GenerationMode) -> None:
    """Schemathesis asks what the description allows, and what it does not."""
    narrowed = copy.deepcopy(DOCUMENT)
    del narrowed["security"]  # the key is given with each
    # A real model, and few tokens of it; what breaks the rules must be refused, so there its context is the limit.
    most = 3 if mode is GenerationMode.POSITIVE else fleet.model.context - 1
    for name in ("ChatRequest", "CompletionRequest"):
        request = narrowed["components"]["schemas"][name]
        del request["properties"]["model"], request["properties"]["max_tokens"]
        request["properties"].pop("max_completion_tokens", None)
        request["properties"]["model"] = {"const": fleet.model.name}
        request["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": most}
        request["required"].append("max_tokens")
    schema = schemathesis.openapi.from_dict(narrowed)
    schema.config.update(base_url=door.url)
    found: Any
    for found in schema.get_all_operations():
        operation: Any = found.ok()
        if operation.path != path or (mode is GenerationMode.NEGATIVE and not operation.body):
            continue  # nothing can be wrong with it

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.call_and_validate(headers=AUTH, excluded_checks=BEYOND_SCHEMAS, timeout=20)

        ask()

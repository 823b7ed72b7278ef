"""The compatibility table against the openai client's types and against the real gateway."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.gateway.compatibility import ANSWERS, CHATS, COMPLETIONS, Answered, Endpoint, rows
from tests.gateway.openai_fields import Asked, answered
from tests.gateway.rig import ACME, Door, Rig

FIELDS = [(endpoint, one) for endpoint in (CHATS, COMPLETIONS) for one in endpoint.fields()]
SCORED = {"logprobs": True, "top_logprobs": 2}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def said(door: Door, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(door.url + path, data, {"Authorization": f"Bearer {ACME}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("endpoint", [CHATS, COMPLETIONS], ids=lambda endpoint: endpoint.name)
def test_the_table_has_each_field_of_a_request_once(endpoint: Endpoint) -> None:
    known = {one.path for one in endpoint.fields()}
    assert endpoint.served | endpoint.refused <= known, "fields that the client does not have any more"  # type: ignore[operator]
    unclear = [path for path in known if (path in endpoint.served) is (endpoint.refused_with(path) is not None)]
    assert unclear == [], "neither served nor refused, or both: say which in tests/gateway/compatibility.py"


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_the_table_has_each_field_of_an_answer_once(answer: Answered) -> None:
    known = set(answered(answer.model))
    assert {*answer.given, *answer.absent} <= known, "fields that the client does not have any more"
    unclear = [path for path in known if (path in answer.given) is (answer.absent_with(path) is not None)]
    assert unclear == [], "neither given nor absent, or both: say which in tests/gateway/compatibility.py"


def test_each_row_names_its_test() -> None:
    told = list(rows())
    assert {row.verdict.partition(",")[0] for row in told} == {"served", "refused", "given", "absent"}
    assert all(row.test.partition("[")[0] in globals() for row in told)


@pytest.mark.real
@pytest.mark.parametrize(("endpoint", "one"), FIELDS, ids=[f"{endpoint.name}-{one.path}" for endpoint, one in FIELDS])
def test_a_request_s_field(door: Door, fleet: Rig, endpoint: Endpoint, one: Asked) -> None:
    sample = fleet.model.name if one.path == "model" else endpoint.samples.get(one.path, one.sample)
    body = {"model": fleet.model.name, **endpoint.least, **one.put(sample), **endpoint.beside.get(one.path, {})}
    status, text = said(door, endpoint.path, {name: value for name, value in body.items() if value is not None})
    if one.path in endpoint.served:
        assert status == 200, text
        return
    around = endpoint.refused_with(one.path)
    assert around is not None
    # Of several refused fields in one body any may be the one that is named.
    named = {other.param for other in endpoint.fields() if endpoint.refused_with(other.path) == around}
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error"), text
    assert error["param"] in named, text
    assert error["param"] in error["message"]


@pytest.mark.real
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_an_answer_s_fields(door: Door, fleet: Rig, answer: Answered) -> None:
    model = {"model": fleet.model.name}
    chat, completion = {**model, **CHATS.least, **SCORED}, {**model, **COMPLETIONS.least, "logprobs": 2}
    asked: dict[str, list[tuple[str, dict[str, Any] | None]]] = {
        "ChatCompletion": [(CHATS.path, chat)],
        "ChatCompletionChunk": [(CHATS.path, chat | STREAMED)],
        "Completion": [(COMPLETIONS.path, completion), (COMPLETIONS.path, completion | STREAMED)],
        "Model": [(f"/v1/models/{fleet.model.name}", None)],
    }
    known = set(answered(answer.model))
    for path, body in asked[answer.name]:
        status, text = said(door, path, body)
        assert status == 200, text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        seen = set().union(*(paths(json.loads(one), "", known) for one in lines or [text]))
        assert seen == {*answer.given, *answer.ours}


def paths(value: Any, path: str, known: set[str]) -> set[str]:
    """The paths that an answer has; what is in a field of which the client knows nothing inside is not looked at."""
    found: set[str] = set()
    for name, inner in value.items():
        here = f"{path}{name}"
        many = isinstance(inner, list) or f"{here}[]" in known
        here = f"{here}[]" if many else here
        found.add(here)
        for one in inner if isinstance(inner, list) else [inner]:
            if isinstance(one, dict) and any(other.startswith(f"{here}.") for other in known):
                found |= paths(one, f"{here}.", known)
    return found


def test_the_walk_knows_lists_kinds_and_what_is_in_them() -> None:
    known = {one.path: one for one in CHATS.fields()}
    tool = known["messages[tool].tool_call_id"]
    assert tool.put("t") == {"messages": [{"role": "tool", "content": "x", "tool_call_id": "t"}]}
    assert (tool.param, known["messages[tool]"].param) == ("messages[0].tool_call_id", "messages[0].role")
    schema = known["response_format[json_schema].json_schema.strict"]
    assert schema.put(True) == {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True}}
    }

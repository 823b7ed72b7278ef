"""Traces over both processes: who is whose parent, what is in them, and that nobody waits for a collector."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from schemas.requests import Submit
from schemas.topics import REQUESTS, TOKENS
from streams.bus.reader import Reader, Record
from streams.tracing.settings import endpoint
from tests.gateway.rig import ACME, Door, Rig, body, text_of, until
from tests.otlp import Collector, Seen, serving
from tests.stack import Stack

pytestmark = pytest.mark.real

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, PRODUCER, CONSUMER = 2, 4, 5
QUESTION = "the launch code is rosebud"


def traced(url: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}


@pytest.fixture(scope="module")
def port(stack: Stack) -> int:
    return stack.ports.allot("otlp")


@pytest.fixture(scope="module")
def traced_door(kafka: str, model: Path, tmp_path_factory: pytest.TempPathFactory, stack: Stack, port: int) -> Any:
    rig = Rig(kafka, "traces.", model, tmp_path_factory.mktemp("traces"))
    rig.prepare()
    env = traced(f"http://user:hunter2@127.0.0.1:{port}")
    door = rig.gateway(stack.ports.allot("traces"), stack.ports.allot("traces-internal"), env=env)
    rig.ready(door.child, rig.worker(0, "workers", WORKER_STEP_MS="5", **env))
    door.sees(1)
    yield rig, door
    rig.stop()


@pytest.fixture
async def collector(port: int) -> AsyncIterator[Collector]:
    collector = Collector()
    async with collector.at(port):
        yield collector


async def post(door: Door, data: bytes, headers: Mapping[str, str], path: str = "/v1/chat/completions") -> int:
    said = {"Authorization": f"Bearer {ACME}", "Content-Type": "application/json", **headers}
    async with aiohttp.ClientSession() as session, session.post(door.url + path, data=data, headers=said) as answer:
        await answer.read()
        return answer.status


async def whole(collector: Collector, trace: str, attempts: int = 1) -> None:
    def there() -> bool:
        ended = [len(collector.named(name, trace)) for name in ("attempt", "generate")]
        return ended == [attempts] * 2 and any(span.kind == SERVER and span.trace == trace for span in collector.spans)

    await until(there, 20, "every span")


async def test_one_trace_over_both_processes(traced_door: tuple[Rig, Door], collector: Collector) -> None:
    rig, door = traced_door
    caller = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=7"}
    assert await post(door, body(rig.model.name, QUESTION, 12), caller) == 200
    await whole(collector, TRACE)
    await until(lambda: len(collector.named("decode", TRACE)) == 1, 20, "the last stage")
    [request] = collector.named("POST /v1/chat/completions")
    [attempt], [generate] = collector.named("attempt"), collector.named("generate")
    stages = [collector.named(name)[0] for name in ("queue", "prefill", "decode")]
    assert {span.trace for span in collector.spans} == {TRACE}
    assert (request.parent, attempt.parent, generate.parent) == (CALLER, request.span, attempt.span)
    assert (request.kind, attempt.kind, generate.kind) == (SERVER, PRODUCER, CONSUMER)
    assert {stage.parent for stage in stages} == {generate.span}
    assert {span.service for span in (request, attempt)} == {"lorafleet-gateway"}
    assert {span.service for span in (generate, *stages)} == {"lorafleet-worker"}
    assert attempt.links == [(TRACE, generate.span)], "the worker's word came back with its tokens"
    assert attempt.events == ["admitted", "first token"]
    assert request.start <= attempt.start <= generate.end <= attempt.end <= request.end
    assert generate.start <= stages[0].start <= stages[0].end == stages[1].start <= stages[1].end == stages[2].start
    assert stages[2].end == generate.end
    prompt = len(rig.prompt(QUESTION))
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.request.model"] == rig.model.name
    assert request.attributes["gen_ai.request.max_tokens"] == 12
    assert request.attributes["gen_ai.usage.input_tokens"] == prompt
    assert request.attributes["gen_ai.usage.output_tokens"] == 12
    assert request.attributes["gen_ai.server.time_to_first_token"] > 0
    for span in (request, attempt, generate):
        assert span.attributes["lorafleet.customer.id"] == "acme"
        assert span.attributes["lorafleet.adapter.id"] == span.attributes["lorafleet.content.id"] == ""
        assert (span.attributes["lorafleet.replica"], span.attributes["lorafleet.tier"]) == (0, "none")
        assert not span.error


async def test_nothing_of_what_was_said_nor_any_key(traced_door: tuple[Rig, Door], collector: Collector) -> None:
    rig, door = traced_door
    headers = {"traceparent": f"00-{'a' * 32}-{CALLER}-01"}
    assert await post(door, body(rig.model.name, QUESTION, 8), headers, "/v1/chat/completions?api_key=rosebud2") == 200
    await whole(collector, "a" * 32)
    exported = b"".join(collector.raw)
    words = ("rosebud", ACME, rig.answer(QUESTION, 8), "api_key")
    assert [word for word in words if word.encode() in exported] == []
    logs = [(rig.folder / part / "log").read_text() for part in ("gateway-0", "worker-0")]
    assert ["hunter2" in log for log in logs] == [False, False]
    assert ["//***@127.0.0.1" in log for log in logs] == [True, True]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": "00-4bf92f35-77b34da6-01"},
        {"traceparent": f"ff-{TRACE}-{CALLER}-01"},
        {"traceparent": f"00-{'0' * 32}-{CALLER}-01"},
        {"traceparent": f"00-{TRACE.upper()}-{CALLER}-01"},
        {"traceparent": f"00-{TRACE}-{CALLER}-01-more"},
        {"traceparent": "x" * 5000},
    ],
)
async def test_a_malformed_parent_begins_a_new_trace(
    traced_door: tuple[Rig, Door], collector: Collector, headers: dict[str, str]
) -> None:
    rig, door = traced_door
    assert await post(door, body(rig.model.name, "hello", 3), headers) == 200
    await until(lambda: any(span.kind == SERVER for span in collector.spans), 20, "the request's span")
    [request] = collector.named("POST /v1/chat/completions")
    await whole(collector, request.trace)
    assert request.parent == ""
    assert request.trace != TRACE


async def test_two_parents_are_none(traced_door: tuple[Rig, Door], collector: Collector) -> None:
    rig, door = traced_door
    data, parent = body(rig.model.name, "hello", 3), f"traceparent: 00-{TRACE}-{CALLER}-01\r\n"
    reader, writer = await asyncio.open_connection(*door.url.removeprefix("http://").split(":"))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ACME}\r\n{parent * 2}"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    assert b"200 OK" in await asyncio.wait_for(reader.read(), 30)
    writer.close()
    await until(lambda: any(span.kind == SERVER for span in collector.spans), 20, "the request's span")
    assert [span.parent for span in collector.named("POST /v1/chat/completions")] == [""]


async def test_what_its_caller_does_not_sample_is_not_exported(
    traced_door: tuple[Rig, Door], collector: Collector
) -> None:
    rig, door = traced_door
    assert await post(door, body(rig.model.name, "hidden", 3), {"traceparent": f"00-{TRACE}-{CALLER}-00"}) == 200
    assert await post(door, body(rig.model.name, "seen", 3), {"traceparent": f"00-{'b' * 32}-{CALLER}-01"}) == 200
    await whole(collector, "b" * 32)
    assert {span.trace for span in collector.spans} == {"b" * 32}


async def test_refusals_and_several_choices(traced_door: tuple[Rig, Door], collector: Collector) -> None:
    rig, door = traced_door
    parent = {"traceparent": f"00-{'c' * 32}-{CALLER}-01"}
    assert await post(door, b'{"model": "nobody/s:prod", "messages": []}', parent) in (400, 404)
    await until(lambda: len(collector.spans) == 1, 20, "its span")
    assert collector.spans[0].attributes["error.type"] == str(
        collector.spans[0].attributes["http.response.status_code"]
    )
    two = b'{"model": "%s", "prompt": "x", "max_tokens": 3, "n": 2}' % rig.model.name.encode()
    assert await post(door, two, {"traceparent": f"00-{'d' * 32}-{CALLER}-01"}, "/v1/completions") == 200
    await whole(collector, "d" * 32, attempts=2)
    [request] = collector.named("POST /v1/completions")
    assert {span.parent for span in collector.named("attempt", "d" * 32)} == {request.span}
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["gen_ai.operation.name"] == "text_completion"


async def test_each_chat_of_a_websocket_continues_the_socket_s_trace(
    traced_door: tuple[Rig, Door], collector: Collector
) -> None:
    rig, door = traced_door
    headers = {"Authorization": f"Bearer {ACME}", "traceparent": f"00-{'e' * 32}-{CALLER}-01"}
    async with aiohttp.ClientSession() as session, session.ws_connect(door.url + "/v1/chat/ws", headers=headers) as ws:
        for name in ("one", "two"):
            chat = body(rig.model.name, name, 3).decode()
            await ws.send_str(f'{{"type": "chat", "id": "{name}", "request": {chat}}}')
            while (await ws.receive_json())["type"] != "done":
                pass
    await whole(collector, "e" * 32, attempts=2)
    chats = collector.named("chat /v1/chat/ws")
    assert [chat.parent for chat in chats] == [CALLER] * 2
    assert [attempt.parent for attempt in collector.named("attempt")] == [chat.span for chat in chats]


async def test_a_redrive_is_a_second_attempt_of_the_same_request(
    rig: Rig, stack: Stack, collector: Collector, port: int
) -> None:
    env = traced(f"http://127.0.0.1:{port}")
    door = rig.gateway(stack.ports.allot("trace-redrive"), stack.ports.allot("trace-redrive-internal"), env=env)
    workers = [rig.worker(place, "workers", WORKER_STEP_MS="20", **env) for place in range(2)]
    await asyncio.to_thread(rig.ready, door.child, *workers)
    await asyncio.to_thread(door.sees, 2)
    chat = asyncio.create_task(text_of(door, rig.model.name, "go on", 300))

    def place() -> int | None:
        _, told = door.told("/internal/replicas")
        return next((int(replica["replica_id"]) for replica in told["replicas"] if replica.get("running")), None)

    await until(lambda: place() is not None, 20, "it runs")
    first = await asyncio.to_thread(place)
    assert first is not None
    workers[first].kill()
    assert await chat == rig.answer("go on", 300)

    def ended() -> list[Seen]:
        return collector.named("POST /v1/chat/completions")

    await until(lambda: bool(ended()) and len(collector.named("generate")) == 1, 20, "both processes' spans")
    [request] = ended()
    lost, good = collector.named("attempt")
    [generate] = collector.named("generate")
    assert (lost.parent, good.parent, generate.parent) == (request.span, request.span, good.span)
    assert (lost.error, lost.attributes["error.type"], good.error, request.error) == (True, "lost", False, False)
    assert [span.attributes["lorafleet.replica"] for span in (lost, good, generate)] == [first, 1 - first, 1 - first]
    assert lost.end <= good.start
    assert good.attributes["lorafleet.first_position"] > 0
    assert request.attributes["lorafleet.attempts"] == 2


async def test_off_by_default_no_header_travels(door: Door, fleet: Rig) -> None:
    partitions = {REQUESTS: dict.fromkeys(range(4), "end"), TOKENS: dict.fromkeys(range(4), "end")}
    async with Reader(fleet.settings, partitions, "spy") as spy:  # type: ignore[arg-type]
        parent = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        assert await post(door, body(fleet.model.name, "quiet", 3), parent) == 200
        records: list[Record] = []
        while not {REQUESTS, TOKENS} <= {record.topic for record in records}:
            records += await spy.poll()
    assert any(isinstance(record.value, Submit) for record in records)
    assert [record.headers for record in records if record.headers] == []


def test_off_by_default_nothing_is_imported() -> None:
    code = "import sys, gateway.__main__, workers.__main__; print([m for m in sys.modules if 'opentelemetry' in m])"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "[]"
    for off in ({}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}):
        assert endpoint(off | ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"} if off else {})) == ""


@pytest.mark.parametrize("answers", [False, True])
async def test_a_collector_that_is_away_or_hangs_harms_nobody(rig: Rig, stack: Stack, answers: bool) -> None:
    port = stack.ports.allot(f"otlp-bad-{answers}")
    asked, let_go = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await let_go.wait()
        return web.Response()

    env = traced(f"http://127.0.0.1:{port}") | {"OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}
    public, internal = (stack.ports.allot(f"trace-bad-{answers}{which}") for which in ("", "-internal"))
    async with serving(port if answers else stack.ports.allot("otlp-other"), hang):
        door = rig.gateway(public, internal, env=env)
        worker = rig.worker(0, "workers", **env)
        await asyncio.to_thread(rig.ready, door.child, worker)
        await asyncio.to_thread(door.sees, 1)
        for n in range(30):
            assert await text_of(door, rig.model.name, f"{n}", 5) == rig.answer(f"{n}", 5)
        assert asked.is_set() is answers
        for child in (door.child, worker):
            child.terminate()
            await until(lambda child=child: child.returncode() is not None, 20, "its end")  # type: ignore[misc]
            assert child.returncode() == 0
        let_go.set()

"""What breaks under a stream, and that its client gets the very text of an undisturbed run."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from openai.types.chat import ChatCompletionChunk

from infra.local.kafka import Kafka
from infra.local.ports import Ports
from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.reasons import Outcome
from schemas.stats import RequestFinished
from schemas.tokens import LoadReport, TokenBatch, Tokens
from schemas.topics import FINISHED, GATEWAYS, TOKENS
from streams.bus.reader import Reader
from streams.bus.writer import Writer
from tests.gateway.rig import ACME, Door, Rig, body, text_of, until
from tests.stack import Stack, own_namespace, started

pytestmark = pytest.mark.real
QUESTION = "tell me a long story"


@dataclass(frozen=True)
class Steady:
    rig: Rig
    door: Door

    @property
    def redrives(self) -> float:
        return self.door.metric("lorafleet_gateway_redrives_total")


def opened(rig: Rig, stack: Stack, replicas: int, step_ms: int, limit_s: float = 120) -> Door:
    door = rig.gateway(stack.ports.allot("fault-public"), stack.ports.allot("fault-internal"), limit_s=limit_s)
    rig.ready(door.child, *(rig.worker(replica, WORKER_STEP_MS=str(step_ms)) for replica in range(replicas)))
    door.sees(replicas)
    return door


def busy(door: Door) -> list[int]:
    """The replicas that run something."""
    _, told = door.told("/internal/replicas")
    return [int(replica["replica_id"]) for replica in told["replicas"] if replica.get("running")]


@pytest.fixture(scope="module")
def steady(kafka: str, model: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steady]:
    """One gateway and one replica of 10 ms a step, for the tests that leave both alive."""
    with own_namespace(kafka) as namespace:
        rig = Rig(kafka, namespace, model, tmp_path_factory.mktemp("steady"))
        rig.prepare()
        try:
            yield Steady(rig, opened(rig, stack, replicas=1, step_ms=10))
        finally:
            rig.stop()


async def test_a_killed_replica(rig: Rig, stack: Stack) -> None:
    door = opened(rig, stack, replicas=2, step_ms=20)
    workers = rig.children[1:]
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(text_of(door, rig.model.name, QUESTION, 300))
        await until(lambda: len(busy(door)) == 1, 15, "one replica runs it")
        [victim] = busy(door)
        workers[victim].kill()
    assert stream.result() == rig.answer(QUESTION, 300)
    assert door.metric("lorafleet_gateway_redrives_total") >= 1


async def test_repeated_and_reordered_tokens(steady: Steady) -> None:
    rig, door, before = steady.rig, steady.door, steady.redrives
    chance = random.Random(5)
    async with (
        Writer(rig.settings, "noise") as writer,
        Reader(rig.settings, {TOKENS: {0: "end"}}, "noise", fetch_wait_ms=20) as reader,
        asyncio.TaskGroup() as group,
    ):
        stream = group.create_task(text_of(door, rig.model.name, QUESTION, 300))
        batches: list[TokenBatch] = []
        seen: set[bytes] = set()
        while not stream.done():
            for record in await reader.poll():
                if (mark := repr(record.value).encode()) not in seen:
                    seen.add(mark)
                    batches.append(record.value)
            for batch in chance.sample(batches, min(len(batches), 3)):  # old ones again, in any order
                await writer.send(TOKENS, batch, partition=0)
        assert len(batches) > 20
    assert stream.result() == rig.answer(QUESTION, 300)
    assert steady.redrives == before


async def test_tokens_that_never_came(steady: Steady) -> None:
    rig, door, before = steady.rig, steady.door, steady.redrives
    async with (
        Writer(rig.settings, "gap") as writer,
        Reader(rig.settings, {TOKENS: {0: "end"}}, "gap", fetch_wait_ms=20) as reader,
        asyncio.TaskGroup() as group,
    ):
        stream = group.create_task(text_of(door, rig.model.name, QUESTION, 300))
        last: tuple[TokenBatch, Tokens] | None = None
        while last is None or last[1].position < 20:
            for record in await reader.poll():
                for event in record.value.events:
                    if isinstance(event, Tokens):
                        last = record.value, event
        batch, event = last
        ahead = Tokens(event.request_id, event.attempt, event.position + 50, [999])
        far = TokenBatch(
            batch.replica, batch.incarnation, 0, batch.gateway_incarnation, LoadReport(0, 0, 0, 0), [ahead]
        )
        await writer.send(TOKENS, far, partition=0)
    assert stream.result() == rig.answer(QUESTION, 300)
    assert steady.redrives == before + 1


async def test_tokens_that_the_log_has_dropped(steady: Steady) -> None:
    rig, door, before = steady.rig, steady.door, steady.redrives
    await until(lambda: not busy(door), 15, "what ran before is over")
    admin = AIOKafkaAdminClient(bootstrap_servers=rig.settings.bootstrap_servers)
    await admin.start()
    try:
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(text_of(door, rig.model.name, QUESTION, 300))
            await until(lambda: len(busy(door)) == 1, 15, "it runs")
            os.kill(door.child.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(1)  # what comes now lies unread
                partition = TopicPartition(rig.settings.topic_name(TOKENS), 0)
                await admin.delete_records({partition: RecordsToDelete(before_offset=-1)})
            finally:
                os.kill(door.child.pid, signal.SIGCONT)
    finally:
        await admin.close()
    assert stream.result() == rig.answer(QUESTION, 300)
    assert steady.redrives == before + 1
    assert "outside the log" in door.child.output()


async def test_a_killed_broker(model: Path, tmp_path: Path, stack: Stack) -> None:
    ports = Ports(tmp_path / "ports.json")
    service = Kafka(tmp_path / "kafka", ports.allot("kafka"), ports.allot("controller"), log=tmp_path / "kafka.log")
    broker = started(service)
    rig = Rig(service.bootstrap, "", model, tmp_path)
    try:
        await asyncio.to_thread(rig.prepare)
        door = opened(rig, stack, replicas=2, step_ms=20)
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(text_of(door, rig.model.name, f"{QUESTION} {n}", 400)) for n in range(4)]
            await until(lambda: door.metric("lorafleet_gateway_open_requests") == 4, 15, "all are open")
            await asyncio.sleep(1)
            broker.kill()
            broker.stop()
            await until(lambda: door.metric("lorafleet_gateway_ready") == 0, 15, "the gateway notices")
            async with door.client() as client:
                assert [shown.id async for shown in client.models.list()] == [rig.model.name]
                with pytest.raises(openai.InternalServerError) as refused:
                    await client.chat.completions.create(
                        model=rig.model.name, messages=[{"role": "user", "content": "x"}]
                    )
            assert refused.value.status_code == 503
            assert refused.value.code == "broker_unavailable"
            assert refused.value.response.headers["retry-after"]
            broker = started(service)
        for number, stream in enumerate(streams):
            assert stream.result() == rig.answer(f"{QUESTION} {number}", 400)
        assert door.metric("lorafleet_gateway_redrives_total") == 0
        await until(lambda: door.metric("lorafleet_gateway_ready") == 1, 15, "it is ready again")
        rows = await finished_rows(rig, 4)
        assert [row.outcome for row in rows] == [Outcome.OK] * 4
        assert len({row.request_id for row in rows}) == 4
    finally:
        rig.stop()
        broker.stop()


async def finished_rows(rig: Rig, count: int) -> list[RequestFinished]:
    """The rows told so far, at least `count` of them."""
    rows: list[RequestFinished] = []
    async with (
        Reader(rig.settings, {FINISHED: dict.fromkeys(range(8), "start")}, "rows") as reader,
        asyncio.timeout(15),
    ):
        while len(rows) < count:
            rows += [record.value for record in await reader.poll() if isinstance(record.value, RequestFinished)]
        rows += [record.value for record in await reader.poll(0.5) if isinstance(record.value, RequestFinished)]
    return rows


async def test_told_to_end_it_lets_streams_end(rig: Rig, stack: Stack) -> None:
    door = opened(rig, stack, replicas=1, step_ms=20)
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(text_of(door, rig.model.name, QUESTION, 150))
        await until(lambda: door.metric("lorafleet_gateway_open_requests") == 1, 15, "it is open")
        door.child.terminate()
        await until(lambda: door.metric("lorafleet_gateway_ready") == 0, 15, "it takes nothing new")
        async with door.client() as client:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(model=rig.model.name, messages=[{"role": "user", "content": "x"}])
        assert refused.value.code == "shutting_down"
    assert stream.result() == rig.answer(QUESTION, 150)
    await until(lambda: door.child.returncode() is not None, 20, "its end")
    assert door.child.returncode() == 0
    assert [beat.gone for beat in await beats(rig)][-1]
    assert [row.outcome for row in await finished_rows(rig, 1)] == [Outcome.OK]


async def beats(rig: Rig) -> list[GatewayBeat]:
    async with Reader(rig.settings, {GATEWAYS: {0: "start"}}, "beats") as reader:
        return [record.value for record in await reader.poll(2) if isinstance(record.value, GatewayBeat)]


async def test_a_long_silence_before_the_first_token(steady: Steady) -> None:
    rig, door = steady.rig, steady.door
    worker = rig.children[-1]
    os.kill(worker.pid, signal.SIGSTOP)  # it is dead to the gateway, and the only one: the request waits for another
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {ACME}"}) as session,
        session.post(f"{door.url}/v1/chat/completions", data=body(rig.model.name, QUESTION, 20)) as answer,
    ):
        assert answer.status == 200
        assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        os.kill(worker.pid, signal.SIGCONT)
        frames = [frame for frame in (await answer.content.read()).decode().split("\n\n") if frame[:1] == "d"]
    assert frames.pop() == "data: [DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(frame.removeprefix("data: ")) for frame in frames]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == rig.answer(QUESTION, 20)


async def test_no_replica_then_a_newer_claim(rig: Rig, stack: Stack) -> None:
    door = opened(rig, stack, replicas=0, step_ms=0)
    async with door.client() as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=rig.model.name, messages=[{"role": "user", "content": "x"}])
    assert (refused.value.status_code, refused.value.code) == (503, "no_replica")
    assert [row.outcome for row in await finished_rows(rig, 1)] == [Outcome.UNAVAILABLE]
    async with Writer(rig.settings, "other") as writer:
        await writer.send(GATEWAYS, GatewayClaim(0, "other", 0, 0), key="0")
        await until(lambda: door.child.returncode() is not None, 20, "its end")
    assert door.child.returncode() == 4
    assert "replaced" in door.child.output()


async def test_a_request_over_its_time(rig: Rig, stack: Stack) -> None:
    door = opened(rig, stack, replicas=1, step_ms=50, limit_s=2)
    chat = {"model": rig.model.name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5000}
    async with door.client() as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(**chat)  # type: ignore[call-overload]
        assert (refused.value.status_code, refused.value.code) == (504, "deadline_exceeded")
        chunks = await client.chat.completions.create(**chat, stream=True)  # type: ignore[call-overload]
        with pytest.raises(openai.APIError) as broke:
            async for _ in chunks:
                pass
        assert broke.value.code == "deadline_exceeded"
    await until(lambda: door.rows() == 0, 15, "no row is left")

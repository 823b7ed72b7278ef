"""What a dead gateway left is closed, once, wherever the reconciler is killed."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import clickhouse_connect
import msgspec
import pytest

from schemas.gateways import GatewayClaim
from schemas.reasons import FinishReason, Outcome, Tier
from schemas.topics import FINISHED, GATEWAYS
from streams.bus.admin import ensure_topics
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from tests.gateway.rig import ACME, Rig, text_of, until
from tests.stack import Stack, wait_until
from tests.streams.sink.conftest import Processes
from tests.streams.sink.samples import attempt, request

pytestmark = pytest.mark.real
HASTY = "tests.streams.sink.hasty_sink"


def outcomes(url: str) -> dict[str, list[str]]:
    """Request id -> the outcomes of its rows."""
    with clickhouse_connect.get_client(dsn=url) as client:
        rows = client.query("SELECT request_id, groupArray(outcome) FROM requests GROUP BY request_id").result_rows
    return dict(rows)


async def write(writer: Writer, number: int, incarnation: int, *reasons: FinishReason, row: bool = False) -> None:
    """Request `number` of gateway 1, with its attempts on the replicas 0, 1, ..."""
    for index, reason in enumerate(reasons):
        told = msgspec.structs.replace(
            attempt(number), attempt=index, reason=reason, replica=index, gateway_incarnation=incarnation,
            first_position=7 * index, tier=Tier.GPU if index else Tier.DISK, total_ms=500.0,
        )  # fmt: skip
        await writer.send(FINISHED, told, key=told.customer)
    if row:
        ended = msgspec.structs.replace(request(number), gateway_incarnation=incarnation)
        await writer.send(FINISHED, ended, key=ended.customer)


async def test_closed_once_wherever_it_is_killed(
    settings: KafkaSettings, processes: Processes, clickhouse: str
) -> None:
    await ensure_topics(settings)
    async with Writer(settings, "test") as writer:
        old, new = [(await writer.send(GATEWAYS, GatewayClaim(1, nonce, 0, 0), key="1")).offset for nonce in "ab"]
        lost, stop = FinishReason.GATEWAY_LOST, FinishReason.STOP
        await write(writer, 0, old, stop, row=True)
        await write(writer, 1, old, lost)
        await write(writer, 2, old, FinishReason.ERROR, stop)  # its gateway died before it could say so
        await write(writer, 3, new, lost)  # a gateway that was only paused: it goes on, and reports it itself
        for number in range(4, 40):
            await write(writer, number, old, lost)
        for number, when in enumerate(("before", "during", "after"), start=40):
            await write(writer, number, old, lost)  # this life's own: the one before may have closed all the others
            dying = processes.start(HASTY, when)
            await asyncio.to_thread(wait_until, lambda: dying.returncode() is not None, 60, when)  # noqa: B023
            assert dying.returncode() == -signal.SIGKILL, dying.last_words(20)
    expected = {f"r{number}": ["gateway_lost"] for number in (1, 2, *range(4, 43))} | {"r0": ["ok"]}
    living = processes.start(HASTY)
    await asyncio.to_thread(wait_until, lambda: len(outcomes(clickhouse)) >= len(expected), 60, "the rows")
    await asyncio.sleep(3)  # some more rounds
    assert outcomes(clickhouse) == expected
    living.stop()
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        [row] = client.query("SELECT * FROM requests WHERE request_id = 'r2'").named_results()
    assert (row["customer"], row["model"], row["adapter"], row["tier"]) == (
        "c2", "acme/support@7", "acme/support@7", "disk",
    )  # fmt: skip
    assert (row["gateway"], row["gateway_incarnation"], row["replica"], row["attempts"]) == (1, old, 1, 2)
    assert (row["prompt_tokens"], row["output_tokens"], row["ttft_ms"], row["tpot_ms"]) == (3, 14, -1, -1)
    assert row["total_ms"] >= 500


@pytest.fixture
def rig(kafka: str, namespace: str, model: Path, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(kafka, namespace, model, tmp_path)
    rig.prepare()
    yield rig
    rig.stop()


async def test_a_gateway_killed_under_streams(
    rig: Rig, clickhouse: str, stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ports = stack.ports.allot("lost-public"), stack.ports.allot("lost-internal")
    sink = Processes(rig.settings, clickhouse, tmp_path_factory.mktemp("sink"))
    try:
        doors = [rig.gateway(*ports)]
        rig.ready(doors[0].child, rig.worker(WORKER_STEP_MS="20"))
        doors[0].sees(1)
        sink.start(HASTY)
        assert await text_of(doors[0], rig.model.name, "before", 9) == rig.answer("before", 9)
        streams = [asyncio.create_task(text_of(doors[0], rig.model.name, f"{n}", 1000)) for n in range(5)]
        await until(lambda: doors[0].rows() == 5, 20, "all run")
        doors[0].child.kill()
        await asyncio.gather(*streams, return_exceptions=True)
        doors.append(rig.gateway(*ports))  # claims once the silence of the dead one has been heard
        rig.ready(doors[1].child)
        doors[1].sees(1)
        assert await text_of(doors[1], rig.model.name, "after", 9, ACME) == rig.answer("after", 9)
        await asyncio.to_thread(wait_until, lambda: len(outcomes(clickhouse)) >= 7, 60, "a row for each")
        await asyncio.sleep(2)
        assert sorted(outcomes(clickhouse).values()) == [[Outcome.GATEWAY_LOST]] * 5 + [[Outcome.OK]] * 2
        assert doors[1].rows() == 0
    finally:
        sink.stop()

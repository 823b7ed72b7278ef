"""What was produced is in ClickHouse once, raw and rolled up, wherever the sink is killed."""

import asyncio
import random
import signal

import clickhouse_connect
import pytest

from tests.stack import wait_until
from tests.streams.sink.conftest import Arrived, Processes, Producer, arrived, wait_for_arrival

pytestmark = pytest.mark.real


async def test_every_field_arrives(producer: Producer, processes: Processes, clickhouse: str) -> None:
    await producer.produce(20)
    sink = processes.start()
    await asyncio.to_thread(wait_for_arrival, clickhouse, 20)
    assert sink.said_ready()
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        [row] = client.query("SELECT * FROM requests WHERE request_id = 'r4'").named_results()
        assert (row["customer"], row["model"], row["tier"], row["outcome"]) == ("c4", "acme/support:prod", "gpu", "ok")
        assert (row["ttft_ms"], row["tpot_ms"], row["total_ms"], row["replica"]) == (12.5, -1, 99.25, -1)
        assert (row["detail"], row["gateway_incarnation"]) == ('a "quote"\n and ü', 2**40)
        [row] = client.query("SELECT * FROM attempts WHERE request_id = 'r4'").named_results()
        assert (row["tier"], row["reason"], row["load_ms"], row["epoch"]) == ("remote", "stop", -1, 9)
        [row] = client.query("SELECT DISTINCT event, source, bytes FROM cache_events").named_results()
        assert row == {"event": "load", "source": "ram", "bytes": 7}
    assert sink.stop() == 0


async def test_killed_at_every_point(producer: Producer, processes: Processes, clickhouse: str) -> None:
    points = [("sink_progress", "before")]  # then after each step, which is before the next one, and during each
    points += [(table, when) for table in ("sink_progress", "attempts", "requests") for when in ("during", "after")]
    for table, when in points:
        await producer.produce(30)
        dying = processes.start("tests.streams.sink.dying_sink", table, when)
        await asyncio.to_thread(wait_until, lambda: dying.returncode() is not None, 60, f"{table} {when}")  # noqa: B023
        assert dying.returncode() == -signal.SIGKILL, dying.last_words(20)
    processes.start()
    await asyncio.to_thread(wait_for_arrival, clickhouse, producer.produced)
    assert arrived(clickhouse) == Arrived.exactly(producer.produced)


async def test_random_kills_under_a_stream(producer: Producer, processes: Processes, clickhouse: str) -> None:
    async def stream() -> None:
        for _ in range(100):
            await producer.produce(50)
            await asyncio.sleep(0.1)

    chance = random.Random(7)
    streaming = asyncio.create_task(stream())
    while not streaming.done():
        sink = processes.start()
        await asyncio.to_thread(wait_until, lambda: sink.said_ready() or sink.returncode() is not None, 60, "ready")  # noqa: B023
        await asyncio.sleep(chance.uniform(0.1, 2.5))
        sink.kill()
    await streaming
    processes.start()
    await asyncio.to_thread(wait_for_arrival, clickhouse, producer.produced)
    assert producer.produced == 5000
    assert arrived(clickhouse) == Arrived.exactly(5000)

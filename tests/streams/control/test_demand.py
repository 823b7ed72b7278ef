"""How much each adapter is asked for, out of the requests that have ended."""

import asyncio

import msgspec
import pytest

from schemas.placement import AdapterStats
from schemas.reasons import Tier
from schemas.stats import RequestFinished
from schemas.topics import ADAPTER_STATS, FINISHED
from streams.bus.admin import ensure_topics
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader
from streams.bus.writer import Writer
from streams.control.demand import Demand, Window
from tests.streams.sink.samples import attempt, request

SUPPORT, SALES = "acme/support@7", "acme/sales@1"


def test_a_window_counts_by_adapter_and_tells_of_one_that_has_fallen_idle() -> None:
    before, window = Window(0), Window(60_000)
    before.add(msgspec.structs.replace(request(1), adapter=SALES))
    window.add(request(2))
    window.add(msgspec.structs.replace(request(3), tier=Tier.RAM))
    window.add(msgspec.structs.replace(request(4), adapter=""))  # the base model
    assert window.stats(10, before) == [
        AdapterStats(SUPPORT, 60_000, 2, 14 / 10, 0.5),
        AdapterStats(SALES, 60_000, 0, 0.0, 0.0),
    ]
    assert Window(120_000).stats(10, window) == [AdapterStats(SUPPORT, 120_000, 0, 0.0, 0.0)]
    assert Window(180_000).stats(10, Window(120_000)) == []


@pytest.mark.real
async def test_the_table_follows_the_requests(kafka: str, namespace: str) -> None:
    settings = KafkaSettings(kafka, namespace=namespace, replica_places=2, gateway_places=2)
    await ensure_topics(settings)
    told: list[AdapterStats] = []
    also: list[RequestFinished] = []
    idle = asyncio.Event()

    def note(change: Change[AdapterStats]) -> None:
        assert change.value is not None
        told.append(change.value)
        if not change.value.requests:
            idle.set()

    table = Table[AdapterStats](ADAPTER_STATS, note)
    async with Writer(settings, "test") as writer, TableReader(settings, [table], "stats") as reader:
        await reader.caught_up()
        running = asyncio.create_task(Demand(settings, writer, also.append, window_s=1.0).run())
        try:
            async with asyncio.timeout(30):
                while not told:  # it counts from its own start on
                    await writer.send(FINISHED, request(1), key="acme")
                    await writer.send(FINISHED, attempt(1), key="acme")
                    await asyncio.sleep(0.05)
                await idle.wait()
        finally:
            running.cancel()
            await asyncio.wait({running})
    counted = [row for row in told if row.requests]
    assert counted
    assert {row.request_id for row in also} == {"r1"}
    assert all(row.adapter_id == SUPPORT and row.gpu_hit_rate == 1.0 for row in counted)
    assert all(row.tokens_per_s == row.requests * 7 for row in counted)

import asyncio
import time

import pytest

from infra.local.ports import pick
from schemas.customers import Customer
from schemas.placement import OwnerPlan
from schemas.topics import CUSTOMERS, OWNER_PLANS, TOKENS
from streams.bus.admin import ensure_topics
from streams.bus.errors import BusUnavailable
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader
from streams.bus.writer import Writer


def test_only_compacted_topics_are_tables() -> None:
    with pytest.raises(ValueError, match="tokens is not compacted"):
        Table(TOKENS)


@pytest.mark.real
async def test_replays_then_follows(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    changes: list[Change[Customer]] = []
    customers = Table[Customer](CUSTOMERS, changes.append)
    plans = Table[OwnerPlan](OWNER_PLANS)
    async with Writer(settings, "test") as writer:
        for n in range(100):
            await writer.send(OWNER_PLANS, OwnerPlan(f"a{n % 40}", owners=n), key=f"a{n % 40}")
        await writer.send(CUSTOMERS, Customer("x", []), key="x")
        await writer.send(CUSTOMERS, Customer("y", []), key="y")
        await writer.send(CUSTOMERS, None, key="x")
        reader = TableReader(settings, [customers, plans], "test")
        assert str(reader.status) == "loading"
        async with reader:
            await reader.caught_up(20)
            assert str(reader.status) == "caught_up"
            assert {key: plan.owners for key, plan in plans.items()} == {f"a{n % 40}": n for n in range(100)}
            assert (dict(customers.items()), len(customers)) == ({"y": Customer("y", [])}, 1)
            assert [(c.key, c.value is None, c.live) for c in changes] == [
                ("x", False, False),
                ("y", False, False),
                ("x", True, False),
            ]
            changes.clear()
            written = await writer.send(CUSTOMERS, Customer("y", [], weight=2.0), key="y")
            await reader.applied(CUSTOMERS, written.partition, written.offset)
            [change] = changes
            assert (change.live, change.offset, change.previous) == (True, written.offset, Customer("y", []))
            assert reader.positions(CUSTOMERS) == {0: written.offset + 1}
            await writer.send(CUSTOMERS, None, key="y")
            await reader.barrier()
            assert "y" not in customers
            assert customers.get("y") is None


@pytest.mark.real
async def test_an_exception_in_a_callback_is_not_swallowed(settings: KafkaSettings) -> None:
    await ensure_topics(settings)

    def refuse(change: Change[Customer]) -> None:
        raise RuntimeError(change.key)

    async with Writer(settings, "test") as writer:
        await writer.send(CUSTOMERS, Customer("x", []), key="x")
    reader = TableReader(settings, [Table(CUSTOMERS, refuse)], "test")
    await reader.start()
    with pytest.raises(RuntimeError, match="x"):
        await asyncio.wait_for(asyncio.shield(reader.failed), 20)
    with pytest.raises(RuntimeError, match="x"):
        await reader.stop()


async def test_a_broker_that_is_away() -> None:
    began = time.monotonic()
    reader = TableReader(KafkaSettings(f"127.0.0.1:{pick(set())}"), [Table(CUSTOMERS)], "test")
    async with reader:
        with pytest.raises(BusUnavailable, match="not caught up"):
            await reader.caught_up(0.3)
        with pytest.raises(BusUnavailable):
            await reader.barrier(0.3)
        assert str(reader.status) == "loading"
        assert reader.positions(CUSTOMERS) == {}
    assert time.monotonic() - began < 10

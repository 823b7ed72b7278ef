"""The brief's four tables, as analysts read them out of ClickHouse, while the topics behind them change."""

import asyncio
import time
from typing import Any

import clickhouse_connect
import pytest

from schemas.adapters import AdapterRecord, AliasRecord, PendingFlip
from schemas.reasons import AdapterStatus
from schemas.topics import ADAPTERS, ALIASES, FINISHED
from streams.bus.admin import ensure_topics
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from streams.placement.rendezvous import ranked
from tests.stack import wait_until
from tests.streams.control.replicas import Replica
from tests.streams.sink.conftest import Processes
from tests.streams.sink.samples import attempt, request

pytestmark = pytest.mark.real

BASE = "ba5e" * 16
SEVEN, EIGHT, ALIAS = "acme/support@7", "acme/support@8", "acme/support:prod"


def adapter(adapter_id: str, status: AdapterStatus = AdapterStatus.READY) -> AdapterRecord:
    return AdapterRecord(
        adapter_id=adapter_id,
        customer="acme",
        version=int(adapter_id.rpartition("@")[2]),
        base_model_hash=BASE,
        rank=16,
        alpha=32.5,
        target_modules=["q_proj", "v_proj"],
        size_bytes=1 << 33,
        weights_uri="s3://adapters/abc",
        checksum="c0" * 32,
        source_uri="",
        source_checksum="",
        content_id="abc",
        status=status,
        command_partition=0,
        command_offset=1,
        updated_unix_ms=1_796_129_284_372,
    )


def alias(adapter_id: str, pending: str = "") -> AliasRecord:
    flip = PendingFlip(pending, "alias", "c", "acme", 0, 0, 0) if pending else None
    return AliasRecord(ALIAS, "acme", adapter_id, "", 0, 1, 1_796_129_284_372, ["c"], flip)


def rows(url: str, sql: str) -> list[tuple[Any, ...]]:
    with clickhouse_connect.get_client(dsn=url) as client:
        return [tuple(row) for row in client.query(sql).result_rows]


async def until(url: str, sql: str, wanted: list[tuple[Any, ...]]) -> None:
    await asyncio.to_thread(wait_until, lambda: rows(url, sql) == wanted, 30, f"{sql}: {wanted}")


ADAPTER_STATES = "SELECT adapter_id, status FROM adapters ORDER BY adapter_id"
ALIAS_ENDS = "SELECT alias, adapter_id, pending_adapter_id FROM aliases"
PLACES = "SELECT adapter_id, replica_id, role, tier FROM placements ORDER BY adapter_id, replica_id"


async def test_the_tables_follow_the_topics(settings: KafkaSettings, clickhouse: str, processes: Processes) -> None:
    await ensure_topics(settings)
    first, second = ranked(SEVEN, (0, 1))
    async with Writer(settings, "test") as writer, Replica(first, BASE).lives(settings, writer) as replica:
        replica.slots.append(SEVEN)
        await writer.send(ADAPTERS, adapter(SEVEN), key=SEVEN)
        await writer.send(ALIASES, alias(SEVEN), key=ALIAS)
        sink = processes.start()
        await until(clickhouse, ADAPTER_STATES, [(SEVEN, "ready")])
        await until(clickhouse, ALIAS_ENDS, [(ALIAS, SEVEN, "")])
        await until(clickhouse, PLACES, [(SEVEN, first, "owner", "gpu")])
        [row] = rows(clickhouse, "SELECT * FROM adapters")
        assert row[:-1] == (
            SEVEN, "acme", 7, BASE, 16, 32.5, ["q_proj", "v_proj"], 1 << 33, "s3://adapters/abc", "c0" * 32, "ready",
            "", "abc",
        )  # fmt: skip
        assert row[-1].timestamp() == 1_796_129_284.372

        await writer.send(ADAPTERS, adapter(EIGHT), key=EIGHT)
        await writer.send(ALIASES, alias(SEVEN, EIGHT), key=ALIAS)
        await until(clickhouse, ALIAS_ENDS, [(ALIAS, SEVEN, EIGHT)])
        async with Replica(second, BASE).lives(settings, writer):
            both = sorted((name, place) for name in (SEVEN, EIGHT) for place in (first, second))
            held = {(SEVEN, first): "gpu"}
            await until(clickhouse, PLACES, [(*one, "owner", held.get(one, "remote")) for one in both])

        sink.kill()  # what changes while it is away is there when it is back, and what is gone has gone
        await writer.send(ADAPTERS, adapter(SEVEN, AdapterStatus.RETIRED), key=SEVEN)
        await writer.send(ADAPTERS, None, key=EIGHT)
        await writer.send(ALIASES, None, key=ALIAS)
        processes.start()
        await until(clickhouse, ADAPTER_STATES, [(SEVEN, "retired")])
        await until(clickhouse, ALIAS_ENDS, [])
        await until(clickhouse, PLACES, [(SEVEN, first, "owner", "gpu")])


async def test_requests_tell_when_an_adapter_was_used_and_how_much(
    settings: KafkaSettings, clickhouse: str, processes: Processes
) -> None:
    await ensure_topics(settings)
    place = ranked(SEVEN, (0, 1))[0]
    minute_ms = time.time_ns() // 1_000_000 // 60_000 * 60_000
    async with Writer(settings, "test") as writer, Replica(place, BASE).lives(settings, writer):
        await writer.send(ADAPTERS, adapter(SEVEN), key=SEVEN)
        for number in range(6):
            await writer.send(FINISHED, request(number, minute_ms + number), key="acme")
        processes.start()
        await until(clickhouse, PLACES, [(SEVEN, place, "owner", "remote")])
        assert rows(clickhouse, "SELECT last_used_at FROM placements") == [(None,)]
        used = attempt(place)  # samples: number 0 to 2 is the replica, too
        await writer.send(FINISHED, used, key="acme")
        at = "SELECT replica_id, toUnixTimestamp64Milli(assumeNotNull(last_used_at)) FROM placements"
        await until(clickhouse, at, [(place, used.at_unix_ms)])
        stats = (
            "SELECT adapter_id, toUnixTimestamp(window_start), requests, tokens_per_s, gpu_hit_rate FROM adapter_stats"
        )
        await until(clickhouse, stats, [(SEVEN, minute_ms // 1000, 6, 6 * 7 / 60, 1.0)])

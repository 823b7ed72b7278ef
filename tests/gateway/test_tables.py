"""Waiting until a change holds on every gateway; without Kafka, since all that counts has been heard already."""

import asyncio
from pathlib import Path

import pytest

from gateway.auth import Keys
from gateway.catalogue import Catalogue
from gateway.errors import ApiError
from gateway.fleet import Fleet
from gateway.registrar import confirmed
from gateway.tables import Tables
from schemas.gateways import GatewayBeat, GatewayState
from schemas.topics import ALIASES, GATEWAYS
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    kafka = KafkaSettings("127.0.0.1:1")
    return Tables(
        kafka,
        0,
        Keys(lambda: 0.0),
        Catalogue("base", "b"),
        Fleet("b", {}),
        {},
        lambda lost: None,
        lambda: None,
        lambda beat: None,
    )


def says(tables: Tables, position: int) -> None:
    beat: GatewayState = GatewayBeat(1, 7, 0, 0, {"aliases": {2: position}})
    tables._gateway(Change(GATEWAYS, "1", beat, None, 0, 9, 0, True))


async def test_waits_until_it_is_heard(tables: Tables) -> None:
    says(tables, 5)
    asyncio.get_running_loop().call_later(0.02, says, tables, 6)
    assert await tables.everywhere(ALIASES, 2, 5, limit_s=10) == []


async def test_who_never_says_it_is_named(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    says(tables, 5)
    assert await tables.everywhere(ALIASES, 2, 5, limit_s=0.02) == [1]
    monkeypatch.setattr("gateway.registrar.CONFIRM_S", 0.02)
    with pytest.raises(ApiError) as refused:
        await confirmed(tables, ALIASES, 2, 5)
    assert refused.value.status == 504
    assert "[1]" in refused.value.message

"""The worker's end of the engine, with a simulated one: commands go out, and what they are answered comes back."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop

from schemas.engine import CancelSequence, Event, Merge, Merged, MergeFailed, Unmerge, Unmerged
from schemas.reasons import FinishReason
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import adapter, content_id, image, save_tiny, start
from workers.engine_client import EngineClient, EngineCrashedError
from workers.settings import WorkerSettings

E = TypeVar("E")
RANK = 8


async def hear(events: AsyncIterator[Event], kind: type[E]) -> E:
    while not isinstance(event := await anext(events), kind):
        pass
    return event


def client(folder: Path) -> EngineClient:
    env = {"WORKER_ENGINE": "simulated", "LORAFLEET_MODEL": str(folder), "LORAFLEET_MAX_RANK": str(RANK)}
    env |= {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "LORAFLEET_STORE": "s3://adapters", "WORKER_REPLICA": "0"}
    return EngineClient(WorkerSettings.from_env(env))


def test_what_is_sent_to_a_dead_engine_is_lost_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the loop that workers run on. Whoever sends must not end the worker before its crash has its name."""
    folder = save_tiny(tmp_path / "model")

    async def kill_and_send() -> None:
        engine = client(folder)
        try:
            await engine.start()
            [pid] = re.findall(r"process (\d+)", caplog.text)
            os.kill(int(pid), signal.SIGKILL)
            for number in range(5):
                engine.send(CancelSequence(number, FinishReason.CANCELLED))
                await asyncio.sleep(0.05)
            with pytest.raises(EngineCrashedError, match="signal 9"):
                await hear(engine.events(), Merged)
        finally:
            await engine.stop()

    with caplog.at_level("INFO"):
        uvloop.run(kill_and_send())


async def test_an_adapter_is_merged_and_taken_out(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    shape = ModelShape.of(folder)
    load = image(tmp_path, shape, "x", adapter(shape, 1), RANK)
    engine = client(folder)
    try:
        ready = await engine.start()
        events = engine.events()
        engine.send(Merge(load.content_id, load.path))
        merged = await hear(events, Merged)
        assert merged.numeric_class.startswith(f"{ready.numeric_class}/merged-")
        engine.send(start(1, [1, 2], "x", max_tokens=400))
        engine.send(Unmerge())
        assert (await hear(events, MergeFailed)).content_id == content_id("x")
        engine.send(CancelSequence(1, FinishReason.CANCELLED))
        engine.send(Unmerge())
        unmerged = await hear(events, Unmerged)
        assert (unmerged.content_id, unmerged.numeric_class) == (content_id("x"), ready.numeric_class)
    finally:
        await engine.stop()

"""The worker's end of the engine, with a simulated one: commands go out, and what they are answered comes back."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

from schemas.engine import CancelSequence, Event, Merge, Merged, MergeFailed, Unmerge, Unmerged
from schemas.reasons import FinishReason
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import adapter, content_id, image, save_tiny, start
from workers.engine_client import EngineClient
from workers.settings import WorkerSettings

E = TypeVar("E")
RANK = 8


async def hear(events: AsyncIterator[Event], kind: type[E]) -> E:
    while not isinstance(event := await anext(events), kind):
        pass
    return event


async def test_an_adapter_is_merged_and_taken_out(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    shape = ModelShape.of(folder)
    load = image(tmp_path, shape, "x", adapter(shape, 1), RANK)
    env = {"WORKER_ENGINE": "simulated", "LORAFLEET_MODEL": str(folder), "LORAFLEET_MAX_RANK": str(RANK)}
    env |= {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "LORAFLEET_STORE": "s3://adapters", "WORKER_REPLICA": "0"}
    engine = EngineClient(WorkerSettings.from_env(env))
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

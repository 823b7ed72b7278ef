"""What the intake says it has read, once the engine behind it is no more."""

import asyncio
import contextlib
from pathlib import Path
from typing import cast

import pytest

from schemas.requests import Sampling, Submit
from schemas.topics import REQUESTS
from streams.bus.reader import Reader, Record
from tests.workers.rig import model
from workers.engine_client import EngineClient
from workers.inbox import Inbox
from workers.intake import Intake
from workers.loader.owned import Usage
from workers.loading import Loading
from workers.publisher import Publisher
from workers.sequences import Sequences
from workers.settings import WorkerSettings

SUBMIT = Submit("r", 0, "acme", "", "", "base", 0, 7, 0, 5, [1], [], 9, Sampling(1), [2], 60_000)


class OneRecord:
    """A partition whose next record, at offset 40, comes when it is let in."""

    def __init__(self) -> None:
        self.let_in = asyncio.Event()
        self._position = 40

    def position(self, *_: object) -> int:
        return self._position

    async def poll(self) -> list[Record]:
        await self.let_in.wait()
        self.let_in.clear()
        self._position = 41
        return [Record(REQUESTS, 0, 40, "r", SUBMIT, 0)]


@pytest.mark.parametrize("ended", [True, False])
async def test_what_comes_after_the_engines_end_counts_as_unread(tmp_path: Path, ended: bool) -> None:
    """Gateways hold a crash against every request that the last word covers: it must not cover these."""
    env = {"LORAFLEET_MODEL": str(model(tmp_path)), "LORAFLEET_STORE": "s3://adapters", "WORKER_REPLICA": "0"}
    engine = EngineClient(WorkerSettings.from_env({"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", **env}))
    inbox = Inbox(7, "base" if ended else "another", 100, 9, lambda _: None, lambda *_: False)
    reader, sequences = OneRecord(), Sequences(0, 7)
    intake = Intake(cast(Reader, reader), 0, inbox, sequences, engine, cast(Loading, None), Usage())
    publisher = Publisher(cast("Publisher", None), 0, 7, lambda: sequences.load(0), lambda *_: False)  # type: ignore[arg-type]
    publisher.silence()
    if ended:
        engine.kill()
    reading = asyncio.create_task(intake.read(publisher))
    reader.let_in.set()
    await asyncio.sleep(0.05)
    assert (intake.read_offset, inbox.open, len(sequences)) == (40 if ended else 41, 0, 0)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading

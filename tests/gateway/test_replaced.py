"""A gateway that loses its place while it is paused: it must not say another word."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas.stats import RequestFinished
from schemas.topics import FINISHED
from streams.bus.reader import Reader
from tests.gateway.rig import Door, Rig, text_of, until
from tests.stack import Stack

pytestmark = pytest.mark.real


@asynccontextmanager
async def held(rig: Rig, stack: Stack, step_ms: int) -> AsyncIterator[tuple[Door, Reader]]:
    """A gateway at its place, with a worker of `step_ms` a step, and a reader of what it reports from now on."""
    old = rig.gateway(stack.ports.allot("replaced-old"), stack.ports.allot("replaced-old-internal"))
    rig.ready(old.child, rig.worker(WORKER_STEP_MS=str(step_ms)))
    old.sees(1)
    partitions = dict.fromkeys(range(rig.settings.partitions(FINISHED)), "end")
    async with Reader(rig.settings, {FINISHED: partitions}, "rows") as reader:  # type: ignore[dict-item]
        yield old, reader


def newcomer(rig: Rig, stack: Stack) -> Door:
    """The next process for the same place: its claim waits for the silence of the one before."""
    new = rig.gateway(stack.ports.allot("replaced-new"), stack.ports.allot("replaced-new-internal"))
    rig.ready(new.child)
    return new


async def test_a_gateway_that_was_replaced_in_its_pause_reports_nothing(rig: Rig, stack: Stack) -> None:
    """Else a request that the reconciler has closed would be counted twice."""
    async with held(rig, stack, step_ms=20) as (old, reader):
        streams = [asyncio.create_task(text_of(old, rig.model.name, f"{n}", 1000)) for n in range(3)]
        await until(lambda: old.rows() == 3, 20, "all run")
        os.kill(old.child.pid, signal.SIGSTOP)
        try:
            new = await asyncio.to_thread(newcomer, rig, stack)
            for stream in streams:
                stream.cancel()  # the clients go: the old one will want to report that
            await asyncio.gather(*streams, return_exceptions=True)
        finally:
            os.kill(old.child.pid, signal.SIGCONT)
        await until(lambda: old.child.returncode() == 4, 20, "the old one's end")
        assert await text_of(new, rig.model.name, "after", 9) == rig.answer("after", 9)
        rows: list[RequestFinished] = []
        while not rows:  # that of the last chat, behind whatever the old one had said
            rows += [r.value for r in await reader.poll() if isinstance(r.value, RequestFinished)]
    assert [(row.output_tokens, row.gateway_incarnation) for row in rows] == [(9, rows[0].gateway_incarnation)]


async def test_rows_that_waited_out_the_pause_in_a_queue_stay_there(rig: Rig, stack: Stack) -> None:
    """The chats had ended when the pause came, and their rows waited for the next tick of their topic."""
    linger_s = FINISHED.linger_ms / 1000
    async with held(rig, stack, step_ms=1) as (old, reader):
        chats = [asyncio.create_task(text_of(old, rig.model.name, f"{n}", 3)) for n in range(8)]
        await asyncio.wait(chats, return_when=asyncio.FIRST_COMPLETED)
        if time.monotonic() % linger_s > 0.7 * linger_s:  # processes share the clock: no tick is to be near
            await asyncio.sleep(0.4 * linger_s)
        os.kill(old.child.pid, signal.SIGSTOP)
        rows: list[RequestFinished] = []
        try:
            new = await asyncio.to_thread(newcomer, rig, stack)
            for chat in chats:
                chat.cancel()
            await asyncio.gather(*chats, return_exceptions=True)
            for _ in range(20):  # what had left before the pause
                rows += [r.value for r in await reader.poll(0.1) if isinstance(r.value, RequestFinished)]
        finally:
            os.kill(old.child.pid, signal.SIGCONT)
        await until(lambda: old.child.returncode() == 4, 20, "the old one's end")
        told = len(rows)
        assert await text_of(new, rig.model.name, "after", 9) == rig.answer("after", 9)
        while len(rows) == told or rows[-1].output_tokens != 9:
            rows += [r.value for r in await reader.poll() if isinstance(r.value, RequestFinished)]
    assert [row.output_tokens for row in rows[told:]] == [9]

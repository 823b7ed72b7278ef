"""A gateway that is paused for longer than others take for death, and keeps its place."""

import asyncio
import os
import signal

import pytest

from tests.gateway.rig import Rig, text_of
from tests.stack import Stack

pytestmark = pytest.mark.real
PAUSE_S = 7.0


async def test_chats_that_come_in_its_pause_or_right_after_are_served(rig: Rig, stack: Stack) -> None:
    """Its workers take it for dead, and its own readers have heard nothing for as long."""
    door = rig.gateway(stack.ports.allot("paused"), stack.ports.allot("paused-internal"))
    rig.ready(door.child, rig.worker(WORKER_STEP_MS="20"))
    door.sees(1)

    async def chat(number: int, after_s: float, tokens: int) -> str:
        await asyncio.sleep(after_s)
        return await text_of(door, rig.model.name, f"{number}", tokens)

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(chat(number, 0, 200)) for number in range(2)]
        await asyncio.sleep(1)
        os.kill(door.child.pid, signal.SIGSTOP)
        # One each 50 ms, from half a second before its end.
        chats = [group.create_task(chat(10 + n, PAUSE_S - 0.5 + n / 20, 3)) for n in range(30)]
        await asyncio.sleep(PAUSE_S)
        os.kill(door.child.pid, signal.SIGCONT)
    assert [stream.result() for stream in streams] == [rig.answer(f"{number}", 200) for number in range(2)]
    assert [told.result() for told in chats] == [rig.answer(f"{10 + n}", 3) for n in range(30)]

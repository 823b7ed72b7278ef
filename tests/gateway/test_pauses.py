"""A process that was paused or cut off writes nothing until it is sure of its place."""

import asyncio
import time

import pytest

from gateway.pauses import PAUSED_S, Pauses
from streams.bus.errors import BusUnavailable
from streams.presence.claim import ReplacedError


class Clock:
    """time.monotonic, and what a pause adds to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paused_s, real = 0.0, time.monotonic
        monkeypatch.setattr("gateway.pauses.time.monotonic", lambda: real() + self.paused_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def hearing() -> float:
    return 0.0


async def test_it_is_silent_before_it_has_noticed_the_pause_itself(clock: Clock) -> None:
    sure, lates = asyncio.Event(), list[float]()

    async def still_mine() -> None:
        await sure.wait()

    pauses = Pauses(still_mine, hearing, lates.append)
    assert pauses.may_write()
    task = asyncio.create_task(pauses.run())
    await asyncio.sleep(0.12)
    assert pauses.may_write()
    clock.paused_s = PAUSED_S + 1
    assert not pauses.may_write()  # a timer that ran first
    await asyncio.sleep(0.12)
    assert not pauses.may_write()
    assert max(lates) > PAUSED_S
    sure.set()
    await asyncio.sleep(0.02)
    assert pauses.may_write()
    task.cancel()
    await asyncio.wait({task})
    assert pauses.may_write()  # for the last words of a process that ends


async def test_who_was_replaced_never_writes_again(clock: Clock) -> None:
    async def still_mine() -> None:
        raise ReplacedError("somebody else")

    pauses = Pauses(still_mine, hearing, lambda _: None)
    task = asyncio.create_task(pauses.run())
    await asyncio.sleep(0.02)
    clock.paused_s = PAUSED_S + 1
    with pytest.raises(ReplacedError):
        await asyncio.wait_for(task, 2)
    assert not pauses.may_write()


async def test_it_asks_again_when_nobody_answers_or_the_answer_is_old(clock: Clock) -> None:
    asked = 0

    async def still_mine() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.sleep(0)
            raise BusUnavailable("away")
        if asked == 2:
            clock.paused_s += PAUSED_S + 1  # a second pause, after the broker had answered

    pauses = Pauses(still_mine, hearing, lambda _: None)
    task = asyncio.create_task(pauses.run())
    await asyncio.sleep(0.02)
    clock.paused_s = PAUSED_S + 1
    await asyncio.sleep(0.15)
    assert (asked, pauses.may_write()) == (3, True)
    task.cancel()
    await asyncio.wait({task})


async def test_who_was_cut_off_asks_as_soon_as_it_can_be_answered() -> None:
    deaf_s, asked, answer = PAUSED_S + 1, 0, asyncio.Event()

    async def still_mine() -> None:
        nonlocal asked
        asked += 1
        await answer.wait()

    pauses = Pauses(still_mine, lambda: deaf_s, lambda _: None)
    task = asyncio.create_task(pauses.run())
    await asyncio.sleep(0.2)
    assert (asked, pauses.may_write()) == (0, False)
    deaf_s = 0.1
    await asyncio.sleep(0.1)
    assert (asked, pauses.may_write()) == (1, False)
    answer.set()
    await asyncio.sleep(0.1)
    assert (asked, pauses.may_write()) == (1, True)
    task.cancel()
    await asyncio.wait({task})

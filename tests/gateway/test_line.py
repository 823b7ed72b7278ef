"""The line between a request and its client: everything there is at once, the end last, None for silence."""

import asyncio

from gateway.flight import Ask, End, Flight
from gateway.line import Line, News
from schemas.reasons import Outcome
from schemas.requests import Sampling

END = End("r", Outcome.OK, "stop")


def line() -> Line:
    return Line(Flight(Ask("r", "acme", "m", "", "", [1], 8, Sampling(1), [], 0.0, 9.0)))


async def test_all_there_is_at_once() -> None:
    ours = line()
    ours.deliver([1, 2], 1.0)
    ours.deliver([3], 2.0)
    assert await ours.news() == News([1, 2, 3], None)
    ours.deliver([4], 3.0)
    ours.finish(END)
    assert await ours.news() == News([4], END)
    assert (ours.first_token_at, ours.last_token_at) == (1.0, 3.0)


async def test_waits_for_what_comes() -> None:
    ours = line()
    asyncio.get_running_loop().call_later(0.02, ours.deliver, [5], 1.0)
    assert await ours.news(10) == News([5], None)
    asyncio.get_running_loop().call_later(0.02, ours.finish, END)
    assert await ours.news() == News([], END)


async def test_silence_is_none_and_loses_nothing() -> None:
    ours = line()
    assert await ours.news(0.01) is None
    ours.deliver([6], 1.0)
    assert await ours.news(0.01) == News([6], None)

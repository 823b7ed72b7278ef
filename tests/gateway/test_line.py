"""The line between a request and its client: everything there is at once, the end last, None for silence."""

import asyncio

from gateway.flight import Ask, End, Flight
from gateway.line import Line, Lines, News
from schemas.reasons import Outcome
from schemas.requests import Sampling
from schemas.tokens import Logprobs

END = End("r", Outcome.OK, "stop")
SCORES = Logprobs(-1.0, [])


def line(lines: Lines) -> Line:
    return lines.add(Flight(Ask("r", "acme", "m", "", "", [1], 8, Sampling(1), [], 0.0, 9.0)))


async def test_all_there_is_at_once() -> None:
    lines = Lines()
    ours = line(lines)
    ours.deliver([1, 2], [], 1.0)
    ours.deliver([3], [], 2.0)
    assert await lines.news() == [News(ours, [1, 2, 3], [], None)]
    ours.deliver([4], [SCORES], 3.0)
    ours.finish(END)
    assert await lines.news() == [News(ours, [4], [SCORES], END)]
    assert (ours.first_token_at, ours.last_token_at) == (1.0, 3.0)


async def test_waits_for_what_comes() -> None:
    lines = Lines()
    ours = line(lines)
    asyncio.get_running_loop().call_later(0.02, ours.deliver, [5], [], 1.0)
    assert await lines.news(10) == [News(ours, [5], [], None)]
    asyncio.get_running_loop().call_later(0.02, ours.finish, END)
    assert await lines.news() == [News(ours, [], [], END)]


async def test_silence_is_nothing_and_loses_nothing() -> None:
    lines = Lines()
    ours = line(lines)
    assert await lines.news(0.01) == []
    ours.deliver([6], [], 1.0)
    assert await lines.news(0.01) == [News(ours, [6], [], None)]


async def test_one_reader_hears_all_lines_and_each_end_once() -> None:
    lines = Lines()
    first, second = line(lines), line(lines)
    second.deliver([7], [], 1.0)
    assert await lines.news() == [News(second, [7], [], None)]
    first.finish(END)
    second.deliver([8], [], 1.0)
    assert await lines.news() == [News(first, [], [], END), News(second, [8], [], None)]
    second.finish(END)
    assert await lines.news(0.01) == [News(second, [], [], END)]
    assert await lines.news(0.01) == []


async def test_a_shorter_silence_after_a_longer_one_is_told_in_time() -> None:
    lines = Lines()
    ours = line(lines)
    asyncio.get_running_loop().call_later(0.01, ours.deliver, [5], [], 1.0)
    assert await lines.news(600) == [News(ours, [5], [], None)]
    async with asyncio.timeout(30):
        assert await lines.news(0.01) == []


async def test_a_longer_silence_after_a_shorter_one_is_not_told_early() -> None:
    lines = Lines()
    ours = line(lines)
    ours.deliver([5], [], 1.0)
    asyncio.get_running_loop().call_later(0.005, ours.deliver, [6], [], 1.0)
    await lines.news(0.05)
    assert await lines.news(0.05) == [News(ours, [6], [], None)]
    asyncio.get_running_loop().call_later(0.15, ours.deliver, [7], [], 1.0)
    assert await lines.news(60) == [News(ours, [7], [], None)]


async def test_nobody_is_woken_where_nobody_asked_for_it() -> None:
    lines = Lines()
    ours = line(lines)
    asyncio.get_running_loop().call_later(0.005, ours.deliver, [5], [], 1.0)
    assert await lines.news(0.02) == [News(ours, [5], [], None)]
    asyncio.get_running_loop().call_later(0.1, ours.finish, END)
    assert await lines.news() == [News(ours, [], [], END)]
    lines.close()

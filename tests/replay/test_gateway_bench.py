"""`lorafleet bench gateway` and `bench keys` run to their ends on tiny plans, and say what they promise."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from replay.gateway_bench import Carried, _most
from replay.key_bench import Watch
from replay.openloop import Latencies
from replay.rawstreams import RawStreams
from replay.stamps import RESOLUTION_S, Stamps

STAMPS = Stamps([b" one", b"two", b" three", b" Four", b" five"])
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(text: bytes) -> bytes:
    data = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text
    return b"%x\r\n%s\r\n" % (len(data), data)


def bench(*arguments: str) -> Any:
    argv = [sys.executable, "-m", "infra", "bench", *arguments, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"]


@pytest.mark.real
@pytest.mark.timeout(300)
def test_the_gateway_bench_tells_all_it_promises() -> None:
    plan = {"rate": 4, "tokens": 10, "replicas": 2, "customers": 12, "streams": 6, "seconds": 2, "starts": 1}
    told = [word for name, value in plan.items() for word in (f"--{name}", str(value))]
    (result,) = bench("gateway", *told, "--factors", "2")
    carried = result["carried"]
    assert [(one["subject"], one["rate"]) for one in carried] == [
        ("lorafleet", 4.0), ("bare aiohttp", 4.0), ("lorafleet", 8.0)
    ]  # fmt: skip
    for one in carried:
        assert one["broken"] == 0
        assert one["age"]["count"] > 0
        assert one["ttft"]["count"] > 0
        assert {"subject", "replicas", "client", "kafka", "rest"} == set(one["cores"])
    assert [(one["subject"], one["streams"]) for one in result["memory"]] == [("lorafleet", 6), ("bare aiohttp", 6)]
    assert [(one["customers"], one["adapters"]) for one in result["cold_starts"]] == [(10, 10), (12, 12)]
    assert [one["p99_within_ms"] for one in result["most"]] == [10.0, 50.0]
    assert set(result["added"]) == {"ttft_ms", "token_ms"}


@pytest.mark.real
@pytest.mark.timeout(300)
def test_the_key_bench_watches_every_gateway_obey() -> None:
    results = bench("keys", "--gateways", "2", "--rounds", "1")
    assert [result["change"] for result in results] == [
        "new key works", "rotated: the old one is refused", "limit set", "limit lifted", "revoked"
    ]  # fmt: skip
    for result in results:
        assert (result["gateways"], result["rounds"]) == (2, 1)
        assert result["from_answer_s"] < result["from_asking_s"]


def test_a_word_says_its_age() -> None:
    assert STAMPS.ids == [0, 2, 4]
    now = 7 * RESOLUTION_S + RESOLUTION_S / 2
    assert STAMPS.words[STAMPS.moment(now)] == b"three"
    ages = STAMPS.ages_ms(b"three one five", now)
    assert ages == pytest.approx([0.05, 0.15, 0.25])
    with pytest.raises(KeyError):
        STAMPS.ages_ms(b"two", now)


@pytest.mark.parametrize(
    ("answer", "ages", "broken"),
    [
        (HEAD + _chunk(b" one") + _chunk(b" three five") + b"0\r\n\r\n", 2, ""),
        (HEAD + _chunk(b" one") + b"0\r\n\r\n", 0, "2 tokens are missing"),
        (HEAD + _chunk(b" one"), 0, "it broke off"),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n", 0, "HTTP/1.1 429"),
    ],
)
async def test_a_stream_that_is_not_whole_is_broken(answer: bytes, ages: int, broken: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        for half in (answer[: len(answer) // 2], answer[len(answer) // 2 :]):
            writer.write(half)
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, RawStreams(url, lambda *_: ("key", b"{}"), STAMPS) as streams:
        window = asyncio.create_task(streams.window(1.0))
        await asyncio.sleep(0)
        await streams.start(0, 3)
        seen = await window
    assert len(seen.ages) == ages
    assert [why[: len(broken)] for why in seen.broken] == ([broken] if broken else [])


def test_a_gateway_obeys_from_its_last_old_answer_on() -> None:
    watch = Watch(old=200, new=401)
    for now, status in enumerate((200, 200, 401, 200, 401, 401)):
        watch.answered(status, float(now))
    assert (watch.changed_at, watch.in_row) == (3.0, 2)
    with pytest.raises(RuntimeError):
        watch.answered(500, 9.0)


def test_the_most_that_held_is_below_what_did_not() -> None:
    carried = [_carried(rate, p99) for rate, p99 in ((40, 4.0), (60, 9.0), (80, 30.0), (100, 400.0))]
    assert [(most.rate, most.then) for most in (_most(carried, 10), _most(carried, 50))] == [(60, 80), (80, 100)]
    assert (_most(carried, 1).rate, _most(carried, 1).then) == (0, 40)
    assert _most(carried[:2], 10).then == 0


def _carried(rate: float, p99_ms: float) -> Carried:
    age = Latencies(rate, 1000, 0, 1.0, 2.0, p99_ms, p99_ms)
    return Carried("lorafleet", rate, rate * 250, 500, age, age, 1.0, 0, {})

"""Connections and bodies that are not what they should be, on a real port."""

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from gateway import body
from gateway.body import read_body
from gateway.metrics import Metrics
from gateway.middleware import answering
from gateway.ports import listen

KEY = "lf-raG4EIdSrhN30U"
IDLE_S = 0.3


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Answers with the length of the body."""
    metrics = Metrics()
    app = web.Application(client_max_size=1 << 16, middlewares=[answering(metrics)])

    async def count(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await read_body(request))))

    app.router.add_post("/", count)
    with socket.create_server(("127.0.0.1", 0)) as held:
        free: int = held.getsockname()[1]
    runner = await listen(app, "test", "127.0.0.1", free, metrics, IDLE_S)
    yield free
    await runner.cleanup()


async def said(port: int, *parts: bytes, until: bytes = b"") -> bytes:
    """What comes back until the port closes the connection, or up to `until`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        answer = await (reader.readuntil(until) if until else reader.read(-1))
    writer.close()
    return answer


def post(body: bytes, *headers: str) -> bytes:
    head = ["POST / HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.mark.parametrize(
    "bad",
    [
        f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\0\r\n\r\n",
        f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization Bearer {KEY}\r\n\r\n",
        f"POST /?key={KEY}\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        f"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: many\r\n\r\n",
    ],
)
async def test_a_key_in_a_bad_request_is_not_logged(port: int, bad: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert (await said(port, bad.encode("latin1"))).startswith(b"HTTP/1.0 400")
    assert KEY not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("bad", "status", "param"),
    [
        (b"nonsense\r\n\r\n", 400, None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, None),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400, None),
        (b"POST /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400, None),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n", 400, None),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n", 400, None),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nExpect: pies\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            417,
            "Expect",
        ),
        (b"GET /no HTTP/1.1\r\nHost: x\r\nExpect: pies\r\nConnection: close\r\n\r\n", 417, "Expect"),
        (b"GET /no HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404, None),
    ],
)
async def test_what_no_handler_sees_is_answered_as_the_api_does(
    port: int, bad: bytes, status: int, param: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    head, _, told = (await said(port, bad)).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert b"Content-Type: application/json" in head
    error = json.loads(told)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in caplog.text


async def test_an_expected_continue_is_given(port: int) -> None:
    answer = await said(port, post(b"12345", "Expect: 100-continue", "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 100 Continue")
    assert answer.endswith(b"\r\n\r\n5")


@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "zstd", "nonsense"])
async def test_a_packed_body_is_refused_unread(port: int, packing: str) -> None:
    answer = await said(port, post(gzip.compress(bytes(1 << 24)), f"Content-Encoding: {packing}", "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 400")
    assert f"Content-Encoding is {packing}".encode() in answer


async def test_a_packing_that_is_no_text_is_refused_too(port: int, caplog: pytest.LogCaptureFixture) -> None:
    answer = await said(port, post(b"1", "Content-Encoding: @", "Connection: close").replace(b"@", b"\xff\xfe"))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"type":"invalid_request_error"' in answer
    assert "Traceback" not in caplog.text


async def test_a_body_as_it_is(port: int) -> None:
    assert (await said(port, post(b"12345", "Content-Encoding: identity", "Connection: close"))).endswith(b"\r\n\r\n5")


@pytest.mark.parametrize("rest", [b"", b"zz\r\nhello\r\n"])
async def test_a_body_that_never_ends(
    port: int, rest: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_LIMIT_S", 0.2)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    assert (await said(port, head, rest, until=b"within 0.2 s")).startswith(b"HTTP/1.1 408")
    assert "Traceback" not in caplog.text


async def test_too_large_says_how_much_is_taken(port: int) -> None:
    answer = await said(port, post(bytes(100_000), "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"65536" in answer


@pytest.mark.parametrize("begun", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: x\r\nAuthori", post(b"1") + b"POST"])
async def test_nobody_holds_a_connection_without_a_request(port: int, begun: bytes) -> None:
    answer = await said(port, begun)
    assert answer.count(b"HTTP/1.1 200") == begun.count(b"Content-Length")

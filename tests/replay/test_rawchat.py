"""The load generator against a server that answers and hangs up: a kept connection that is gone is no failure."""

import asyncio

import pytest

from replay.rawchat import RawChats

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'12\r\n"content":"hello"\n\r\n0\r\n\r\n'


async def _serving(answer: bytes, chats: int, hang_up: bool) -> tuple[list[float | BaseException], int]:
    """What `chats` chats in a row got, and how many connections they took."""
    connections = 0
    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        handlers.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            while await reader.readuntil(b"\r\n\r\n{}"):
                writer.write(answer)
                if hang_up:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, RawChats(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key", b"{}") as chats_:
        got: list[float | BaseException] = []
        for number in range(chats):
            got += await asyncio.gather(chats_(number), return_exceptions=True)
            await asyncio.sleep(0.05)  # a hang-up arrives
    await asyncio.gather(*handlers)
    return got, connections


@pytest.mark.parametrize(("hang_up", "connections"), [(True, 3), (False, 1)])
async def test_a_connection_is_kept_while_the_server_keeps_it(hang_up: bool, connections: int) -> None:
    got, taken = await _serving(HEAD + TOKEN, 3, hang_up)
    assert all(isinstance(latency, float) for latency in got), got
    assert taken == connections


@pytest.mark.parametrize("answer", [HEAD + b"0\r\n\r\n", b"HTTP/1.1 503 X\r\n\r\n" + TOKEN, HEAD + TOKEN[:8]])
async def test_an_answer_that_is_no_whole_stream_with_a_token_is_a_failure(answer: bytes) -> None:
    [got], _ = await _serving(answer, 1, hang_up=True)
    assert isinstance(got, ValueError)

"""The yardstick: a bare aiokafka round trip over two topics and two processes, with nothing of ours in between.

`python -m replay.pingpong BOOTSTRAP PING PONG` is the far end: it copies PING to PONG and prints a line `ready`. With
`--engine` it shows each record to a process behind a socket first, as a worker does. Same client settings as the
product's hot path: idempotent, no linger, explicit partitions, the same fetch wait.
"""

import asyncio
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from replay.openloop import Request

FETCH_WAIT_MS = 250
PAYLOAD = b"x" * 300  # about a Submit of a short prompt
# The engine's double: what comes goes back at once.
MIRROR = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\nwhile d := s.recv(1 << 20): s.sendall(d)"


async def _ends(bootstrap: str, source: str) -> tuple[AIOKafkaProducer, AIOKafkaConsumer]:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=0)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, fetch_max_wait_ms=FETCH_WAIT_MS, auto_offset_reset="none")
    await producer.start()
    await consumer.start()
    partition = TopicPartition(source, 0)
    consumer.assign([partition])
    await consumer.seek_to_end(partition)
    await consumer.position(partition)
    return producer, consumer


async def echo(bootstrap: str, ping: str, pong: str, engine: bool) -> None:
    """Copies every record of `ping` to `pong`, until killed or without a parent."""
    producer, consumer = await _ends(bootstrap, ping)
    reader, writer = await _mirror() if engine else (None, None)
    print("ready", flush=True)
    while True:
        for records in (await consumer.getmany(timeout_ms=1000)).values():
            for record in records:
                value = record.value
                if reader is not None and writer is not None:
                    writer.write(value)
                    value = await reader.readexactly(len(value))
                await producer.send(pong, value, partition=0)


async def _mirror() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A process of its own that ends with this one's socket."""
    ours, its = socket.socketpair()
    await asyncio.create_subprocess_exec(sys.executable, "-c", MIRROR, str(its.fileno()), pass_fds=[its.fileno()])
    its.close()
    return await asyncio.open_connection(sock=ours)


@asynccontextmanager
async def round_trips(bootstrap: str, engine: bool = False) -> AsyncIterator[Request]:
    """A call is one round trip, in ms, through topics of this context's own."""
    token = uuid.uuid4().hex[:8]
    ping, pong = f"ping-{token}", f"pong-{token}"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(ping, 1, 1), NewTopic(pong, 1, 1)])
    far = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "replay.pingpong", bootstrap, ping, pong, *(["--engine"] if engine else []),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    try:
        assert far.stdout is not None
        await asyncio.wait_for(far.stdout.readline(), 30)
        producer, consumer = await _ends(bootstrap, pong)
        waiting: dict[bytes, asyncio.Future[None]] = {}

        async def receive() -> None:
            while True:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    for record in records:
                        future = waiting.pop(record.value[:16], None)
                        if future is not None and not future.done():
                            future.set_result(None)

        async def trip(_: int) -> float:
            key = uuid.uuid4().bytes
            waiting[key] = asyncio.get_running_loop().create_future()
            started = time.perf_counter()
            await producer.send(ping, key + PAYLOAD, partition=0)
            await waiting[key]
            return (time.perf_counter() - started) * 1000

        receiver = asyncio.create_task(receive(), name="pong reader")
        try:
            yield trip
        finally:
            receiver.cancel()
            with suppress(asyncio.CancelledError):
                await receiver
            await producer.stop()
            await consumer.stop()
    finally:
        far.kill()
        await far.wait()
        await admin.delete_topics([ping, pong])
        await admin.close()


def _end_with_stdin() -> None:
    """The near end may be killed."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    at, source, sink = sys.argv[1:4]
    uvloop.run(echo(at, source, sink, "--engine" in sys.argv))

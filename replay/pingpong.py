"""The yardstick: a bare aiokafka round trip over two topics and two processes, with nothing of ours in between.

`python -m replay.pingpong BOOTSTRAP PING PONG` is the far end: it copies PING to PONG and prints a line `ready`.
Same client settings as the product's hot path: idempotent, no linger, explicit partitions, the same fetch wait.
"""

import asyncio
import sys
import time
import uuid
from pathlib import Path

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from replay.openloop import LEAST, Latencies, drive

FETCH_WAIT_MS = 50
PAYLOAD = b"x" * 300  # about a Submit of a short prompt


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


async def echo(bootstrap: str, ping: str, pong: str) -> None:
    """Copies every record of `ping` to `pong`, until killed."""
    producer, consumer = await _ends(bootstrap, ping)
    print("ready", flush=True)
    while True:
        for records in (await consumer.getmany(timeout_ms=1000)).values():
            for record in records:
                await producer.send(pong, record.value, partition=0)


async def measure(bootstrap: str, rates: list[float], seconds: float) -> list[Latencies]:
    """Round trips at each rate, through topics of this call's own."""
    token = uuid.uuid4().hex[:8]
    ping, pong = f"ping-{token}", f"pong-{token}"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(ping, 1, 1), NewTopic(pong, 1, 1)])
    far = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "replay.pingpong", bootstrap, ping, pong,
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parent.parent,
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
        await drive(50, 2, trip)  # the JVM compiles its hot paths
        results = [await drive(rate, max(seconds, LEAST / rate), trip) for rate in rates]
        receiver.cancel()
        await producer.stop()
        await consumer.stop()
        return results
    finally:
        far.kill()
        await far.wait()
        await admin.delete_topics([ping, pong])
        await admin.close()


if __name__ == "__main__":
    uvloop.run(echo(*sys.argv[1:4]))

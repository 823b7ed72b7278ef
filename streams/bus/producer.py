"""One idempotent aiokafka producer at a time, from its connecting to its end, and the next one after it.

Owns the producer and its sender. A producer that failed once is never used again: its sequence numbers have a hole.
Ending one cancels its sender before anything else can run, so that nothing it still holds goes out afterwards.
A crash: the broker forgets the producer; what was not acknowledged may or may not be there.
"""

import asyncio
import logging
from dataclasses import dataclass

from aiokafka import AIOKafkaProducer

from streams.bus.closing import ended, kill_producer
from streams.bus.errors import BusUnavailable
from streams.bus.settings import KafkaSettings

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 256 * 1024
CONNECT_LIMIT_S = 10.0
BACKOFF_S = (0.05, 1.0)


@dataclass(eq=False)
class Life:
    """One producer's. `broken` tells why it ended."""

    producer: AIOKafkaProducer
    broken: asyncio.Future[BaseException]


class Producers:
    """start(), then `life` whenever `connected`; `end` a life that failed, and there will be another."""

    def __init__(self, settings: KafkaSettings, name: str) -> None:
        self.life: Life | None = None
        self.connected = asyncio.Event()  # it does not notice a broker's death while nothing is written
        self._settings = settings
        self._name = name
        self._keeper: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._keeper is not None

    def start(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_connected(), name=f"{self._name}: writer")

    async def stop(self) -> None:
        """Sends nothing more. Ends within about 6 s."""
        if self._keeper is not None:
            await ended(self._keeper)
            self._keeper = None

    def end(self, life: Life, why: BaseException) -> None:
        """At once: nothing that it holds may go out behind the batch that failed."""
        if life.broken.done():
            return
        life.broken.set_result(why)
        life.producer._sender.sender_task.cancel()
        if self.life is life:
            self.life = None
            self.connected.clear()

    async def _keep_connected(self) -> None:
        while True:
            life = await self._connect()
            self.life = life
            self.connected.set()
            try:
                sender = life.producer._sender.sender_task
                await asyncio.wait({life.broken, sender}, return_when=asyncio.FIRST_COMPLETED)
                if not life.broken.done():
                    self.end(life, BusUnavailable("the producer's sender ended"))
                log.warning("%s: producer replaced: %s", self._name, life.broken.result())
            finally:
                self.life = None
                self.connected.clear()
                await kill_producer(life.producer)

    async def _connect(self) -> Life:
        """Tries until it works."""
        backoff_s, told = BACKOFF_S[0], False
        while True:
            producer = AIOKafkaProducer(
                client_id=f"lorafleet-{self._name}",
                enable_idempotence=True,
                acks="all",
                linger_ms=0,
                max_batch_size=MAX_BATCH_BYTES,
                **self._settings.client_kwargs(),
            )
            # aiokafka drops a batch that is older than its request timeout if the partition has no leader just then, as
            # in the first moments of a broker that comes back. Here only the writer ends a batch.
            producer._message_accumulator._batch_ttl = float("inf")
            started = False
            try:
                async with asyncio.timeout(CONNECT_LIMIT_S):  # wait_for can swallow a cancellation
                    await producer.start()
                started = True
                return Life(producer, asyncio.get_running_loop().create_future())
            except Exception as error:
                if not told:
                    log.warning("%s: no producer yet: %r", self._name, error)
                    told = True
            finally:
                if not started:
                    await kill_producer(producer)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

"""Topic `usage`: what this gateway took of its customers' minutes, to the other gateways, and theirs to this one.

Owns the reader's position. Deltas go out every SHARE_S, for customers that have such limits alone; together with the
broker's few milliseconds this is for how long a limit may be exceeded. Reading begins at the end: what was taken before
this gateway's start is forgotten, as is what the log lost. A delta that could not be written is lost, to the customer's
gain: refusing chats because their count cannot be told would be worse.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from gateway.rates import Rates
from schemas.customers import Customer
from schemas.stats import Usage
from schemas.topics import USAGE
from streams.bus.errors import NotWritten, OffsetLost
from streams.bus.reader import Reader
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer
from streams.presence.claim import Claim

log = logging.getLogger(__name__)

SHARE_S = 0.25
FETCH_WAIT_MS = 250
TIDY_S = 30.0


class UsageShare:
    """`customer` finds one by its name."""

    def __init__(
        self, kafka: KafkaSettings, writer: Writer, rates: Rates, customer: Callable[[str], Customer | None]
    ) -> None:
        self._writer, self._rates, self._customer = writer, rates, customer
        ends = dict.fromkeys(range(USAGE.partitions), "end")
        self._reader = Reader(kafka, {USAGE: ends}, "usage", fetch_wait_ms=FETCH_WAIT_MS)  # type: ignore[dict-item]
        self._mine = (-1, -1)

    async def start(self, claim: Claim) -> None:
        """Waits until Kafka answers."""
        self._mine = (claim.place, claim.incarnation)
        await self._reader.start()

    async def stop(self) -> None:
        await self._reader.stop()

    async def tell(self) -> NoReturn:
        """Writes what was taken."""
        tidied = 0.0
        while True:
            await asyncio.sleep(SHARE_S)
            at = time.time_ns() // 1_000_000
            for name, (requests, tokens) in self._rates.taken().items():
                try:
                    self._writer.send_nowait(USAGE, Usage(name, *self._mine, requests, tokens, at), key=name)
                except NotWritten as error:
                    log.warning("usage of %s goes untold: %s", name, error)
            if (now := time.monotonic()) - tidied > TIDY_S:
                self._rates.tidy(now)
                tidied = now

    async def hear(self) -> NoReturn:
        """Takes what the others took."""
        while True:
            try:
                records = await self._reader.poll()
            except OffsetLost as lost:
                log.warning("%s: reading on at its end", lost)
                self._reader.seek(USAGE, lost.partition, lost.end)
                continue
            now = time.monotonic()
            for record in records:
                told: Usage | None = record.value
                if told is None or (told.gateway, told.gateway_incarnation) == self._mine:
                    continue
                if (customer := self._customer(told.customer)) is not None:
                    self._rates.taken_elsewhere(customer, told.requests, told.tokens, now)

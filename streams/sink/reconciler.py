"""Closes what a dead gateway left: an attempt in ClickHouse, and nobody to say how its request ended.

Such a request gets its one RequestFinished, with Outcome.GATEWAY_LOST, in `finished`: it goes the way of all rows.
Owns nothing. What makes it once and no more, whatever is killed when:

  1. find gateway incarnations that will write no row any more (dead_gateways.py): all they wrote is in the log.
  2. note the end of `finished`, and wait until everything before it is in ClickHouse.
  3. ask ClickHouse which of their requests have an attempt and no row, and write these rows.

The next round's end lies behind the rows of this one, so it finds them in ClickHouse. A crash before or in 3 leaves
requests for the next life's first round, which comes 30 s after its start: by then what the last life had sent is in
the log. Only a broker that is frozen for that long can hold a row back longer.
"""

import asyncio
import logging
import time
from typing import Any, NoReturn

from schemas.gateways import GatewayState
from schemas.reasons import Outcome, Tier
from schemas.stats import RequestFinished
from schemas.topics import FINISHED, GATEWAYS
from streams.bus.errors import BusUnavailable
from streams.bus.reader import Reader, Start
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader
from streams.bus.writer import Writer
from streams.presence.listening import ListeningClock
from streams.sink.dead_gateways import DeadGateways, Gateway
from streams.sink.sink import TopicSink
from streams.sink.warehouse import Warehouse

log = logging.getLogger(__name__)

ROUND_S = 10.0
LISTEN_S = 0.2
AT_ONCE = 5_000

# Attempts older than that are nobody's news: their requests were closed long ago.
LATELY = "a.batch_day >= today() - 2 AND a.at > now64(3) - INTERVAL 1 DAY"
GATEWAYS_WITH_ATTEMPTS = f"SELECT DISTINCT a.gateway, a.gateway_incarnation FROM attempts AS a WHERE {LATELY}"
UNREPORTED = f"""
WITH {{dead:Array(Tuple(UInt16, Int64))}} AS dead
SELECT a.request_id, any(a.customer), argMax(a.adapter, a.attempt), argMax(a.content_id, a.attempt),
       argMin(a.tier, a.attempt), a.gateway, a.gateway_incarnation, argMax(a.replica, a.attempt),
       max(a.attempt) + 1, max(a.prompt_tokens), max(a.first_position + a.output_tokens),
       toUnixTimestamp64Milli(max(a.at)) AS ended_ms, ended_ms - min(toUnixTimestamp64Milli(a.at) - a.total_ms)
FROM attempts AS a
WHERE {LATELY} AND has(dead, (a.gateway, a.gateway_incarnation)) AND a.request_id NOT IN
      (SELECT r.request_id FROM requests AS r WHERE has(dead, (r.gateway, r.gateway_incarnation)))
GROUP BY a.request_id, a.gateway, a.gateway_incarnation
LIMIT {{most:UInt32}}
"""


class Reconciler:
    """`sink` is the one that fills `requests` and `attempts`, in this process."""

    def __init__(self, settings: KafkaSettings, warehouse: Warehouse, sink: TopicSink) -> None:
        self._settings, self._warehouse, self._sink = settings, warehouse, sink
        self._clock = ListeningClock()
        self._dead = DeadGateways()

    async def run(self) -> NoReturn:
        """For ever. Raises what ends the table's reader, or SecondSink."""
        table: Table[GatewayState] = Table(GATEWAYS, self._gateway)
        async with (
            TableReader(self._settings, [table], "reconciler gateways") as tables,
            Writer(self._settings, "reconciler") as writer,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._listen(tables), name="reconciler listens")
            while True:
                await asyncio.sleep(ROUND_S)
                try:
                    await self._round(writer)
                except BusUnavailable as error:
                    log.warning("reconciler: the next round tries again: %s", error)

    async def _listen(self, tables: TableReader) -> NoReturn:
        while True:
            now = time.monotonic()
            self._clock.tick(now, tables.age(now))
            done, _ = await asyncio.wait({tables.failed}, timeout=LISTEN_S)
            if done:
                tables.failed.result()
                raise RuntimeError("the reconciler's reader ended")

    def _gateway(self, change: Change[GatewayState]) -> None:
        if change.value is not None:
            self._dead.apply(change.offset, change.value, change.live, self._clock.now)

    async def _round(self, writer: Writer) -> None:
        """Raises BusUnavailable, SecondSink."""
        if not self._dead.stirred(self._clock.now):
            return
        known: list[Gateway] = [(row[0], row[1]) for row in await self._warehouse.query(GATEWAYS_WITH_ATTEMPTS, {})]
        if not (dead := self._dead.among(known, self._clock.now)):
            return
        await self._sink.reached(await self._ends())
        unreported = await self._warehouse.query(UNREPORTED, {"dead": dead, "most": AT_ONCE})
        still = set(self._dead.among(dead, self._clock.now))  # one that was silent for long may be back
        rows = [row for row in map(_closing, unreported) if (row.gateway, row.gateway_incarnation) in still]
        if not rows:
            return
        await self._sink.check_alone()
        log.info("closing %d requests that a dead gateway left", len(rows))
        sent = [writer.send_nowait(FINISHED, row, key=row.customer) for row in rows]
        fates = await asyncio.gather(*sent, return_exceptions=True)
        for fate in fates:
            if isinstance(fate, BaseException):
                raise fate

    async def _ends(self) -> dict[int, int]:
        """The end of each partition of `finished`, as of now."""
        starts: dict[int, Start] = dict.fromkeys(range(self._settings.partitions(FINISHED)), "end")
        async with Reader(self._settings, {FINISHED: starts}, "reconciler ends") as reader:
            return reader.positions(FINISHED)


def _closing(row: tuple[Any, ...]) -> RequestFinished:
    """What can be known of the request. Tokens are those computed; how many its client saw nobody can tell."""
    customer, adapter, content_id, tier, gateway, incarnation, replica = row[1:8]
    attempts, prompt_tokens, output_tokens, at_unix_ms, total_ms = row[8:]
    return RequestFinished(
        request_id=row[0],
        at_unix_ms=at_unix_ms,
        customer=customer,
        model=adapter,  # the alias, if it was one, died with the gateway
        adapter=adapter,
        content_id=content_id,
        tier=Tier(tier),
        outcome=Outcome.GATEWAY_LOST,
        gateway=gateway,
        gateway_incarnation=incarnation,
        replica=replica,
        attempts=attempts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_ms=-1.0,
        tpot_ms=-1.0,
        total_ms=total_ms,
        detail="gateway_lost: its gateway died",
    )

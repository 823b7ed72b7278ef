"""This gateway's place: taken by a claim in `gateways`, kept by a beat a second, given back with a last word.

Owns the beats. A beat says how far this gateway has applied the tables; when a change came that others may wait for,
one goes out within HURRY_S. A newer claim of the place ends this process (streams/presence/claim.py).
"""

import asyncio
import time
from typing import NoReturn

from gateway.replies import Replies
from gateway.tables import Tables
from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.topics import GATEWAYS
from streams.bus.writer import Writer
from streams.presence.claim import Beats, Claim

HURRY_S = 0.05  # a burst of changes is one beat


class Lease:
    def __init__(self, writer: Writer, place: int, tables: Tables, replies: Replies) -> None:
        self._writer, self._place, self._tables, self._replies = writer, place, tables, replies
        self._claim: Claim | None = None
        self._beats = Beats(writer, GATEWAYS, place, self._beat)
        self._hurry: asyncio.TimerHandle | None = None

    async def take(self, take_over: bool) -> Claim:
        """Waits until the place is free, and claims it. The tables are caught up, the replies started.

        Raises PlaceTakenError, ReplacedError, BusUnavailable.
        """
        self._claim = await self._tables.place.claim(self._writer, self._replies.end, self._make_claim, take_over)
        return self._claim

    async def keep(self) -> NoReturn:
        """Beats for ever."""
        await self._beats.run()

    def hurry(self) -> None:
        """Somebody may wait for what has just been applied."""
        if self._hurry is None:
            self._hurry = asyncio.get_running_loop().call_later(HURRY_S, self._beat_now)

    def _beat_now(self) -> None:
        self._hurry = None
        self._beats.hurry()

    async def give_back(self) -> None:
        """The last word, once `keep` has ended: workers stop what they still run for this gateway."""
        if self._claim is not None:
            await self._beats.last(lambda number: self._make_beat(number, gone=True))

    def _make_claim(self, nonce: str, start_offset: int) -> GatewayClaim:
        return GatewayClaim(self._place, nonce, start_offset, _unix_ms())

    def _beat(self, number: int) -> GatewayBeat:
        return self._make_beat(number, gone=False)

    def _make_beat(self, number: int, gone: bool) -> GatewayBeat:
        assert self._claim is not None
        return GatewayBeat(
            gateway=self._place,
            incarnation=self._claim.incarnation,
            beat=number,
            at_unix_ms=_unix_ms(),
            tables=self._tables.positions(),
            gone=gone,
        )


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000

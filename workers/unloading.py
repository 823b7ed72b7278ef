"""Takes adapters out of slots when somebody asks for it: never one that is in use.

In use is what an attempt of this worker runs with or waits for, or is on its way: the worker knows of every attempt
before the engine does, and of its end after it, so what is not in use here has no lease there. Drained, new attempts
for it are refused here as a draining replica refuses all (gateways take them to another replica, and where there is
none they try again for some seconds) until the last one that was here has ended, the adapter has left, or the time is
up; then nothing was changed. What is retired leaves unasked, after its last request. A crash ends the drain with all
else.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from schemas.adapters import AdapterRecord
from schemas.replicas import Answered
from workers.loading import Loading

LOOK_S, RETIRED_LOOK_S = 0.02, 1.0


class Unloading:
    """`users(content_id)`: attempts that run with the content or wait for it. `closed`: contents for no new attempt."""

    def __init__(self, loading: Loading, users: Callable[[str], int]) -> None:
        self._loading, self._users = loading, users
        self._drains: dict[str, int] = {}  # content id -> drains of it

    def closed(self, content_id: str) -> bool:
        return content_id in self._drains

    async def run(self, retired: Callable[[str], bool]) -> NoReturn:
        """Looks for ever for contents in slots of which no adapter may be asked for any more."""
        while True:
            await asyncio.sleep(RETIRED_LOOK_S)
            await self.sweep(retired)

    async def sweep(self, retired: Callable[[str], bool]) -> None:
        for content_id in self._loading.residency.contents():
            if retired(content_id) and not self._busy(content_id):
                await self._loading.unload(content_id)

    async def unload(self, record: AdapterRecord, drain_s: float) -> tuple[Answered, str]:
        if not drain_s:
            return await self._leave(record, 0.0)
        content_id = record.content_id
        self._drains[content_id] = self._drains.get(content_id, 0) + 1
        try:
            return await self._leave(record, time.monotonic() + drain_s)
        finally:
            self._drains[content_id] -= 1
            if not self._drains[content_id]:
                del self._drains[content_id]

    async def _leave(self, record: AdapterRecord, until: float) -> tuple[Answered, str]:
        content_id = record.content_id
        while busy := self._busy(content_id):
            if time.monotonic() >= until:
                return Answered.IN_USE, f"{record.adapter_id} is in use: {busy}"
            await asyncio.sleep(LOOK_S)
        # From here to the word to the engine nothing waits, so no attempt comes in between.
        if not self._loading.residency.holds(content_id):
            return Answered.NOT_THERE, f"{record.adapter_id} is in no slot"
        if refusal := await self._loading.unload(content_id):
            return Answered.IN_USE, f"{record.adapter_id} is in use: {refusal}"
        return Answered.DONE, ""

    def _busy(self, content_id: str) -> str:
        """By whom; empty if it may go."""
        if users := self._users(content_id):
            return f"{users} requests run with it or wait for it"
        return "it is being loaded" if self._loading.coming(content_id) else ""

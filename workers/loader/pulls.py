"""Brings what this replica owns to its disk and RAM ahead of requests: a new adapter, a new replica, a restart.

One at a time, most used first, at a bounded rate and with a rest after each as long as it took: what runs
must not feel it. A pull takes free room, and what this replica does not own; it never takes the place of an owned one.
While loads chase evictions it stops. What failed for good is not tried again until its record changes, what may come
back is, after a pause. A crash loses nothing: the next life looks again at what is missing.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, Protocol

from schemas.adapters import AdapterRecord
from schemas.placement import OwnerPlan
from schemas.reasons import AdapterStatus, Tier
from workers.loader.errand import Errand
from workers.loader.folders import Folders
from workers.loader.images import Base
from workers.loader.level import NoRoom
from workers.loader.loader import Loader, LoadFailed
from workers.loader.owned import Settled, Usage, most_used_first, owns

log = logging.getLogger(__name__)

LOOK_S, AGAIN_S, TOUCH_S = 1.0, 30.0, 30.0
_SLICE = 20  # adapters looked at in one turn of the loop


class Catalogue(Protocol):
    """What pulls ask of the fleet's tables."""

    version: int  # rises with every change of `records` or `plans`

    @property
    def records(self) -> Mapping[str, AdapterRecord]: ...

    @property
    def plans(self) -> Mapping[str, OwnerPlan]: ...

    @property
    def requests(self) -> Mapping[str, float]:
        """Of the whole fleet in the last window, by adapter id."""
        ...

    def live_replicas(self, base_hash: str) -> frozenset[int]: ...


class Pulls:
    """`thrashing`: asked before each pull. `missing`: owned adapters that were not here when it last looked."""

    def __init__(
        self,
        replica: int,
        catalogue: Catalogue,
        loader: Loader,
        folders: Folders,
        base: Base,
        thrashing: Callable[[float], list[Tier]],
        bytes_per_s: float,
    ) -> None:
        self.usage = Usage()
        self.missing = 0
        self._replica, self._catalogue, self._loader = replica, catalogue, loader
        self._folders, self._base, self._thrashing = folders, base, thrashing
        self._bytes_per_s = bytes_per_s
        self._settled = Settled()
        self._looked: tuple[int, frozenset[int]] = (-1, frozenset())
        self._owned: dict[str, AdapterRecord] = {}  # by content id
        self._failed: dict[str, AdapterRecord] = {}  # for good, by content id
        self._again_at: dict[str, float] = {}
        self._touched_at = time.monotonic()

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.round(time.monotonic())

    async def round(self, now: float) -> None:
        """Looks who owns what, and pulls all that is missing and has room."""
        if now - self._touched_at > TOUCH_S:
            self._touched_at = now
            await asyncio.to_thread(self._folders.touch, self.usage.used(now))
        live = self._settled.see(self._catalogue.live_replicas(self._base.hash), now)
        if self._looked != (seen := (self._catalogue.version, live)):
            self._looked, self._owned = seen, await self._look(live)
        wanted = self._wanted(now)
        self.missing = len(wanted)
        await self._pull(wanted)

    async def _look(self, live: frozenset[int]) -> dict[str, AdapterRecord]:
        owned, plans = {}, self._catalogue.plans
        for number, record in enumerate(list(self._catalogue.records.values())):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)  # thousands of them: tokens must not wait
            if record.status is AdapterStatus.READY and owns(
                self._replica, record.adapter_id, live, plans.get(record.adapter_id)
            ):
                owned[record.content_id] = record
        return owned

    def _wanted(self, now: float) -> list[AdapterRecord]:
        """What is not in RAM, nor known not to come."""
        missing = [
            record
            for content_id, record in self._owned.items()
            if self._loader.tier(record) is not Tier.RAM
            and self._failed.get(content_id) != record
            and self._again_at.get(content_id, 0.0) <= now
            and not self._base.refuses(record)
        ]
        here = {record.content_id: self.usage.score(record.content_id, now) for record in missing}
        return most_used_first(missing, here, self._catalogue.requests, self._loader.disk.names())

    async def _pull(self, wanted: Iterable[AdapterRecord]) -> None:
        """Into RAM while that has room, then onto the disk while that has."""
        to_ram = True
        for record in wanted:
            if self._thrashing(time.monotonic()):
                return
            try:
                if to_ram:
                    to_ram = await self._came(record, to_ram=True)
                if not to_ram and not await self._came(record, to_ram=False):
                    return
            except LoadFailed as error:
                if error.lasting:
                    self._failed[record.content_id] = record
                else:
                    self._again_at[record.content_id] = time.monotonic() + AGAIN_S
                log.warning("%s, owned here, cannot be pulled: %s", record.adapter_id, error)

    async def _came(self, record: AdapterRecord, to_ram: bool) -> bool:
        """False if there is no room for it. Rests afterwards."""
        began_s, owned = time.monotonic(), self._owned
        try:
            errand = Errand(lambda content_id: content_id not in owned, self._bytes_per_s)
            await self._loader.pull(record, to_ram, errand)
        except NoRoom:
            return False
        self.missing -= self._loader.tier(record) is Tier.RAM
        await asyncio.sleep(time.monotonic() - began_s)
        return True

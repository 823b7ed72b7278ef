"""Brings adapters into the engine's slots: remote -> disk -> ram is the loader's, ram -> slot the engine's.

Owns the loads on their way: one per content, however many attempts wait for it. An image stays pinned in RAM from the
moment the loader has it until the engine has copied it or refused it. What cannot be had ends the attempts that wait
for it, and answers the commands that do, with the reason, and leaves no trace but its line in the beats: the next
attempt tries anew. A crash loses nothing but time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from schemas.adapters import AdapterRecord
from schemas.engine import Command, FailAdapter, LoadSlot, Missing, SlotEvicted, SlotFailed, SlotLoaded, UnloadSlot
from schemas.reasons import Tier
from schemas.replicas import FailedLoad
from schemas.stats import CacheEvent
from workers.answers import FailedLoads
from workers.loader.loader import Loader, LoadFailed
from workers.residency import Residency

log = logging.getLogger(__name__)

LOAD_LIMIT_S = 90.0  # longer than the loader waits for a store that is away
IN_USE = "in use"  # the engine's answer to an UnloadSlot that it refuses


class Engine(Protocol):
    """What loading says to the engine."""

    def send(self, command: Command) -> None: ...


class SlotRefusedError(Exception):
    """The engine could not take the image."""


class Loading:
    """`find(content_id)` gives an adapter of that content; None if none is known here."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        on_event: Callable[[CacheEvent], None],
        replica: int,
        incarnation: int,
        find: Callable[[str], AdapterRecord | None],
    ) -> None:
        self.residency, self.failed_loads = Residency(), FailedLoads()
        self._engine, self._loader, self._on_event, self._find = engine, loader, on_event, find
        self._replica, self._incarnation = replica, incarnation
        self._wanted: asyncio.Queue[AdapterRecord] = asyncio.Queue()  # each content once: `_loads` has it too
        self._loads: dict[str, asyncio.Future[FailedLoad | None]] = {}  # contents on their way, and how that ends
        self._slots: dict[str, asyncio.Future[SlotLoaded]] = {}  # images that the engine was given
        self._leaving: dict[str, asyncio.Future[str]] = {}  # contents that the engine was told to take out

    def tier(self, record: AdapterRecord) -> Tier:
        """Where an attempt finds its adapter now."""
        return Tier.GPU if self.residency.holds(record.content_id) else self._loader.tier(record)

    def want(self, record: AdapterRecord) -> None:
        """Brings the adapter into a slot unless it is there or on its way."""
        if record.content_id not in self._loads and not self.residency.holds(record.content_id):
            self._loads[record.content_id] = asyncio.get_running_loop().create_future()
            self._wanted.put_nowait(record)

    async def loaded(self, record: AdapterRecord) -> FailedLoad | None:
        """Brings it, and waits until it is in a slot, or why it is not."""
        self.want(record)
        coming = self._loads.get(record.content_id)
        return None if coming is None else await asyncio.shield(coming)

    def coming(self, content_id: str) -> bool:
        """Whether it is on its way into a slot."""
        return content_id in self._loads

    async def run(self) -> None:
        """Loads what is wanted, all at once: the loader bounds what it does at a time. For ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                record = await self._wanted.get()
                group.create_task(self._load(record), name=f"load {record.adapter_id}")

    async def unload(self, content_id: str) -> str:
        """Takes it out of its slot; why not, if the engine refuses. Not for what is on its way."""
        leaving = self._leaving.get(content_id)
        if leaving is None:
            leaving = self._leaving[content_id] = asyncio.get_running_loop().create_future()
            self._engine.send(UnloadSlot(content_id))
        return await asyncio.shield(leaving)

    def event(self, event: Missing | SlotLoaded | SlotEvicted | SlotFailed) -> None:
        """The engine's word on a slot."""
        now, waiting = time.monotonic(), self._slots.get(event.content_id)
        match event:
            case Missing():
                record = self._find(event.content_id)
                if record is None:
                    self._engine.send(FailAdapter(event.content_id, "no adapter with this content is known here"))
                else:
                    self.want(record)
            case SlotLoaded():
                self.residency.loaded(event, now)
                self._ended(event.content_id, None)  # here, for the engine may evict it and miss it right away
                if waiting is not None and not waiting.done():
                    waiting.set_result(event)
            case SlotEvicted():
                size = self.residency.evicted(event, now)
                if event.slot:
                    self._say(event.content_id, "evict", Tier.GPU, Tier.NONE, size, 0.0)
                self._left(event.content_id, "")
            case SlotFailed(reason=reason) if reason == IN_USE:
                self._left(event.content_id, "the engine runs with it")
            case SlotFailed():
                if waiting is not None and not waiting.done():
                    waiting.set_exception(SlotRefusedError(event.reason))

    async def _load(self, record: AdapterRecord) -> None:
        began, source, content_id = time.monotonic(), self._loader.tier(record), record.content_id
        slot: asyncio.Future[SlotLoaded] = asyncio.get_running_loop().create_future()
        self._slots[content_id] = slot
        try:
            async with contextlib.AsyncExitStack() as pinned:
                async with asyncio.timeout(LOAD_LIMIT_S):
                    path = await pinned.enter_async_context(self._loader.image(record))
                self._engine.send(LoadSlot(content_id, str(path)))
                loaded = await slot  # without limit: the engine may have to wait until a slot falls idle
        except Exception as error:  # whatever it is, it is this adapter's trouble and not its neighbours'
            why = f"not had within {LOAD_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
            log.warning("%s: load from %s failed: %s", record.adapter_id, source, why)
            self._engine.send(FailAdapter(content_id, why))
            lasting = isinstance(error, LoadFailed) and error.lasting
            self._ended(content_id, FailedLoad(record.adapter_id, why, time.time_ns() // 1_000_000, lasting))
            if not isinstance(error, LoadFailed):  # that the loader has told itself
                self._say(content_id, "fail", Tier.GPU, source, 0, _ms_since(began), why)
        else:
            self._say(content_id, "load", Tier.GPU, source, loaded.bytes, _ms_since(began))
        finally:
            if self._slots.get(content_id) is slot:
                del self._slots[content_id]

    def _ended(self, content_id: str, failure: FailedLoad | None) -> None:
        """Tells all who wait for it; from here on it may be wanted anew."""
        if (coming := self._loads.pop(content_id, None)) is not None:
            coming.set_result(failure)
        if failure is not None:
            self.failed_loads.failed(failure.adapter_id, failure.reason, failure.at_unix_ms, failure.lasting)
        elif (record := self._find(content_id)) is not None:
            self.failed_loads.loaded(record.adapter_id)

    def _left(self, content_id: str, refusal: str) -> None:
        if (leaving := self._leaving.pop(content_id, None)) is not None:
            leaving.set_result(refusal)

    def _say(
        self, content_id: str, event: str, tier: Tier, source: Tier, size: int, duration_ms: float, reason: str = ""
    ) -> None:
        record = self._find(content_id)
        self._on_event(
            CacheEvent(
                at_unix_ms=0,
                replica=self._replica,
                incarnation=self._incarnation,
                adapter=record.adapter_id if record is not None else "",
                content_id=content_id,
                event=event,
                tier=tier,
                source=source,
                bytes=size,
                duration_ms=duration_ms,
                reason=reason,
            )
        )


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 3)

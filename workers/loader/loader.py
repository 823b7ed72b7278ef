"""An adapter's way from the store over the disk into shared memory: one at a time per content, checked at each step.

Owns the loads on their way, and which of them made what is there. A file of an earlier life that turns out bad is
dropped and fetched again. A load that fails leaves nothing behind and tells all who wait the same reason; the next one
tries anew. A crash leaves whole canonical files, and parts and images that the next `start` removes.
All files are read and written in threads; the book-keeping belongs to the event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from schemas.adapters import AdapterRecord
from schemas.reasons import Tier
from schemas.stats import CacheEvent
from streams.adapters.canonical import check_header
from streams.adapters.locations import InvalidLocation
from streams.adapters.store import Store, StoreError, Unavailable
from streams.adapters.tensors import BadFile
from workers.loader.download import Downloads, WrongFile
from workers.loader.errand import Errand
from workers.loader.events import Events
from workers.loader.flight import Flight
from workers.loader.folders import Folders
from workers.loader.images import Base, Images
from workers.loader.level import Level, NoRoom
from workers.loader.shelf import NeverFits
from workers.slot_image import ImageError

log = logging.getLogger(__name__)


class LoadFailed(Exception):
    """The adapter cannot be had now; the message says why. `lasting`: nor later, as its record and file are."""

    def __init__(self, reason: str, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


class Loader:
    """`start` before use, `stop` at the end. `on_event` gets what happens in the disk and RAM tiers; it must not block.

    The events' replica and incarnation are those given here; their time is left to `on_event`.
    """

    def __init__(
        self,
        folders: Folders,
        store: Store,
        base: Base,
        disk_bytes: int,
        ram_bytes: int,
        on_event: Callable[[CacheEvent], None],
        replica: int = -1,
        incarnation: int = -1,
    ) -> None:
        self._events = Events(on_event, replica, incarnation)
        self._disk = Level(Tier.DISK, disk_bytes, folders.disk, self._events)
        self._ram = Level(Tier.RAM, ram_bytes, folders.ram, self._events)
        self.disk, self.ram = self._disk.shelf, self._ram.shelf
        self._folders, self._base = folders, base
        self._downloads = Downloads(store, self._disk, folders.part, self._events)
        self._images = Images(base, self._disk, self._ram)
        self._flights: dict[str, Flight] = {}
        self._users: dict[str, asyncio.Task[object] | None] = {}  # holder -> the task that uses an image
        self._named = 0

    async def start(self) -> None:
        """Takes over what an earlier life left on the disk and is whole, as far as it fits. Raises OSError."""
        kept = await asyncio.to_thread(self._folders.clean)
        bad = await asyncio.to_thread(self._bad, list(kept))
        for content_id, size in kept.items():
            going = [content_id]
            if content_id not in bad:
                with contextlib.suppress(NeverFits):
                    going = list(self.disk.reserve(content_id, size, "start") or {})
                    self.disk.settle(content_id)
                    self.disk.release(content_id, "start")
            for gone in going:
                self._disk.path(gone).unlink(missing_ok=True)
        for content_id, reason in bad.items():
            log.error("content %s, left on the disk by an earlier life, is dropped: %s", content_id, reason)
            self._events.dropped(content_id, Tier.DISK, reason)

    def _bad(self, content_ids: list[str]) -> dict[str, str]:
        found = {}
        for content_id in content_ids:
            try:
                check_header(self._disk.path(content_id), content_id, self._base.hash)
            except (BadFile, OSError) as error:
                found[content_id] = str(error)
        return found

    async def stop(self) -> None:
        """Ends the loads on their way. The disk tier stays, the images go."""
        tasks = []
        for flight in self._flights.values():
            flight.errand.hurry()  # a thread that takes its time is waited for
            if flight.task is not None:
                flight.task.cancel()
                tasks.append(flight.task)
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.to_thread(self._downloads.stop)
        await asyncio.to_thread(self._images.stop)
        await asyncio.to_thread(self._folders.remove_ram)

    def tier(self, record: AdapterRecord) -> Tier:
        """Where the adapter is at this instant."""
        if self.ram.holds(record.content_id):
            return Tier.RAM
        return Tier.DISK if self.disk.holds(record.content_id) else Tier.REMOTE

    @property
    def on_their_way(self) -> int:
        """Loads that have begun and not ended."""
        return len(self._flights)

    def live(self) -> set[str]:
        """The holders that may have leases now: loads on their way, and tasks in the midst of using an image."""
        users = {holder for holder, task in self._users.items() if task is not None and not task.done()}
        return users | {flight.name for flight in self._flights.values()}

    @contextlib.asynccontextmanager
    async def image(self, record: AdapterRecord) -> AsyncIterator[Path]:
        """The adapter's image in shared memory; it stays there while the context lives. Raises LoadFailed."""
        content_id, holder = record.content_id, self._name(record.adapter_id)
        self._users[holder] = asyncio.current_task()
        try:
            if self.ram.holds(content_id) and not self._ram.path(content_id).exists():
                # Some systems clear a user's shared memory at log-out.
                if content_id in self.ram.leases():
                    raise LoadFailed("its image is gone from shared memory while it is in use")
                self._ram.drop(content_id)
            if self.ram.holds(content_id):
                self.ram.lease(content_id, holder)
            else:
                await self._wait_for(record, holder)
            try:
                yield self._ram.path(content_id)
            finally:
                self._ram.release(content_id, holder)
        finally:
            del self._users[holder]

    async def pull(self, record: AdapterRecord, to_ram: bool, errand: Errand) -> None:
        """Brings the adapter ahead of requests, unless it is there or on its way. Raises LoadFailed, NoRoom."""
        flight = self._flights.get(record.content_id)
        if flight is None and not (self.ram if to_ram else self.disk).holds(record.content_id):
            flight = self._begin(record, errand, to_ram)
        if flight is not None:
            await self._end_of(flight)

    async def _wait_for(self, record: AdapterRecord, holder: str) -> None:
        """Returns with a lease on the image."""
        flight = self._flights.get(record.content_id) or self._begin(record, Errand(), True)
        flight.join(holder)
        try:
            await self._end_of(flight)
        except asyncio.CancelledError:
            flight.waiters.discard(holder)
            if flight.arrived:
                self._ram.release(record.content_id, holder)
            raise

    def _begin(self, record: AdapterRecord, errand: Errand, to_ram: bool) -> Flight:
        flight = self._flights[record.content_id] = Flight(self._name("load"), errand, to_ram, self.tier(record))
        flight.task = asyncio.create_task(self._fly(record, flight), name=f"load {record.adapter_id}")
        flight.task.add_done_callback(_seen)
        return flight

    @staticmethod
    async def _end_of(flight: Flight) -> None:
        """Others may wait for it too: that this one gives up does not end it. Raises LoadFailed, NoRoom."""
        assert flight.task is not None
        await asyncio.wait({flight.task})
        if flight.task.cancelled():
            raise LoadFailed("the worker is stopping")
        match flight.task.exception():
            case None:
                return
            case NoRoom() as error:
                raise NoRoom(str(error)) from error
            case LoadFailed() as error:
                raise LoadFailed(str(error), error.lasting) from error
            case error:
                raise LoadFailed(str(error) or repr(error)) from error

    async def _fly(self, record: AdapterRecord, flight: Flight) -> None:
        content_id, began_s = record.content_id, time.monotonic()
        try:
            try:
                size = await self._bring(record, flight)
            except BadFile as error:
                self._drop_from_disk(record, str(error))
                raise LoadFailed(f"{record.weights_uri}: {error}", lasting=True) from error
            except OSError as error:
                raise LoadFailed(f"on this machine: {error.strerror or error}") from error
            except Unavailable as error:
                raise LoadFailed(str(error)) from error
            except (StoreError, WrongFile, NeverFits, InvalidLocation, ImageError, ValueError) as error:
                raise LoadFailed(str(error), lasting=True) from error
        except LoadFailed as error:
            self._events.failed(record, Tier.RAM, flight.source, began_s, str(error))
            raise
        finally:
            del self._flights[content_id]
        # From here to its end this task does not wait, so no waiter comes or goes in between.
        if size:
            self._events.loaded(record, Tier.RAM, flight.source, size, began_s)
            self.ram.settle(content_id)
            for holder in flight.waiters:
                self.ram.lease(content_id, holder)
            self._ram.release(content_id, flight.name)

    async def _bring(self, record: AdapterRecord, flight: Flight) -> int:
        """The image's bytes; 0 if it was to go no further than the disk."""
        if refusal := self._base.refuses(record):
            raise LoadFailed(refusal, lasting=True)
        if not self.disk.holds(record.content_id):  # it may have been evicted since the load was begun
            flight.source = Tier.REMOTE
            await self._downloads.fetch(record, flight.errand, flight.name)
        if not flight.to_ram:
            return 0
        try:
            return await self._images.lay_out(record, flight.errand, flight.name)
        except BadFile as error:
            if flight.source is Tier.REMOTE:
                raise
            # The disk's copy is not what it was: the store's may still be.
            self._drop_from_disk(record, str(error))
            flight.source = Tier.REMOTE
            await self._downloads.fetch(record, flight.errand, flight.name)
            return await self._images.lay_out(record, flight.errand, flight.name)

    def _drop_from_disk(self, record: AdapterRecord, reason: str) -> None:
        self._disk.drop(record.content_id)
        log.error("%s: dropped from the disk: %s", record.adapter_id, reason)
        self._events.failed(record, Tier.DISK, Tier.DISK, time.monotonic(), reason)

    def _name(self, of: str) -> str:
        """A holder's name, never used twice."""
        self._named += 1
        return f"{of}#{self._named}"


def _seen(task: asyncio.Task[None]) -> None:
    """Its failure has been told as an event; nobody may be left to wait for it."""
    if not task.cancelled():
        task.exception()

"""An adapter's way from the store over the disk into shared memory: one at a time per content, checked at each step.

Owns both tiers' files and budgets. A download is checked against the record's sha256; a file that is read into RAM has
its content id computed anew over all its values, whether it just came or was left by an earlier life, and is made for
the base that is served here. So neither a bad disk nor a swapped file gets into a slot: such a file is dropped and
fetched again. A load that fails leaves nothing behind and tells all who wait the same reason; the next one tries anew.
A crash leaves whole canonical files, and parts and images that the next `start` removes.
All files are read and written in threads; the book-keeping belongs to the event loop.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from schemas.adapters import AdapterRecord
from schemas.reasons import Tier
from schemas.stats import CacheEvent
from streams.adapters.canonical import canonical_form, read_canonical
from streams.adapters.locations import InvalidLocation, parse_location
from streams.adapters.shape import ModelShape
from streams.adapters.store import Fetched, Store, StoreError, Unavailable
from streams.adapters.tensors import BadFile
from workers.loader.folders import Folders
from workers.loader.shelf import NeverFits, Shelf
from workers.slot_image import ImageError, Precision, image_bytes, slot_rank, write_image

log = logging.getLogger(__name__)

PARALLEL_DOWNLOADS = 2
Result = TypeVar("Result")
RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0)


class LoadFailed(Exception):
    """The adapter cannot be had now; the message says why."""


class Base(msgspec.Struct, frozen=True):
    """The base that is served here, and the ranks that its slots are for, the largest last."""

    hash: str
    shape: ModelShape
    slot_ranks: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        return self.slot_ranks[-1]


class _Flight:
    """A load on its way. `waiters` get one pin each when it arrives."""

    def __init__(self) -> None:
        self.waiters = 0
        self.image_bytes = 0
        self.task: asyncio.Task[None] | None = None


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
        self.disk, self.ram = Shelf(disk_bytes), Shelf(ram_bytes)
        self._folders, self._store, self._base = folders, store, base
        self._on_event, self._replica, self._incarnation = on_event, replica, incarnation
        self._flights: dict[str, _Flight] = {}
        self._room = asyncio.Event()
        self._downloads = asyncio.Semaphore(PARALLEL_DOWNLOADS)
        self._network = ThreadPoolExecutor(PARALLEL_DOWNLOADS, thread_name_prefix="download")
        self._files = ThreadPoolExecutor(PARALLEL_DOWNLOADS, thread_name_prefix="image")

    async def start(self) -> None:
        """Takes over what an earlier life left on the disk, as far as it fits. Raises OSError."""
        kept = await asyncio.to_thread(self._folders.clean)
        for content_id, size in kept.items():
            try:
                going = self.disk.reserve(content_id, size) or {}
            except NeverFits:
                going = {content_id: size}
            else:
                self.disk.settle(content_id)
                self.disk.unpin(content_id)
            for gone in going:
                self._folders.disk(gone).unlink(missing_ok=True)

    async def stop(self) -> None:
        """Ends the loads on their way. The disk tier stays, the images go."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.to_thread(self._network.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._files.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._folders.remove_ram)

    def tier(self, record: AdapterRecord) -> Tier:
        """Where the adapter is at this instant."""
        if self.ram.holds(record.content_id):
            return Tier.RAM
        return Tier.DISK if self.disk.holds(record.content_id) else Tier.REMOTE

    @contextlib.asynccontextmanager
    async def image(self, record: AdapterRecord) -> AsyncIterator[Path]:
        """The adapter's image in shared memory; it stays there while the context lives. Raises LoadFailed."""
        content_id = record.content_id
        if self.ram.holds(content_id) and not self._folders.ram(content_id).exists():
            # Some systems clear a user's shared memory at log-out.
            if content_id in self.ram.pinned():
                raise LoadFailed("its image is gone from shared memory while it is in use")
            self.ram.drop(content_id)
        if self.ram.holds(content_id):
            self.ram.pin(content_id)
        else:
            await self._wait_for(record)
        try:
            yield self._folders.ram(content_id)
        finally:
            self._release(self.ram, content_id)

    async def _wait_for(self, record: AdapterRecord) -> None:
        """Returns with one pin on the image."""
        flight = self._flights.get(record.content_id)
        if flight is None:
            flight = self._flights[record.content_id] = _Flight()
            flight.task = asyncio.create_task(self._fly(record, flight), name=f"load {record.adapter_id}")
            flight.task.add_done_callback(_seen)
        assert flight.task is not None
        flight.waiters += 1
        try:
            # Others may wait for it too: that this one gives up does not end it.
            await asyncio.wait({flight.task})
        except asyncio.CancelledError:
            flight.waiters -= 1
            if flight.task.done() and not flight.task.cancelled() and flight.task.exception() is None:
                self._release(self.ram, record.content_id)
            raise
        if flight.task.cancelled():
            raise LoadFailed("the worker is stopping")
        if (error := flight.task.exception()) is not None:
            raise LoadFailed(str(error)) from error

    async def _fly(self, record: AdapterRecord, flight: _Flight) -> None:
        content_id, began_s, source = record.content_id, time.monotonic(), self.tier(record)
        try:
            try:
                self._check(record)
                if not self.disk.holds(content_id):
                    await self._download(record)
                try:
                    flight.image_bytes = await self._lay_out(record)
                except BadFile as error:
                    if source is Tier.REMOTE:
                        raise
                    # The disk's copy is not what it was: the store's may still be.
                    self._drop_from_disk(record, str(error))
                    source = Tier.REMOTE
                    await self._download(record)
                    flight.image_bytes = await self._lay_out(record)
            except BadFile as error:
                self._drop_from_disk(record, str(error))
                raise LoadFailed(f"{record.weights_uri}: {error}") from error
            except (StoreError, NeverFits, InvalidLocation, ImageError, OSError, ValueError) as error:
                raise LoadFailed(str(error)) from error
        except LoadFailed as error:
            self._say(record, "fail", Tier.RAM, source, 0, began_s, str(error))
            raise
        finally:
            del self._flights[content_id]
        # From here to its end this task does not wait, so no waiter comes or goes in between.
        self._say(record, "load", Tier.RAM, source, flight.image_bytes, began_s)
        self.ram.settle(content_id)
        self.ram.pin(content_id, flight.waiters)
        self._release(self.ram, content_id)

    def _check(self, record: AdapterRecord) -> None:
        if record.base_model_hash != self._base.hash:
            raise LoadFailed(
                f"{record.adapter_id} is made for base {record.base_model_hash}, here is {self._base.hash}"
            )
        if record.rank > self._base.max_rank:
            raise LoadFailed(f"{record.adapter_id} has rank {record.rank}, the slots here have {self._base.max_rank}")

    async def _download(self, record: AdapterRecord) -> None:
        """From the store to the disk tier. Raises StoreError, LoadFailed, NeverFits, OSError."""
        began_s, path = time.monotonic(), self._folders.disk(record.content_id)
        location = parse_location(record.weights_uri)

        def fetch() -> Fetched:
            # The sum is checked before the file is where a later life would take it over.
            arriving = path.with_name(f"{path.name}.part")
            try:
                found = self._store.get(location, arriving, record.size_bytes)
                if found.sha256 != record.checksum or found.size_bytes != record.size_bytes:
                    raise LoadFailed(
                        f"{location} has {found.size_bytes} bytes of sha256 {found.sha256}; "
                        f"its record says {record.size_bytes} of {record.checksum}"
                    )
                os.replace(arriving, path)
            finally:
                arriving.unlink(missing_ok=True)
            return found

        async with self._downloads:
            await self._reserve(self.disk, record.content_id, record.size_bytes)
            try:
                await self._with_retries(record, fetch)
            except BaseException:
                self._release(self.disk, record.content_id, gone=True)
                raise
            self.disk.settle(record.content_id)
            self._release(self.disk, record.content_id)
        self._say(record, "load", Tier.DISK, Tier.REMOTE, record.size_bytes, began_s)

    async def _with_retries(self, record: AdapterRecord, fetch: Callable[[], Fetched]) -> None:
        """Only what may pass is tried again: a store that is away, not one that has no such file."""
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                await self._in_thread(self._network, fetch)
                return
            except Unavailable as error:
                if pause_s is None:
                    raise
                log.warning("%s: tried again in %g s: %s", record.adapter_id, pause_s, error)
                await asyncio.sleep(pause_s)

    async def _lay_out(self, record: AdapterRecord) -> int:
        """From the disk into an image in shared memory, pinned once and not yet settled: its bytes.

        The image is for the smallest slots that hold the adapter, in the file's precision. Raises BadFile, ImageError.
        """
        content_id, base = record.content_id, self._base
        source, target = self._folders.disk(content_id), self._folders.ram(content_id)

        def form() -> tuple[int, Precision]:
            try:
                rank, dtype = canonical_form(source)
                return slot_rank(rank, base.slot_ranks), Precision[dtype]
            except OSError as error:
                raise BadFile(f"it cannot be read from the disk: {error.strerror}") from None

        def lay_out() -> None:
            try:
                os.utime(source)  # so that the next life knows what was used last
                delta = read_canonical(source, content_id, base.hash, base.shape)
            except OSError as error:
                raise BadFile(f"it cannot be read from the disk: {error.strerror}") from None
            write_image(target, base.shape, rank, content_id, delta, precision)

        self.disk.pin(content_id)
        try:
            rank, precision = await self._in_thread(self._files, form)
            size = image_bytes(base.shape, rank, precision)
            await self._reserve(self.ram, content_id, size)
            try:
                await self._in_thread(self._files, lay_out)
            except BaseException:
                target.unlink(missing_ok=True)
                self._release(self.ram, content_id, gone=True)
                raise
        finally:
            self._release(self.disk, content_id)
        return size

    async def _reserve(self, shelf: Shelf, content_id: str, size_bytes: int) -> None:
        """Waits for room. What goes is unlinked before anything else runs: its name may be needed again right away."""
        while (going := shelf.reserve(content_id, size_bytes)) is None:
            self._room.clear()
            await self._room.wait()
        tier, path_of = (Tier.DISK, self._folders.disk) if shelf is self.disk else (Tier.RAM, self._folders.ram)
        for gone, gone_bytes in going.items():
            path_of(gone).unlink(missing_ok=True)
            self._tell("", gone, "evict", tier, Tier.NONE, gone_bytes, 0.0)

    def _release(self, shelf: Shelf, content_id: str, gone: bool = False) -> None:
        shelf.unpin(content_id)
        if gone:
            shelf.drop(content_id)
        self._room.set()

    def _drop_from_disk(self, record: AdapterRecord, reason: str) -> None:
        self._folders.disk(record.content_id).unlink(missing_ok=True)
        if self.disk.holds(record.content_id):
            self.disk.drop(record.content_id)
            self._room.set()
        log.error("%s: dropped from the disk: %s", record.adapter_id, reason)
        self._say(record, "fail", Tier.DISK, Tier.DISK, 0, time.monotonic(), reason)

    @staticmethod
    async def _in_thread(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        """Also when cancelled it returns only after the thread has: nobody may touch its files before."""
        running = asyncio.get_running_loop().run_in_executor(pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()
            raise

    def _say(
        self, record: AdapterRecord, event: str, tier: Tier, source: Tier, size: int, began_s: float, reason: str = ""
    ) -> None:
        duration_ms = (time.monotonic() - began_s) * 1000
        self._tell(record.adapter_id, record.content_id, event, tier, source, size, duration_ms, reason)

    def _tell(
        self,
        adapter_id: str,
        content_id: str,
        event: str,
        tier: Tier,
        source: Tier,
        size: int,
        duration_ms: float,
        reason: str = "",
    ) -> None:
        self._on_event(
            CacheEvent(
                at_unix_ms=0,
                replica=self._replica,
                incarnation=self._incarnation,
                adapter=adapter_id,
                content_id=content_id,
                event=event,
                tier=tier,
                source=source,
                bytes=size,
                duration_ms=round(duration_ms, 3),
                reason=reason,
            )
        )


def _seen(task: asyncio.Task[None]) -> None:
    """Its failure has been told as an event; nobody may be left to wait for it."""
    if not task.cancelled():
        task.exception()

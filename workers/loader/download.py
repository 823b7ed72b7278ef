"""From the store to the disk tier: a few at a time, from where it broke off, under its own name only when it is right.

Owns the parts on their way. What may pass (a store that is away, or broke off) is tried again with back-off, from the
last byte that came; what will not (no such file, another size or sum than the record says) is not. A file put together
from several answers whose sum is wrong is fetched once more in one go: the object may have changed in between. While it
waits to try again it holds neither a place among the downloads nor, unless bytes of it have come, room on the disk.
A crash leaves a part, which the next life removes.
"""

import asyncio
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from schemas.adapters import AdapterRecord
from schemas.reasons import Tier
from streams.adapters.locations import Location, parse_location
from streams.adapters.store import Store, Unavailable, write_all
from workers.loader.backoff import Backoff
from workers.loader.errand import Errand
from workers.loader.events import Events
from workers.loader.level import Level
from workers.loader.threads import in_thread

log = logging.getLogger(__name__)

AT_ONCE, AHEAD_AT_ONCE = 2, 1  # for requests that wait; ahead of them
_PATIENCE_S, _SLOWEST_BYTES_PER_S = 30, 1 << 20


class WrongFile(Exception):
    """What the store has is not what the record says."""


class Arrival:
    """One file on its way. Belongs to one thread at a time."""

    def __init__(self, record: AdapterRecord, part: Path, path: Path) -> None:
        self._record, self._part, self._path = record, part, path
        self._location: Location = parse_location(record.weights_uri)
        self._answers, self._anew = 0, False
        self.bytes = 0
        self._digest = hashlib.sha256()

    def come(self, store: Store, errand: Errand) -> None:
        """Brings what is missing. Raises StoreError, WrongFile, OSError."""
        record = self._record
        if self.bytes < record.size_bytes or not self._answers:  # no store has a byte behind the last one
            self._take(store, errand)
        sum_ = self._digest.hexdigest()
        if sum_ != record.checksum or self.bytes != record.size_bytes:
            raise WrongFile(
                f"{self._location} has {self.bytes} bytes of sha256 {sum_}; "
                f"its record says {record.size_bytes} of {record.checksum}"
            )
        os.replace(self._part, self._path)

    def _take(self, store: Store, errand: Errand) -> None:
        """One answer, as far as it comes."""
        record, began_s, before = self._record, time.monotonic(), self.bytes
        descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with (
            open(descriptor, "r+b", buffering=0) as file,
            store.stream(self._location, record.size_bytes, self.bytes) as stream,
        ):
            if stream.start != self.bytes:  # it knows no ranges: all of it comes once more
                self._restart()
                before = 0
            file.truncate(self.bytes)
            file.seek(self.bytes)
            self._answers += 1
            for chunk in stream.chunks:
                if self.bytes + len(chunk) > record.size_bytes:
                    raise WrongFile(f"{self._location} has more than the {record.size_bytes} bytes of its record")
                write_all(file, chunk)
                self._digest.update(chunk)
                self.bytes += len(chunk)
                came, took_s = self.bytes - before, time.monotonic() - began_s
                if took_s > _PATIENCE_S + came / _SLOWEST_BYTES_PER_S:
                    raise Unavailable(f"{self._location}: too slow: {came} bytes in {took_s:.0f} s")
                errand.pace(came, took_s)

    @property
    def may_begin_anew(self) -> bool:
        """Whether it is put together from several answers, for the first time."""
        return self._answers > 1 and not self._anew

    def begin_anew(self) -> None:
        self._anew = True
        self._restart()

    def _restart(self) -> None:
        self._answers = self.bytes = 0
        self._digest = hashlib.sha256()

    def discard(self) -> None:
        self._part.unlink(missing_ok=True)


class Downloads:
    """`part` gives the path of a part. `stop` when nothing is on its way any more."""

    def __init__(self, store: Store, disk: Level, part: Callable[[str], Path], events: Events) -> None:
        self._store, self._disk, self._part, self._events = store, disk, part, events
        self._places = asyncio.Semaphore(AT_ONCE)
        self._places_ahead = asyncio.Semaphore(AHEAD_AT_ONCE)
        self._pool = ThreadPoolExecutor(AT_ONCE + AHEAD_AT_ONCE, thread_name_prefix="download")

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def fetch(self, record: AdapterRecord, errand: Errand, holder: str) -> None:
        """Raises StoreError, WrongFile, InvalidLocation, NeverFits, NoRoom, OSError; then nothing of it is left."""
        began_s, disk, content_id = time.monotonic(), self._disk, record.content_id
        arrival = Arrival(record, self._part(content_id), disk.path(content_id))
        backoff = Backoff(began_s)
        try:
            while (error := await self._attempt(arrival, record, errand, holder)) is not None:
                pause_s = backoff.failed(arrival.bytes, time.monotonic(), random.random())
                if pause_s is None:
                    raise error
                if not arrival.bytes:
                    disk.abandon(content_id, holder)
                log.warning("%s: goes on at byte %d in %.1f s: %s", record.adapter_id, arrival.bytes, pause_s, error)
                await asyncio.sleep(pause_s)
        except BaseException:
            arrival.discard()
            if content_id in disk.shelf:
                disk.abandon(content_id, holder)
            raise
        disk.shelf.settle(content_id)
        disk.release(content_id, holder)
        self._events.loaded(record, Tier.DISK, Tier.REMOTE, record.size_bytes, began_s)

    async def _attempt(
        self, arrival: Arrival, record: AdapterRecord, errand: Errand, holder: str
    ) -> Unavailable | None:
        """What may pass, as a value; None when it has come."""
        async with self._places if errand.urgent else self._places_ahead:
            if record.content_id not in self._disk.shelf:
                await self._disk.reserve(record.content_id, record.size_bytes, holder, errand)
            try:
                await in_thread(self._pool, lambda: arrival.come(self._store, errand))
            except Unavailable as error:
                return error
            except WrongFile as error:
                if not arrival.may_begin_anew:
                    raise
                arrival.begin_anew()
                return Unavailable(f"put together from several answers: {error}")
            except OSError as error:
                raise OSError(error.errno, f"the disk tier: {error.strerror}") from error
            return None

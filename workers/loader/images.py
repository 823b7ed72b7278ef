"""From the disk tier into shared memory: an image in slot layout, made from a file of which every byte was checked.

In one pass, whether the file just came or was left by an earlier life, its sha256 is compared with its record's, and
its header with the record's content id and the base that is served here: neither a bad disk nor a swapped file gets
into a slot. The values go over as they are stored. A crash leaves images that the next life removes.
"""

import contextlib
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import msgspec

from schemas.adapters import AdapterRecord
from streams.adapters.canonical import canonical_form, read_canonical
from streams.adapters.shape import ModelShape
from streams.adapters.tensors import BadFile
from workers.loader.errand import Errand
from workers.loader.level import Level
from workers.loader.threads import in_thread
from workers.slot_image import Precision, image_bytes, new_image, slot_rank

AT_ONCE = 2


class Base(msgspec.Struct, frozen=True):
    """The base that is served here, and the ranks that its slots are for, the largest last."""

    hash: str
    shape: ModelShape
    slot_ranks: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        return self.slot_ranks[-1]

    def refuses(self, record: AdapterRecord) -> str:
        """Why it cannot be served here; empty if it can."""
        if record.base_model_hash != self.hash:
            return f"{record.adapter_id} is made for base {record.base_model_hash}, here is {self.hash}"
        if record.rank > self.max_rank:
            return f"{record.adapter_id} has rank {record.rank}, the slots here have {self.max_rank}"
        return ""


class Images:
    """`stop` when nothing is being laid out any more."""

    def __init__(self, base: Base, disk: Level, ram: Level) -> None:
        self._base, self._disk, self._ram = base, disk, ram
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="image")

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def lay_out(self, record: AdapterRecord, errand: Errand, holder: str) -> int:
        """Makes the image, leased to `holder` and not yet settled: its bytes. Raises BadFile, ImageError, NeverFits,
        NoRoom, and OSError when shared memory is full; then nothing of it is left.

        It is for the smallest slots that hold the adapter, in the file's precision.
        """
        content_id, base = record.content_id, self._base
        source, target = self._disk.path(content_id), self._ram.path(content_id)

        def form() -> tuple[int, Precision]:
            try:
                rank, dtype = canonical_form(source)
                return slot_rank(rank, base.slot_ranks), Precision[dtype]
            except OSError as error:
                raise BadFile(f"it cannot be read from the disk: {error.strerror}") from None

        def lay_out() -> None:
            with contextlib.closing(
                read_canonical(source, content_id, record.checksum, base.hash, base.shape)
            ) as matrices:
                try:
                    os.utime(source)  # so that the next life knows what was used last
                    first = next(matrices)
                except OSError as error:
                    raise BadFile(f"it cannot be read from the disk: {error.strerror}") from None
                try:
                    with new_image(target, base.shape, rank, content_id, precision) as image:
                        for (layer, matrix), (a, b, scale) in itertools.chain([first], matrices):
                            image.put(layer, matrix, a, b, scale)
                except OSError as error:
                    raise OSError(error.errno, f"shared memory: {error.strerror}") from error

        self._disk.shelf.lease(content_id, holder, use=errand.urgent)
        try:
            rank, precision = await in_thread(self._pool, form)
            size = image_bytes(base.shape, rank, precision)
            await self._ram.reserve(content_id, size, holder, errand)
            try:
                await in_thread(self._pool, lay_out)
            except BaseException:
                self._ram.abandon(content_id, holder)
                raise
        finally:
            self._disk.release(content_id, holder)
        return size

"""A load on its way: who waits for it, and how far it is to go. Owns nothing but that."""

import asyncio

from schemas.reasons import Tier
from workers.loader.errand import Errand


class Flight:
    """`waiters`: the holders that get a lease each when the image is there. It goes as far as the disk unless `to_ram`
    or somebody waits. `source`: the tier that what it brings comes from.
    """

    def __init__(self, name: str, errand: Errand, to_ram: bool, source: Tier) -> None:
        self.name, self.errand, self._to_ram, self.source = name, errand, to_ram, source
        self.waiters: set[str] = set()
        self.task: asyncio.Task[None] | None = None

    @property
    def to_ram(self) -> bool:
        return self._to_ram or bool(self.waiters)

    def join(self, holder: str) -> None:
        self.waiters.add(holder)
        self.errand.hurry()

    @property
    def arrived(self) -> bool:
        """Whether it ended well."""
        task = self.task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

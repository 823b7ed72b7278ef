"""One tier of this machine: its shelf and the files that stand for the entries.

Owns that a file goes in the same turn of the loop as its entry: its name may be needed again right away. A crash leaves
files without entries, which folders.py sees to.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from schemas.reasons import Tier
from workers.loader.errand import Errand
from workers.loader.events import Events
from workers.loader.shelf import Shelf


class NoRoom(Exception):
    """Nothing may go for what nobody waits for."""


class Level:
    def __init__(self, tier: Tier, budget_bytes: int, path: Callable[[str], Path], events: Events) -> None:
        self.shelf = Shelf(budget_bytes)
        self.path = path
        self._tier, self._events = tier, events
        self._room = asyncio.Event()

    async def reserve(self, content_id: str, size_bytes: int, holder: str, errand: Errand) -> None:
        """Room for a new entry, leased to `holder`; waits for it if a request does. Raises NeverFits, NoRoom."""
        while True:
            going = self.shelf.reserve(content_id, size_bytes, holder, errand.may_go, not errand.urgent)
            if going is not None:
                break
            if not errand.urgent:
                raise NoRoom(f"the {self._tier} tier is full of what is needed more")
            self._room.clear()
            await self._room.wait()
        for gone, gone_bytes in going.items():
            self.path(gone).unlink(missing_ok=True)
            self._events.evicted(gone, self._tier, gone_bytes)

    def release(self, content_id: str, holder: str) -> None:
        self.shelf.release(content_id, holder)
        self._room.set()

    def abandon(self, content_id: str, holder: str) -> None:
        """What `holder` was to fill is not coming."""
        self.shelf.release(content_id, holder)
        self.drop(content_id)

    def drop(self, content_id: str) -> None:
        """Entry and file go, whichever of them is there."""
        self.path(content_id).unlink(missing_ok=True)
        if content_id in self.shelf:
            self.shelf.drop(content_id)
        self._room.set()

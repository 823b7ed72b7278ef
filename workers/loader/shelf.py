"""One tier's book-keeping: what is in it, how much room there is, what may go. Pure; the files are moved by others.

Whoever fills, reads or waits for an entry holds a lease on it under a name of its own, so that ending one twice, or
never, is seen and not averaged away. Only entries without leases are evicted, least recently used first.
"""

from collections.abc import Callable

import msgspec


class NeverFits(Exception):
    """Larger than the whole tier."""


class Entry(msgspec.Struct):
    """`ready`: whole, and not just room that is kept for it. `leases`: the names of their holders."""

    bytes: int
    leases: set[str]
    ready: bool


class Shelf:
    """Names here are content ids. Not safe for threads: it belongs to the event loop."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._entries: dict[str, Entry] = {}  # least recently used first

    def holds(self, name: str) -> bool:
        """Whether it is there, whole."""
        entry = self._entries.get(name)
        return entry is not None and entry.ready

    def __contains__(self, name: str) -> bool:
        """Whether it is there, or room is kept for it."""
        return name in self._entries

    def names(self) -> list[str]:
        """What is there, most recently used first."""
        return [name for name, entry in reversed(self._entries.items()) if entry.ready]

    def reserve(
        self,
        name: str,
        size_bytes: int,
        holder: str,
        may_go: Callable[[str], bool] = lambda _: True,
        unused: bool = False,
    ) -> dict[str, int] | None:
        """Keeps room for a new entry, leased to `holder`, and returns what had to go for it: name -> bytes.

        None when it does not fit until something is released; then nothing went. `may_go`: what may be evicted for
        it. `unused`: nobody has asked for it yet, so that it is the first to go again. Raises NeverFits.
        """
        assert name not in self._entries, f"{name} is there already"
        if size_bytes > self.budget_bytes:
            raise NeverFits(f"it needs {size_bytes} bytes, the whole tier has {self.budget_bytes}")
        going: dict[str, int] = {}
        short = self.used_bytes + size_bytes - self.budget_bytes
        for other, entry in self._entries.items():
            if short <= 0:
                break
            if not entry.leases and may_go(other):
                going[other] = entry.bytes
                short -= entry.bytes
        if short > 0:
            return None
        for other in going:
            self.drop(other)
        new = Entry(size_bytes, {holder}, False)
        self._entries[name] = new
        if unused:
            self._entries = {name: new, **self._entries}
        self.used_bytes += size_bytes
        return going

    def settle(self, name: str) -> None:
        """It is whole now. Still leased."""
        self._entries[name].ready = True

    def lease(self, name: str, holder: str, use: bool = True) -> None:
        """`use`: somebody asked for it, and so it is the most recently used."""
        entry = self._entries[name]
        assert holder not in entry.leases, f"{holder} has a lease on {name} already"
        entry.leases.add(holder)
        if use:
            del self._entries[name]
            self._entries[name] = entry

    def release(self, name: str, holder: str) -> None:
        """The one way a lease ends."""
        entry = self._entries[name]
        assert holder in entry.leases, f"{holder} has no lease on {name}"
        entry.leases.remove(holder)

    def drop(self, name: str) -> None:
        """Gone, or never come."""
        self.used_bytes -= self._entries.pop(name).bytes

    def leases(self) -> dict[str, set[str]]:
        """What is in use: name -> the holders of its leases."""
        return {name: set(entry.leases) for name, entry in self._entries.items() if entry.leases}

"""One tier's book-keeping: what is in it, how much room there is, what may go. Pure; the files are moved by others.

An entry is pinned while it is filled, read or waited for; only idle entries are evicted, least recently used first.
"""

import msgspec


class NeverFits(Exception):
    """Larger than the whole tier."""


class Entry(msgspec.Struct):
    """`ready`: whole, and not just room that is kept for it."""

    bytes: int
    pins: int
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

    def names(self) -> list[str]:
        """What is there, most recently used first."""
        return [name for name, entry in reversed(self._entries.items()) if entry.ready]

    def reserve(self, name: str, size_bytes: int) -> dict[str, int] | None:
        """Keeps room for a new entry, pinned once, and returns what had to go for it: name -> bytes.

        None when it does not fit until something is unpinned; then nothing went. Raises NeverFits.
        """
        assert name not in self._entries, f"{name} is there already"
        if size_bytes > self.budget_bytes:
            raise NeverFits(f"it needs {size_bytes} bytes, the whole tier has {self.budget_bytes}")
        going: dict[str, int] = {}
        short = self.used_bytes + size_bytes - self.budget_bytes
        for other, entry in self._entries.items():
            if short <= 0:
                break
            if entry.pins == 0:
                going[other] = entry.bytes
                short -= entry.bytes
        if short > 0:
            return None
        for other in going:
            self.drop(other)
        self._entries[name] = Entry(size_bytes, 1, False)
        self.used_bytes += size_bytes
        return going

    def settle(self, name: str) -> None:
        """It is whole now. Still pinned."""
        self._entries[name].ready = True

    def pin(self, name: str, times: int = 1) -> None:
        """It is in use, and so the most recently used."""
        entry = self._entries.pop(name)
        self._entries[name] = entry
        entry.pins += times

    def unpin(self, name: str) -> None:
        entry = self._entries[name]
        assert entry.pins > 0, f"{name} is unpinned more often than pinned"
        entry.pins -= 1

    def drop(self, name: str) -> None:
        """Gone, or never come."""
        self.used_bytes -= self._entries.pop(name).bytes

    def pinned(self) -> dict[str, int]:
        """What is in use: name -> pins."""
        return {name: entry.pins for name, entry in self._entries.items() if entry.pins}

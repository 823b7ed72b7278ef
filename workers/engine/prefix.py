"""Which KV blocks hold a known prefix: the chains of full blocks that later sequences may take over. Pure.

A block is found by its parent and its own tokens, compared token by token, and the first of a chain by its Space: a
chain says all that its keys and values were computed from, so no two customers, contents or modes can meet in a block.
An entry's number is never given again: what followed a forgotten entry cannot follow another block in its place.
"""

from array import array
from dataclasses import dataclass, field

import msgspec

Key = tuple["Space | int", bytes]  # (the parent's number, or the space of a first block; the block's tokens)


class Space(msgspec.Struct, frozen=True):
    """Whose prefixes, and what computed them. `merged`: with the adapter folded into the base's weights."""

    customer: str
    content_id: str
    merged: bool = False


@dataclass(frozen=True)
class Entry:
    """A full block whose keys and values are computed."""

    number: int
    key: Key
    block: int
    children: set[int] = field(default_factory=set, compare=False)


class Prefixes:
    def __init__(self) -> None:
        self._by_key: dict[Key, Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._added = 0

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def find(self, parent: Space | int, tokens: list[int]) -> Entry | None:
        """The block that holds exactly these tokens right after `parent`."""
        return self._by_key.get(_key(parent, tokens))

    def add(self, parent: Space | int, tokens: list[int], block: int) -> Entry | None:
        """Enters a block that is in no entry. None if the parent was forgotten: nothing can lead to the block then.

        The caller has asked `find` first. Raises ValueError if the block or the key has an entry already.
        """
        key = _key(parent, tokens)
        if key in self._by_key or block in self._by_block:
            raise ValueError(f"block {block} or its key has an entry already")
        if isinstance(parent, int):
            if parent not in self._by_number:
                return None
            self._by_number[parent].children.add(self._added + 1)
        self._added += 1
        entry = Entry(self._added, key, block)
        self._by_key[key] = self._by_number[entry.number] = self._by_block[block] = entry
        return entry

    def forget(self, block: int) -> list[int]:
        """Drops the block's entry and all that follow it; their blocks. Empty if it has none."""
        if block not in self._by_block:
            return []
        top = self._by_block[block]
        if isinstance(parent := top.key[0], int):
            self._by_number[parent].children.remove(top.number)
        dropped, numbers = [], [top.number]
        while numbers:
            entry = self._by_number.pop(numbers.pop())
            del self._by_key[entry.key], self._by_block[entry.block]
            dropped.append(entry.block)
            numbers.extend(entry.children)
        return dropped


def _key(parent: Space | int, tokens: list[int]) -> Key:
    return parent, array("q", tokens).tobytes()

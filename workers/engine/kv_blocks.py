"""Paged KV accounting: which blocks of the KV cache belong to which sequence. Pure.

A block holds the keys and values of BLOCK_TOKENS positions in every layer. A sequence is given blocks as it grows; when
none is left the scheduler preempts by recompute, so a block is never promised twice. Blocks are never shared: there is
no prefix cache yet, hence no reference counts.
"""

BLOCK_TOKENS = 16


class OutOfBlocks(Exception):
    """Fewer free blocks than asked for; nothing was taken."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


class KvBlocks:
    """`total` blocks, handed out lowest number last freed first. Owner: the sequence number."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._held: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def held(self, seq: int) -> list[int]:
        """The sequence's blocks in the order of its positions."""
        return self._held.get(seq, [])

    def grow(self, seq: int, tokens: int) -> None:
        """Sees to it that `seq` has room for `tokens` positions. Raises OutOfBlocks and takes nothing."""
        held = self._held.get(seq, [])
        need = blocks_for(tokens) - len(held)
        if need <= 0:
            return
        if need > len(self._free):
            raise OutOfBlocks(f"{need} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(need)]
        self._held[seq] = held + taken

    def release(self, seq: int) -> None:
        """Gives back all that `seq` holds; nothing if it holds nothing."""
        self._free.extend(reversed(self._held.pop(seq, [])))

"""Paged KV accounting: which blocks of the KV cache belong to which sequences, and which wait to be taken over. Pure.

A block holds the keys and values of BLOCK_TOKENS positions in every layer. It is in one of three states, and the three
always make up the total: used (held by one or more sequences, which it counts), cached (held by none, its prefix known)
or empty. Cached ones count as free and go least recently used first. A sequence gives its blocks back from its end on,
so a cached block always goes before the one it follows.

Only full blocks whose step has ended are ever shared (`computed`), hence a block is written by one sequence only and
never read in the step that fills it by any other. When none is left the scheduler preempts by recompute, so a block is
never promised twice.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from workers.engine.prefix import Entry, Prefixes, Space

BLOCK_TOKENS = 16
LENT = -1  # the holder of blocks that no sequence has


class OutOfBlocks(Exception):
    """Fewer free blocks than asked for; nothing was taken."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass
class _Holding:
    """One sequence's blocks in the order of its positions; the first `known` are entries, `tip` the last of them."""

    tip: Space | int
    blocks: list[int] = field(default_factory=list)
    known: int = 0


class KvBlocks:
    """`total` blocks. Holder: the sequence number."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._empty = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * total
        self._of: dict[int, _Holding] = {}
        self._prefixes = Prefixes()

    @property
    def free(self) -> int:
        """Blocks that may be taken, `cached` included."""
        return len(self._empty) + len(self._cached)

    @property
    def in_use(self) -> int:
        """Blocks that sequences hold."""
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that a sequence may take over."""
        return len(self._cached)

    def holders(self, block: int) -> int:
        """Sequences that hold the block."""
        return self._holders[block]

    def held(self, seq: int) -> list[int]:
        """The sequence's blocks in the order of its positions."""
        return self._of[seq].blocks if seq in self._of else []

    def admit(self, seq: int, space: Space, tokens: list[int], spare: int) -> int | None:
        """Gives a new sequence room for its tokens: known blocks first, others for the rest.

        How many of its tokens are computed already: never the last, whose logits are wanted. None, and nothing taken,
        unless `spare` blocks stay free. Raises KeyError if the sequence holds blocks.
        """
        if seq in self._of:
            raise KeyError(f"sequence {seq} holds blocks already")
        found: list[int] = []
        tip: Space | int = space
        for at in range((len(tokens) - 1) // BLOCK_TOKENS):
            entry = self._prefixes.find(tip, _block(tokens, at))
            if entry is None:
                break
            tip = entry.number
            found.append(entry.block)
        taken = sum(1 for block in found if not self._holders[block]) + blocks_for(len(tokens)) - len(found)
        if taken + spare > self.free:
            return None
        for block in found:  # before others are taken, which might be these
            self._hold(block)
        self._of[seq] = holding = _Holding(tip, found, len(found))
        self.grow(seq, len(tokens))
        return holding.known * BLOCK_TOKENS

    def grow(self, seq: int, tokens: int) -> None:
        """Sees to it that an admitted sequence has room for `tokens` positions. Raises OutOfBlocks, takes nothing."""
        blocks = self._of[seq].blocks
        need = blocks_for(tokens) - len(blocks)
        if need > self.free:
            raise OutOfBlocks(f"{need} blocks wanted, {self.free} free")
        for _ in range(need):
            block = self._empty.pop() if self._empty else self._evict()
            self._hold(block)
            blocks.append(block)

    def lend(self, tokens: int) -> list[int]:
        """Blocks for `tokens` positions whose keys and values nobody takes over; held by LENT. Raises OutOfBlocks."""
        self._of[LENT] = _Holding(tip=LENT)
        self.grow(LENT, tokens)
        return self.held(LENT)

    def skip(self, seq: int, tokens: list[int], computed: int) -> int:
        """Blocks that others filled since `seq` was admitted take the place of its own unwritten ones.

        How many of its tokens are computed now, never the last; `computed` are so far.
        """
        holding = self._of[seq]
        while holding.known * BLOCK_TOKENS == computed and computed + BLOCK_TOKENS < len(tokens):
            entry = self._prefixes.find(holding.tip, _block(tokens, holding.known))
            if entry is None:
                break
            self._take_over(holding, entry)
            computed += BLOCK_TOKENS
        return computed

    def computed(self, seq: int, tokens: list[int], count: int) -> None:
        """The step ended well and the first `count` of the sequence's tokens have keys and values.

        Full blocks are known from here on. Where another sequence has filled a block with the same in the meantime,
        this one goes on with that block: then whoever holds a block holds all that it follows.
        """
        holding = self._of[seq]
        while holding.known < count // BLOCK_TOKENS:
            ids = _block(tokens, holding.known)
            entry = self._prefixes.find(holding.tip, ids)
            if entry is not None:
                self._take_over(holding, entry)
            elif entry := self._prefixes.add(holding.tip, ids, holding.blocks[holding.known]):
                holding.tip, holding.known = entry.number, holding.known + 1
            else:
                return  # what it follows is distrusted, so what it computes stays its own

    def release(self, seq: int) -> None:
        """Gives back all that `seq` holds, its known blocks to be taken over; nothing if it holds nothing."""
        if seq in self._of:
            for block in reversed(self._of.pop(seq).blocks):
                self._drop(block)

    def discard(self, seq: int) -> None:
        """Gives back all that `seq` holds, and lets nobody take over any of it, nor what others computed after it."""
        for block in self.held(seq):
            for known in self._prefixes.forget(block):
                if known in self._cached:
                    del self._cached[known]
                    self._empty.append(known)
        self.release(seq)

    def _take_over(self, holding: _Holding, entry: Entry) -> None:
        self._hold(entry.block)
        self._drop(holding.blocks[holding.known])
        holding.blocks[holding.known] = entry.block
        holding.tip, holding.known = entry.number, holding.known + 1

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._holders[block] += 1

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._prefixes:
            self._cached[block] = None
        else:
            self._empty.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._prefixes.forget(block)
        return block


def _block(tokens: list[int], at: int) -> list[int]:
    return tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.kv_blocks import BLOCK_TOKENS, KvBlocks, OutOfBlocks, blocks_for


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100) | st.none())), st.integers(1, 12))
def test_blocks_are_never_shared_nor_promised_twice(moves: list[tuple[int, int | None]], total: int) -> None:
    blocks = KvBlocks(total)
    for seq, tokens in moves:
        if tokens is None:
            blocks.release(seq)
            assert blocks.held(seq) == []
        else:
            before, free = list(blocks.held(seq)), blocks.free
            try:
                blocks.grow(seq, tokens)
            except OutOfBlocks:
                assert blocks_for(tokens) - len(before) > free
                assert (blocks.held(seq), blocks.free) == (before, free)
            else:
                assert len(blocks.held(seq)) == max(len(before), blocks_for(tokens))
                assert blocks.held(seq)[: len(before)] == before
        held = [block for owner in range(6) for block in blocks.held(owner)]
        assert len(held) == len(set(held)) == total - blocks.free
        assert set(held) <= set(range(total))
    for seq in range(6):
        blocks.release(seq)
    assert blocks.free == total


def test_the_last_block_may_be_partly_used() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)] == [0, 1, 1, 2]
    blocks = KvBlocks(1)
    blocks.grow(1, BLOCK_TOKENS)
    with pytest.raises(OutOfBlocks):
        blocks.grow(2, 1)

import random

import pytest

from workers.engine.kv_blocks import BLOCK_TOKENS, KvBlocks, OutOfBlocks, blocks_for
from workers.engine.prefix import Space

A, B = Space("c", "a"), Space("c", "b")


def ids(blocks: int, first: int = 0) -> list[int]:
    """Tokens that fill so many blocks, and one more."""
    return list(range(first, first + blocks * BLOCK_TOKENS + 1))


def served(kv: KvBlocks, seq: int, space: Space, tokens: list[int]) -> int:
    """Admits, computes all and gives everything back; what was found."""
    found = kv.admit(seq, space, tokens, 0)
    assert found is not None
    kv.computed(seq, tokens, len(tokens))
    kv.release(seq)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_states_make_up_the_total_and_holders_are_counted(seed: int) -> None:
    """Random admissions, growth, computing, endings and failures: a block is held as often as its count says."""
    draw = random.Random(seed)
    kv = KvBlocks(draw.randint(1, 14))
    running: dict[int, tuple[list[int], int]] = {}  # tokens, how many are computed
    for seq in range(300):
        tokens = [draw.randint(0, 1) for _ in range(draw.choice((1, 15, 16, 17, 33, 48, 60)))]
        free, spare = kv.free, draw.randint(0, 2)
        found = kv.admit(seq, draw.choice((A, B)), tokens, spare)
        if found is None:
            assert (kv.free, kv.held(seq)) == (free, [])
        else:
            assert kv.free >= spare
            assert found < len(tokens)
            running[seq] = (tokens, found)
        for other, (known, count) in list(running.items()):
            match draw.randint(0, 5):
                case 0:
                    kv.release(other)
                    del running[other]
                case 1:
                    kv.discard(other)
                    del running[other]
                case 2 | 3:
                    count = draw.randint(count, len(known))
                    kv.computed(other, known, count)
                    running[other] = (known, count)
                case 4 if count == len(known):
                    before, free = list(kv.held(other)), kv.free
                    try:
                        kv.grow(other, len(known) + 20)
                    except OutOfBlocks:
                        assert (kv.held(other), kv.free) == (before, free)
                    else:
                        assert kv.held(other)[: len(before)] == before
                        assert len(kv.held(other)) == blocks_for(len(known) + 20)
                case 5:
                    skipped = kv.skip(other, known, count)
                    assert count <= skipped < max(len(known), count + 1)
                    running[other] = (known, skipped)
            held = [block for each in running for block in kv.held(each)]
            assert all(kv.holders(block) == held.count(block) for block in range(kv.total))
            assert len(set(held)) + kv.free == kv.total
            assert all(len(set(kv.held(each))) == len(kv.held(each)) for each in running)
            assert 0 <= kv.cached <= kv.free
    for seq in running:
        kv.release(seq)
        kv.release(seq)
    assert kv.free == kv.total


def test_the_last_block_may_be_partly_used() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1)] == [0, 1, 1, 2]
    kv = KvBlocks(1)
    assert kv.admit(1, A, [7] * BLOCK_TOKENS, 0) == 0
    with pytest.raises(OutOfBlocks):
        kv.grow(1, BLOCK_TOKENS + 1)
    with pytest.raises(KeyError):
        kv.admit(1, A, [7], 0)


def test_a_computed_prefix_is_taken_over_but_never_the_last_token() -> None:
    kv = KvBlocks(8)
    assert served(kv, 1, A, ids(3)) == 0
    assert (kv.cached, kv.free) == (3, 8)
    assert served(kv, 2, A, ids(3)) == 3 * BLOCK_TOKENS
    assert served(kv, 3, A, ids(3)[:-1]) == 2 * BLOCK_TOKENS  # its last token's logits are wanted
    assert served(kv, 4, A, ids(3)[:20]) == BLOCK_TOKENS
    assert served(kv, 5, A, [*ids(1)[:-2], 99, 99, 99]) == 0
    assert served(kv, 6, A, ids(2, first=1)) == 0


@pytest.mark.parametrize("other", [Space("c", "b"), Space("d", "a"), Space("c", "a", merged=True), Space("c", "")])
def test_customers_contents_and_modes_share_nothing(other: Space) -> None:
    kv = KvBlocks(8)
    served(kv, 1, A, ids(3))
    assert served(kv, 2, other, ids(3)) == 0
    assert served(kv, 3, A, ids(3)) == served(kv, 4, other, ids(3)) == 3 * BLOCK_TOKENS


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    kv = KvBlocks(8)
    served(kv, 1, A, [*ids(1)[:-1], *ids(1, first=50)])
    assert served(kv, 2, A, [*ids(1, first=99)[:-1], *ids(1, first=50)]) == 0


def test_nothing_is_shared_before_it_is_computed() -> None:
    kv = KvBlocks(12)
    assert kv.admit(1, A, ids(3), 0) == 0
    assert kv.admit(2, A, ids(3), 0) == 0
    assert not set(kv.held(1)) & set(kv.held(2))
    kv.computed(1, ids(3), BLOCK_TOKENS + 5)  # one block is full
    kv.release(1)
    assert kv.admit(3, A, ids(3), 0) == BLOCK_TOKENS


def test_who_computes_the_same_at_once_goes_on_with_one_block() -> None:
    kv = KvBlocks(12)
    for seq in (1, 2):
        assert kv.admit(seq, A, ids(2), 0) == 0
    for seq in (1, 2):
        kv.computed(seq, ids(2), len(ids(2)))
    assert kv.held(1)[:2] == kv.held(2)[:2]
    assert kv.held(1)[2] != kv.held(2)[2]
    assert kv.free == 12 - 4


def test_what_another_has_filled_meanwhile_is_not_computed_again() -> None:
    kv = KvBlocks(12)
    kv.admit(1, A, ids(3), 0)
    kv.admit(2, A, ids(3), 0)
    kv.computed(1, ids(3), len(ids(3)))
    assert kv.skip(2, ids(3), 0) == 3 * BLOCK_TOKENS
    assert kv.free == 12 - 5
    kv.admit(3, B, ids(3), 0)
    kv.computed(3, ids(3), 5)
    assert kv.skip(3, ids(3), 5) == 5  # a block that is being written stays


def test_the_least_recently_used_goes_first_and_always_before_what_it_follows() -> None:
    kv = KvBlocks(6)
    served(kv, 1, A, ids(2))
    served(kv, 2, B, ids(2))
    served(kv, 3, A, ids(2))  # A's were used last
    kv.admit(4, Space("d", ""), ids(2)[:-1] + [0] * BLOCK_TOKENS, 0)  # takes both empty blocks and B's second
    assert kv.cached == 3
    kv.release(4)
    assert served(kv, 5, B, ids(2)) == BLOCK_TOKENS
    assert served(kv, 6, A, ids(2)) == 2 * BLOCK_TOKENS


def test_blocks_that_are_found_are_not_taken_for_the_rest() -> None:
    kv = KvBlocks(3)
    served(kv, 1, A, ids(2))
    assert kv.admit(2, A, [*ids(2), *range(900, 914)], 0) == 2 * BLOCK_TOKENS
    assert len(set(kv.held(2))) == 3
    kv.release(2)
    assert kv.admit(3, A, ids(3), 0) is None  # 4 blocks wanted, 3 there
    assert (kv.free, kv.held(3)) == (3, [])


def test_a_failed_sequence_leaves_nothing_behind_nor_does_what_followed_it() -> None:
    kv = KvBlocks(12)
    served(kv, 1, A, ids(1))
    kv.admit(2, A, ids(3), 0)
    kv.computed(2, ids(3), 2 * BLOCK_TOKENS)
    assert kv.admit(3, A, ids(3), 0) == 2 * BLOCK_TOKENS  # shares what is about to fail
    served(kv, 4, A, ids(3))
    kv.discard(2)
    assert kv.cached == 0
    kv.computed(3, ids(3), len(ids(3)))  # it follows distrusted blocks
    kv.release(3)
    assert (kv.cached, kv.free) == (0, 12)
    assert served(kv, 5, A, ids(3)) == 0
    assert served(kv, 6, A, ids(3)) == 3 * BLOCK_TOKENS

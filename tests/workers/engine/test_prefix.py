import pytest

from workers.engine.prefix import Prefixes, Space

HERE = Space("c", "a")
ONE, TWO = [1] * 16, [2] * 16


def chained() -> tuple[Prefixes, int]:
    """Blocks 0 - 1 - 2, with 3 beside 2; and block 1's number."""
    prefixes = Prefixes()
    first = prefixes.add(HERE, ONE, 0)
    assert first is not None
    second = prefixes.add(first.number, ONE, 1)
    assert second is not None
    assert prefixes.add(second.number, ONE, 2)
    assert prefixes.add(second.number, TWO, 3)
    return prefixes, second.number


def test_every_token_and_the_whole_way_to_it_count() -> None:
    prefixes, second = chained()
    found = prefixes.find(second, TWO)
    assert found is not None
    assert found.block == 3
    for at in range(16):
        assert prefixes.find(second, [*TWO[:at], 7, *TWO[at + 1 :]]) is None
    assert prefixes.find(second, TWO[:-1]) is None
    assert prefixes.find(HERE, TWO) is None
    assert prefixes.find(Space("c", "b"), ONE) is None


def test_a_forgotten_entry_takes_along_what_follows_it() -> None:
    prefixes, second = chained()
    assert sorted(prefixes.forget(1)) == [1, 2, 3]
    assert prefixes.forget(1) == []
    assert [block in prefixes for block in range(4)] == [True, False, False, False]
    assert prefixes.find(second, ONE) is None
    assert prefixes.add(second, ONE, 2) is None


def test_a_new_entry_for_a_forgotten_block_does_not_lead_to_what_followed_the_old_one() -> None:
    prefixes, second = chained()
    first = prefixes.find(HERE, ONE)
    prefixes.forget(1)
    assert first is not None
    again = prefixes.add(first.number, ONE, 1)
    assert again is not None
    assert again.number != second
    assert prefixes.find(again.number, ONE) is None
    assert sorted(prefixes.forget(0)) == [0, 1]
    assert prefixes.find(HERE, ONE) is None


def test_one_block_has_one_entry() -> None:
    prefixes, second = chained()
    with pytest.raises(ValueError, match="block 0"):
        prefixes.add(second, [5] * 16, 0)
    with pytest.raises(ValueError, match="block 9"):
        prefixes.add(HERE, ONE, 9)

"""Tokens in any order, twice and in pieces: what comes out is a prefix of the one right answer, or a Gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sequencer import Gap, Sequencer

ANSWER = [17, 4, 4, 99, 0, 23, 8, 1, 55, 2, 31, 6]


def test_in_order() -> None:
    output = Sequencer()
    assert output.place(0, [1, 2]) == [1, 2]
    assert output.place(2, [3]) == [3]
    assert (output.position, output.ids) == (3, [1, 2, 3])


def test_trims_what_it_has() -> None:
    output = Sequencer([1, 2, 3])
    assert output.place(0, [1, 2]) == []
    assert output.place(1, [2, 3]) == []
    assert output.place(1, [2, 3, 4, 5]) == [4, 5]
    assert output.place(5, []) == []
    assert output.ids == [1, 2, 3, 4, 5]


def test_a_gap_changes_nothing() -> None:
    output = Sequencer([1])
    with pytest.raises(Gap, match="position 2 after 1 tokens"):
        output.place(2, [3])
    assert output.ids == [1]
    assert output.place(1, [2]) == [2]


@given(pieces=st.lists(st.tuples(st.integers(0, len(ANSWER)), st.integers(0, 5)), max_size=30))
def test_any_pieces_in_any_order_give_a_prefix(pieces: list[tuple[int, int]]) -> None:
    output, delivered = Sequencer(), list[int]()
    for position, length in pieces:
        had = len(delivered)
        if position > had:
            with pytest.raises(Gap):
                output.place(position, ANSWER[position : position + length])
        else:
            delivered += output.place(position, ANSWER[position : position + length])
            assert len(delivered) == max(had, min(position + length, len(ANSWER)))
        assert delivered == output.ids == ANSWER[: len(delivered)]

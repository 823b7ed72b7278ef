"""Stop strings: however the text is cut, the same is shown, and nothing is held back without need."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import Stops


def reference(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Character by character: the first to be complete ends it; of two at once, the longer."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def shown(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    reader = Stops(stops)
    text = "".join([reader.push(piece) for piece in pieces])
    return text + reader.flush(), reader.hit


@given(st.lists(st.text("ab", max_size=5), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_any_cut_shows_the_same(pieces: list[str], stops: list[str]) -> None:
    assert shown(pieces, stops) == reference("".join(pieces), stops)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_only_what_may_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    reader = Stops(stops)
    out = "".join([reader.push(character) for character in text])
    if not reader.hit:
        held = text[len(out) :]
        assert text.startswith(out)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["abcd"], ["abcd", "bc"], "a"),
        (["x", "ST", "OP", "y"], ["STOP"], "x"),
        (["xST", "OX"], ["STOP"], "xSTOX"),
        (["xSTO"], ["STOP"], "xSTO"),
        (["né", "\n\n", "z"], ["\n\n"], "né"),
        (["abc"], [], "abc"),
    ],
)
def test_cases(pieces: list[str], stops: list[str], expected: str) -> None:
    assert shown(pieces, stops)[0] == expected


def test_nothing_after_the_stop() -> None:
    reader = Stops(["."])
    assert reader.push("a.b") == "a"
    assert reader.push("c") + reader.flush() == ""

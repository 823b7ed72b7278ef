"""What a round's answers lead to."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.probe.verdict import Result, Seen, Verdict, judge

A, B = "canary/a@1", "canary/b@1"
LETTERS = {"r": Result.RIGHT, "w": Result.WRONG, "-": Result.UNASKED}


def seen(*replicas: str) -> Seen:
    """One text a replica, one letter an adapter."""
    return {
        (replica, adapter): LETTERS[letter]
        for replica, letters in enumerate(replicas)
        for adapter, letter in zip((A, B), letters, strict=True)
    }


@pytest.mark.parametrize(
    ("replicas", "drain", "quarantine", "told", "again"),
    [
        ([], (), (), "", False),
        (["rr", "rr"], (), (), "", False),
        (["--", "r-"], (), (), "", False),  # nobody's fault
        (["wr", "rr"], (0,), (), "", False),
        (["rr", "rr", "ww"], (2,), (), "", False),
        (["rr", "wr", "rw"], (1, 2), (), "", False),
        (["w-", "r-"], (0,), (), "", False),  # the other canary may be quarantined: it says nothing
        (["wr", "rw"], (), (), "none is left", False),  # both would go
        (["wr", "wr"], (), (A,), "", False),
        (["wr"], (), (A,), "", False),
        (["ww"], (), (), "right on no replica", False),
        (["ww", "ww"], (), (), "right on no replica", False),
        (["wr", "-r"], (), (), "could not be asked", True),
        (["wr", "ww", "wr"], (1,), (A,), "", False),
    ],
)
def test_verdicts(
    replicas: list[str], drain: tuple[int, ...], quarantine: tuple[str, ...], told: str, again: bool
) -> None:
    verdict = judge(seen(*replicas))
    assert (verdict.drain, verdict.quarantine, verdict.again) == (drain, quarantine, again)
    assert told in verdict.told
    assert bool(told) is bool(verdict.told)


@given(st.lists(st.sampled_from(["".join(letters) for letters in product("rw-", repeat=2)]), max_size=5))
def test_a_probe_stops_no_fleet(replicas: list[str]) -> None:
    verdict = judge(seen(*replicas))
    wrong = [place for place, letters in enumerate(replicas) if "w" in letters]
    assert set(verdict.drain) <= set(wrong)
    assert len(verdict.quarantine) <= 1
    if verdict.drain:
        assert any("r" in letters for place, letters in enumerate(replicas) if place not in verdict.drain)
    if wrong:
        assert verdict != Verdict(), "a wrong answer leads to something"
    else:
        assert verdict == Verdict()

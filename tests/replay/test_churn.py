"""The judge of a churn: what was said decides, and what was right depends on when it was asked."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replay.churn.cast import Cast
from replay.churn.changes import Changes
from replay.churn.chatting import Chatting
from replay.churn.truth import Truth
from replay.streams import Script, Take
from replay.tenant import Tenant

ALIAS, OLD, NEW, OTHER = "c/n:prod", "c/n@1", "c/n@2", "c/m@1"
VOICES = {OLD: 0, NEW: 1, OTHER: 2}


def said(voice: int, label: str, asked_at: float, model: str = ALIAS, error: str = "") -> Take:
    return Take(
        Script("", model, "Who?", 4), "r", label, pieces=[f"voice {voice}"], tokens=4,
        finish="" if error else "length", error=error, asked_at=asked_at,
    )  # fmt: skip


@pytest.fixture
def truth() -> Truth:
    """The alias moves from OLD to NEW between 10 and 12; OTHER is retired between 20 and 21."""
    truth = Truth(dict(VOICES))
    truth.begins(ALIAS, OLD, 0)
    truth.begins(ALIAS, NEW, 10)
    truth.settled(ALIAS, NEW, 12)
    truth.retired[OTHER] = (20, 21)
    return truth


@pytest.fixture
def chatting(truth: Truth) -> Chatting:
    cast_ = Cast([], [{"Who?": said(voice, "", 0)} for voice in range(3)])
    changes = cast(Any, SimpleNamespace(aliases=[ALIAS]))
    return Chatting([], Tenant("c", ""), cast_, truth, cast(Changes, changes), 4, 0)


@pytest.mark.parametrize(
    ("asked", "answered", "right"),
    [(5, 9, [OLD]), (5, 11, [OLD, NEW]), (11, 11.5, [OLD, NEW]), (11, 13, [OLD, NEW]), (12.5, 13, [NEW])],
)
def test_while_an_alias_moves_both_are_right_and_before_and_after_one(
    truth: Truth, asked: float, answered: float, right: Sequence[str]
) -> None:
    assert truth.right(ALIAS, asked, answered) == set(right)


def test_a_move_that_was_refused_leaves_the_old_one_right(truth: Truth) -> None:
    truth.begins(ALIAS, OLD, 30)
    truth.settled(ALIAS, NEW, 32)
    assert truth.right(ALIAS, 31, 31.5) == {OLD, NEW}
    assert truth.right(ALIAS, 33, 34) == {NEW}
    with pytest.raises(ValueError, match="never told"):
        truth.settled(ALIAS, OTHER, 35)


@pytest.mark.parametrize(
    ("take", "answered", "ended"),
    [
        (said(0, OLD, 5), 6, "right"),
        (said(1, NEW, 13), 14, "right"),
        (said(0, OLD, 13), 14, "wrong or stale version"),
        (said(0, NEW, 13), 14, "wrong or stale version"),  # labelled right: what was said counts
        (said(2, NEW, 13), 14, "wrong or stale version"),
        (said(1, OLD, 13), 14, "wrong label"),
        (said(7, NEW, 13), 14, "nobody's words"),
        (said(1, NEW, 13, error="cut off"), 14, "broken"),
        (said(2, OTHER, 20.5, OTHER), 22, "right"),
        (said(2, OTHER, 22, OTHER), 23, "wrong or stale version"),
        (said(2, "", 22, OTHER, "404 not there"), 23, "retired, 404"),
        (said(2, "", 18, OTHER, "404 not there"), 19, "broken"),
        (said(0, "", 13, ALIAS, "404 not there"), 14, "broken"),
    ],
)
def test_what_was_said_decides(chatting: Chatting, take: Take, answered: float, ended: str) -> None:
    assert chatting.judge(take, answered) == ended
    assert bool(chatting.wrong) == (ended not in ("right", "retired, 404"))

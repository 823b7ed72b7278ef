"""Which tokens' scores go with which text."""

from pathlib import Path

import pytest

from gateway.base_model import BaseModel
from gateway.shown_text import ShownText
from schemas.tokens import Logprobs


@pytest.fixture
def base(model: Path) -> BaseModel:
    return BaseModel.load(model)


def scored(ids: list[int]) -> list[tuple[int, Logprobs]]:
    return [(token, Logprobs(-float(place), [])) for place, token in enumerate(ids)]


def run(base: BaseModel, ids: list[int], stops: list[str]) -> tuple[str, list[int], list[tuple[str, int]]]:
    """The whole text, the tokens scored, and each push's text with how many tokens came with it."""
    shown = ShownText(base.vocabulary, stops, base.stop_ids)
    text = ""
    tokens: list[int] = []
    pushes: list[tuple[str, int]] = []
    for one in scored(ids):
        piece, freed = shown.push_scored([one])
        text, tokens = text + piece, tokens + [token for token, _ in freed]
        pushes.append((piece, len(freed)))
        if shown.hit:
            return text, tokens, pushes
    rest, freed = shown.flush_scored()
    return text + rest, tokens + [token for token, _ in freed], pushes


def test_all_tokens_but_stop_tokens_are_scored(base: BaseModel) -> None:
    ids = base.vocabulary.encode("Hello there, 🙂 friend")
    text, tokens, _ = run(base, [*ids, base.stop_ids[0]], [])
    assert (text, tokens) == ("Hello there, 🙂 friend", ids)


def test_a_character_in_parts_is_scored_when_it_is_whole(base: BaseModel) -> None:
    ids = base.vocabulary.encode("a🙂")
    assert len(ids) > 2
    _, tokens, pushes = run(base, ids, [])
    assert tokens == ids
    assert all(count == 0 for piece, count in pushes if not piece)


def test_what_a_stop_string_hides_is_not_scored(base: BaseModel) -> None:
    ids = base.vocabulary.encode("one two STOP three")
    text, tokens, _ = run(base, ids, [" STOP"])
    assert text == "one two"
    assert tokens == base.vocabulary.encode("one two")


def test_a_token_that_a_stop_string_cuts_is_scored(base: BaseModel) -> None:
    ids = base.vocabulary.encode("one hello")
    text, tokens, _ = run(base, ids, ["llo"])
    assert text == "one he"
    assert tokens == ids


def test_a_character_that_never_is_whole_is_scored_too(base: BaseModel) -> None:
    ids = base.vocabulary.encode("a🙂")[:-1]
    text, tokens, _ = run(base, ids, [])
    assert (text, tokens) == ("a", ids)

"""Text out of tokens, as they come, against the tokenizer's own decoding of the whole."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.detokenizer import Detokenizer
from gateway.shown_text import ShownText
from gateway.vocabulary import Vocabulary

READS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> Vocabulary:
    return Vocabulary(model)


def streamed(vocabulary: Vocabulary, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(vocabulary.pieces, vocabulary.lstrip)
    return [detokenizer.push([i]) for i in ids]


@pytest.mark.real
@READS
@given(st.text())
def test_any_text_cut_at_every_token(vocabulary: Vocabulary, tokenizer: Tokenizer, text: str) -> None:
    ids = vocabulary.encode(text)
    pieces = streamed(vocabulary, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.real
@READS
@given(st.lists(st.integers(0, 49_151), max_size=40))
def test_any_tokens_as_the_whole(vocabulary: Vocabulary, tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    text = "".join(streamed(vocabulary, ids))
    # What may still become a character at the end is not shown; the whole shows it as one that is broken.
    assert text in (whole, whole.removesuffix("\ufffd"))


@pytest.mark.real
def test_an_emoji_comes_whole(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("🙂")
    assert len(ids) > 1
    assert streamed(vocabulary, ids) == [""] * (len(ids) - 1) + ["🙂"]
    assert "".join(streamed(vocabulary, ids[:-1])) == ""


@pytest.mark.real
def test_special_and_stop_tokens_are_not_shown(vocabulary: Vocabulary) -> None:
    word = vocabulary.encode("word")
    text = ShownText(vocabulary, [], [2])
    assert text.push([*word, 2]) == "word"
    assert ShownText(vocabulary, [], word[:1]).push(word[:1]) == ""


@pytest.mark.real
def test_ids_outside_the_vocabulary_have_no_text(vocabulary: Vocabulary) -> None:
    assert Detokenizer(vocabulary.pieces).push([10**6, -1]) == ""


@pytest.mark.real
def test_a_text_beyond_any_context_is_not_encoded_whole(vocabulary: Vocabulary) -> None:
    assert 100 < len(vocabulary.encode_within("one two three " * 50_000, 100)) < 300
    # Of blanks one token holds dozens: the first guess at the beginning is too short.
    assert 100 < len(vocabulary.encode_within(" " * 1_000_000, 100)) < 300
    exact = "one two three " * 20
    assert vocabulary.encode_within(exact, 100) == vocabulary.encode(exact)


def sentence_piece(folder: Path) -> Vocabulary:
    """A vocabulary of the other family: `▁` for a space, bytes as `<0x..>`."""
    tokens = ["<unk>", "<s>", "</s>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁", "▁hi", "▁you", "a"]
    special = [
        {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True} for i in range(3)
    ]  # fmt: skip
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    model = {
        "type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [], "unk_token": "<unk>",
        "fuse_unk": True, "byte_fallback": True,
    }  # fmt: skip
    told = {"version": "1.0", "added_tokens": special, "decoder": decoder, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return Vocabulary(folder)


def test_the_other_family_of_tokenizers(tmp_path: Path) -> None:
    vocabulary = sentence_piece(tmp_path)
    ids = [1, 8, 9, 3, 4, 5, 6, 10, 2]
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids, skip_special_tokens=True)
    assert "".join(streamed(vocabulary, ids)) == whole == "hi you🙂a"


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    sentence_piece(tmp_path)
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    told["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="WordPiece"):
        Vocabulary(tmp_path)

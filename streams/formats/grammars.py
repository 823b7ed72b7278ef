"""JSON schemas as grammars over a model's tokens, by llguidance: which tokens may come next.

Owns nothing that outlives a call but the tokenizer, which is read once, when it is first needed. A `Grammar` stands at
one place of one output and is a function of the schema and the tokens that it took, in whatever pieces: nothing is
shared between two of them, the library's own copies share what they have found out and with it its limits.
The library's limits bound what a step of one output can cost; a schema that meets one is refused, at the latest there.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from streams.formats.schema import FormatRefused

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One blank, or a new line and some blanks: enough for the ways in which models write JSON, and no place in which a
# model could go on for ever without a word.
_STYLE: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,16})?",
    "lenient": False,
    "coerce_one_of": False,
}
_MOST_SAID = 300
_NO_WAY = "no text that goes on from here can fit it"


class Grammars:
    """Of the model in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._tokenizer: LLTokenizer | None = None
        self._end = -1
        self._limits = LLParserLimits(
            max_items_in_row=500,
            initial_lexer_fuel=200_000,  # about 4 ms
            step_lexer_fuel=100_000,  # about 7 ms
            step_max_items=20_000,
            max_lexer_states=10_000,  # 1 or 2 kB each
            max_grammar_size=50_000,
            verbose_errors=False,  # else they quote the output
        )

    def load(self) -> None:
        """Reads the tokenizer, unless it has been read. Half a second. Raises FormatRefused."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer, self._end = _tokenizer(self._folder / "tokenizer.json")

    def start(self, schema: str) -> "Grammar":
        """The grammar before the first token. Milliseconds, without Python's lock. Raises FormatRefused."""
        self.load()
        assert self._tokenizer is not None
        try:
            rules = LLMatcher.grammar_from_json_schema(schema, overrides=_STYLE)
        except ValueError as error:
            raise FormatRefused(_told(str(error))) from None
        matcher = LLMatcher(self._tokenizer, rules, log_level=0, limits=self._limits)
        grammar = Grammar(matcher, self._tokenizer, self._end)
        grammar.allowed(self._tokenizer.vocab_size, [])  # finds schemas that no text fits
        return grammar


class Grammar:
    """One output's place in a grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end: int) -> None:
        self._matcher, self._end = matcher, end
        self._bits = allocate_token_bitmask(1, tokenizer.vocab_size)
        self._taken = 0
        self.may_end = False
        self._check()

    def take(self, output: Sequence[int]) -> None:
        """Goes on to the end of `output`, of which it has taken the beginning. Raises FormatRefused."""
        news = list(output[self._taken :])
        if self._matcher.try_consume_tokens(news) != len(news):
            self._check()
            raise FormatRefused("the output so far does not fit it")
        self._taken = len(output)

    def allowed(self, vocab_size: int, stop_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which of the ids may come next; `stop_ids` where the output may end, and only there. Raises FormatRefused."""
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        known = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little").view(np.bool_)
        self.may_end = bool(known[self._end])
        found = np.zeros(vocab_size, np.bool_)
        found[: len(known)] = known[:vocab_size]
        if self._end < vocab_size:
            found[self._end] = False
        found[list(stop_ids)] = self.may_end
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error()
            raise FormatRefused(_NO_WAY if error.startswith("NoExtension") else _told(error))


def _tokenizer(file: Path) -> tuple[LLTokenizer, int]:
    """And the special token that stands for the output's end, whichever tokens end it: no text has it."""
    try:
        text = file.read_text()
        end = min(token["id"] for token in json.loads(text).get("added_tokens", []) if token["special"])
        return LLTokenizer(text, eos_token=end), end
    except (OSError, ValueError) as error:
        raise FormatRefused(f"this model's tokenizer cannot be held to one: {_told(str(error))}") from None


def _told(error: str) -> str:
    """The library's word, without what it says for its own makers."""
    told = error.partition("\n")[0]
    return told if len(told) <= _MOST_SAID else told[:_MOST_SAID] + "..."

"""Tokens that say when they were made, so that whoever reads a stream can tell how old each word of it is.

Of the vocabulary, the tokens that are one plain word with a space before it stand for moments RESOLUTION_S apart, over
and over again; the clock is CLOCK_MONOTONIC, one for all processes of a machine. What is older than `period_s` looks
younger: a subject that falls that far behind has failed long before.
"""

import re
from collections.abc import Sequence

RESOLUTION_S = 0.0001
_WORD = re.compile(rb" [a-z]+")


class Stamps:
    """`pieces`: the vocabulary's tokens as bytes, by id."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.ids = [number for number, piece in enumerate(pieces) if _WORD.fullmatch(piece)]
        self.words = [pieces[number].strip() for number in self.ids]
        if len(set(self.words)) < len(self.words) or not self.words:
            raise ValueError("this vocabulary has no words of its own to tell the time with")
        self._moments = {word: moment for moment, word in enumerate(self.words)}

    @property
    def period_s(self) -> float:
        return len(self.ids) * RESOLUTION_S

    def moment(self, now: float) -> int:
        """The number of the word that says `now`."""
        return int(now / RESOLUTION_S) % len(self.ids)

    def ages_ms(self, text: bytes, now: float) -> list[float]:
        """Of each word. Raises KeyError for what is none of them."""
        moments, count, at = self._moments, len(self.ids), now / RESOLUTION_S
        return [(at - moments[word]) % count * (RESOLUTION_S * 1000) for word in text.split()]

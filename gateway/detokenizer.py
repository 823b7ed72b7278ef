"""Turns output tokens into text as they come. Pure.

`pieces[id]` is the token's bytes, empty for special tokens (gateway/vocabulary.py). What is returned is final: bytes of
a character that is not complete yet are held back, and dropped if it never is, so that a replacement character appears
only where the output itself holds bytes that are no UTF-8.
"""

import codecs
from collections.abc import Iterable, Sequence

_MAKE_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One output. `lstrip`: the tokenizer puts one space before the first word, which is not part of the text."""

    def __init__(self, pieces: Sequence[bytes], lstrip: bool = False) -> None:
        self._pieces, self._lstrip = pieces, lstrip
        self._decoder = _MAKE_DECODER("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete. An id outside the vocabulary has none."""
        pieces, size = self._pieces, len(self._pieces)
        text = self._decoder.decode(b"".join([pieces[i] for i in ids if 0 <= i < size]))
        if self._lstrip and text:
            self._lstrip = False
            return text.removeprefix(" ")
        return text

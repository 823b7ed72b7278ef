"""The base model's tokens: text -> ids, and each id's bytes. Read once at start; immutable then.

Two families of decoders are known: byte level (GPT-2, Llama 3, SmolLM), where a token's characters stand for bytes, and
SentencePiece with byte fallback (Llama 2, Mistral), where `▁` is a space and `<0x0A>` a byte. Any other is refused.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

LONG_TOKEN = 8  # characters; ordinary text has 3 to 5 per token


class Vocabulary:
    """`pieces[id]`: the token's bytes in the output's text, empty for special tokens. Raises ValueError."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        kinds = _decoder_kinds(json.loads(file.read_text())["decoder"])
        special = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()} - special
        if "ByteLevel" in kinds:
            to_bytes, self.lstrip = _byte_level, False
        elif kinds & {"ByteFallback", "Metaspace"}:
            to_bytes, self.lstrip = _sentence_piece, bool(kinds & {"Strip", "Metaspace"})
        else:
            raise ValueError(f"{file}: decoder {sorted(kinds)} is not known: give ByteLevel or ByteFallback")
        by_id = {i: token for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        self.pieces: list[bytes] = [b""] * (max(by_id) + 1)
        for i, token in by_id.items():
            if token not in special:
                self.pieces[i] = token.encode() if token in added else to_bytes(token)

    def encode(self, text: str) -> list[int]:
        """The ids, with special tokens where the text has them, and none added."""
        # A batch of one: only batches are computed without Python's lock. Fast: without each token's place in the text.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_within(self, text: str, most: int) -> list[int]:
        """As `encode`; if there are more than `most` ids perhaps only the first of them, but always more than `most`.

        A text far beyond any context costs little more than so much of its beginning as fills the context.
        """
        beginning = most * LONG_TOKEN
        while beginning < len(text):
            if len(ids := self.encode(text[:beginning])) > most + 1:
                return ids
            beginning *= 2  # its tokens are long ones: blanks, say
        return self.encode(text)

    def raw(self, token: int) -> bytes:
        """The token's bytes; a special one's name."""
        piece = self.pieces[token] if 0 <= token < len(self.pieces) else b""
        return piece or (self._tokenizer.id_to_token(token) or "").encode()

    def id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in decoder.get("decoders", [])))


def _byte_level(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, each other byte for the next character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}

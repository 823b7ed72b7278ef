"""The chunks of a streamed answer, encoded. Pure.

Everything that is the same in all of one answer's chunks is encoded once; per piece of text only the text is.
"""

from typing import ClassVar

import orjson

from gateway.openai_api import Usage

NO_LOGPROBS = b"null"


class Chunks:
    """Of one answer. With `include_usage` every chunk has `usage`, null but in the one that tells it."""

    kind: ClassVar[str]

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        same = {"id": answer_id, "object": self.kind, "created": created, "model": model}
        self._head = orjson.dumps(same).removesuffix(b"}") + b',"choices":['
        self._tail = b'],"usage":null}' if include_usage else b"]}"
        self._include_usage = include_usage

    def begin(self, index: int) -> list[bytes]:
        """What comes before a choice's first text."""
        raise NotImplementedError

    def text(self, index: int, text: str, logprobs: bytes = NO_LOGPROBS) -> bytes:
        """A piece of a choice's text, with its tokens' scores."""
        raise NotImplementedError

    def finish(self, index: int, finish_reason: str) -> bytes:
        """A choice's end."""
        raise NotImplementedError

    def usage(self, usage: Usage) -> list[bytes]:
        """The last chunk, where it was asked for."""
        return [self._head + b'],"usage":' + orjson.dumps(_plain(usage)) + b"}"] if self._include_usage else []

    def _choice(self, index: int, filling: bytes, logprobs: bytes, finish: bytes) -> bytes:
        scores = b',"logprobs":' + logprobs + b',"finish_reason":' + finish + b"}"
        return self._head + b'{"index":%d,' % index + filling + scores + self._tail


class ChatChunks(Chunks):
    kind = "chat.completion.chunk"

    def begin(self, index: int) -> list[bytes]:
        return [self._choice(index, b'"delta":{"role":"assistant","content":""}', NO_LOGPROBS, b"null")]

    def text(self, index: int, text: str, logprobs: bytes = NO_LOGPROBS) -> bytes:
        return self._choice(index, b'"delta":{"content":' + orjson.dumps(text) + b"}", logprobs, b"null")

    def finish(self, index: int, finish_reason: str) -> bytes:
        return self._choice(index, b'"delta":{}', NO_LOGPROBS, orjson.dumps(finish_reason))


class TextChunks(Chunks):
    kind = "text_completion"

    def begin(self, index: int) -> list[bytes]:
        return []

    def text(self, index: int, text: str, logprobs: bytes = NO_LOGPROBS) -> bytes:
        return self._choice(index, b'"text":' + orjson.dumps(text), logprobs, b"null")

    def finish(self, index: int, finish_reason: str) -> bytes:
        return self._choice(index, b'"text":""', NO_LOGPROBS, orjson.dumps(finish_reason))


def _plain(usage: Usage) -> dict[str, object]:
    details = {"cached_tokens": usage.prompt_tokens_details.cached_tokens}
    plain: dict[str, object] = {name: getattr(usage, name) for name in usage.__struct_fields__}
    return plain | {"prompt_tokens_details": details}

"""Server-sent events, as the API has them: one `data:` line per chunk, comments to keep a connection alive. Pure.

Everything that is the same in all of one answer's chunks is encoded once; per piece of text only the text is.
"""

from typing import ClassVar

import orjson

from gateway.errors import ApiError
from gateway.openai_api import Usage

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
# A comment alone: clients in use stumble over events without data.
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
NO_LOGPROBS = b"null"
_END = b"}\n\n"


class Frames:
    """The frames of one answer. With `include_usage` every chunk has `usage`, null but in the one that tells it."""

    kind: ClassVar[str]

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        same = {"id": answer_id, "object": self.kind, "created": created, "model": model}
        head = orjson.dumps(same).removesuffix(b"}")
        self._head = b"data: " + head + b',"choices":['
        self._tail = (b'],"usage":null' if include_usage else b"]") + _END
        self._include_usage = include_usage

    def begin(self, index: int) -> bytes:
        """What comes before a choice's first text."""
        raise NotImplementedError

    def text(self, index: int, text: str, logprobs: bytes = NO_LOGPROBS) -> bytes:
        """A piece of a choice's text, with its tokens' scores."""
        raise NotImplementedError

    def finish(self, index: int, finish_reason: str) -> bytes:
        """A choice's end."""
        raise NotImplementedError

    def done(self, usage: Usage) -> bytes:
        """What ends a complete answer."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(_plain(usage)) + _END + DONE

    def _choice(self, index: int, filling: bytes, logprobs: bytes, finish: bytes) -> bytes:
        scores = b',"logprobs":' + logprobs + b',"finish_reason":' + finish + b"}"
        return self._head + b'{"index":%d,' % index + filling + scores + self._tail


class ChatFrames(Frames):
    kind = "chat.completion.chunk"

    def begin(self, index: int) -> bytes:
        return self._choice(index, b'"delta":{"role":"assistant","content":""}', NO_LOGPROBS, b"null")

    def text(self, index: int, text: str, logprobs: bytes = NO_LOGPROBS) -> bytes:
        return self._choice(index, b'"delta":{"content":' + orjson.dumps(text) + b"}", logprobs, b"null")

    def finish(self, index: int, finish_reason: str) -> bytes:
        return self._choice(index, b'"delta":{}', NO_LOGPROBS, orjson.dumps(finish_reason))


class TextFrames(Frames):
    kind = "text_completion"

    def begin(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str, logprobs: bytes = NO_LOGPROBS) -> bytes:
        return self._choice(index, b'"text":' + orjson.dumps(text), logprobs, b"null")

    def finish(self, index: int, finish_reason: str) -> bytes:
        return self._choice(index, b'"text":""', NO_LOGPROBS, orjson.dumps(finish_reason))


def _plain(usage: Usage) -> dict[str, object]:
    details = {"cached_tokens": usage.prompt_tokens_details.cached_tokens}
    plain: dict[str, object] = {name: getattr(usage, name) for name in usage.__struct_fields__}
    return plain | {"prompt_tokens_details": details}


def error(problem: ApiError) -> bytes:
    """What ends an answer that broke off: no [DONE] follows."""
    return b"data: " + problem.body() + b"\n\n"

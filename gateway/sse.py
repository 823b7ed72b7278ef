"""Server-sent events, as the chat API has them: one `data:` line per chunk, comments to keep a connection alive. Pure.

Everything that is the same in all of one answer's chunks is encoded once; per piece of text only the text is.
"""

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


class Frames:
    """The frames of one answer. With `include_usage` every chunk has `usage`, null but in the one that tells it."""

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        head = orjson.dumps(
            {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        ).removesuffix(b"}")
        usage = b',"usage":null' if include_usage else b""
        choice = b"data: " + head + b',"choices":[{"index":0,"delta":'
        self._include_usage = include_usage
        self._content = choice + b'{"content":'
        self._content_end = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self.role = choice + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        self.role += usage + b"}\n\n"
        self._finish = choice + b'{},"logprobs":null,"finish_reason":'
        self._finish_end = b"}]" + usage + b"}\n\n"
        self._usage = b"data: " + head + b',"choices":[],"usage":'

    def content(self, text: str) -> bytes:
        """Nothing for no text."""
        return self._content + orjson.dumps(text) + self._content_end if text else b""

    def last(self, finish_reason: str, usage: Usage) -> bytes:
        """What ends a complete answer."""
        told = b""
        if self._include_usage:
            told = self._usage + orjson.dumps({f: getattr(usage, f) for f in usage.__struct_fields__}) + b"}\n\n"
        return self._finish + orjson.dumps(finish_reason) + self._finish_end + told + DONE


def error(problem: ApiError) -> bytes:
    """What ends an answer that broke off: no [DONE] follows."""
    return b"data: " + problem.body() + b"\n\n"

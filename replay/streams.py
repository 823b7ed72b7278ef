"""Greedy streams through the public door, kept chunk by chunk, to be compared with what they should have been."""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec

PROMPTS = (
    "Write a long story about a lighthouse and the sea.",
    "Explain in detail how a bicycle stays upright.",
    "Describe a day in the life of a baker, hour by hour.",
    "List and explain the planets of the solar system.",
    "Write a long letter to a friend about a journey through the mountains.",
    "Explain how bread is made, step by step, with reasons.",
    "Tell the history of the printing press at length.",
    "Describe a market in an old town in great detail.",
)


@dataclass(frozen=True)
class Script:
    """One stream to ask for. temperature 0: there is one right answer."""

    key: str
    model: str
    prompt: str
    max_tokens: int


@dataclass
class Take:
    """What the client saw: every piece with its time (monotonic seconds), the end, and the error if it broke."""

    script: Script
    request_id: str = ""
    adapter: str = ""
    tier: str = ""
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    finish: str = ""
    error: str = ""
    asked_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.asked_at) * 1000 if self.times else -1.0

    @property
    def longest_pause_s(self) -> float:
        """Between two pieces, or before the first."""
        return max((b - a for a, b in zip([self.asked_at, *self.times], self.times, strict=False)), default=0.0)

    @property
    def whole(self) -> bool:
        return not self.error and self.finish in ("stop", "length")

    def same_as(self, other: "Take") -> bool:
        """The same text out of the same number of tokens, ended alike."""
        return (self.text, self.tokens, self.finish) == (other.text, other.tokens, other.finish)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, str | None] | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


async def take(session: aiohttp.ClientSession, url: str, script: Script) -> Take:
    """Streams one script. Never raises for what the server does: that is what is being looked at."""
    seen = Take(script, asked_at=time.monotonic())
    body = {
        "model": script.model,
        "messages": [{"role": "user", "content": script.prompt}],
        "max_tokens": script.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    done = False
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {script.key}"}
        ) as answer:
            seen.request_id = answer.headers.get("x-request-id", "")
            seen.adapter, seen.tier = answer.headers.get("x-adapter-id", ""), answer.headers.get("x-adapter-tier", "")
            if answer.status != 200:
                seen.error = f"{answer.status} {(await answer.text())[:200]}"
                return seen
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    _note(seen, _DECODER.decode(line[6:]))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        seen.error = seen.error or type(error).__name__
    if not done and not seen.error:
        seen.error = "cut off"
    return seen


def _note(seen: Take, chunk: _Chunk) -> None:
    if chunk.error is not None:
        seen.error = str(chunk.error.get("message"))
    if chunk.usage is not None:
        seen.tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        if choice.delta.content:
            seen.pieces.append(choice.delta.content)
            seen.times.append(time.monotonic())
        seen.finish = choice.finish_reason or seen.finish


async def take_all(url: str, scripts: list[Script]) -> list[Take]:
    """All at once, over a connection each."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return list(await asyncio.gather(*(take(session, url, script) for script in scripts)))

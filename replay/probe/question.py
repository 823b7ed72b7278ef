"""One question to one replica, by the road that customers' requests take: HTTP, Kafka, worker, and back.

What is not a whole answer is none: a time-out, a refusal, a replica that leaves on the way. That is told as "could not
ask", with the reason, and never as a wrong answer.
"""

import asyncio
from dataclasses import dataclass

import aiohttp
import msgspec

from gateway.pinned import HEADER
from replay.probe.golden import MAX_TOKENS, Golden

LIMIT_S = 10.0  # a cold canary on a busy replica waits for its slot; but whoever is at fault elsewhere waits with it


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str


class _Answer(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True)
class Question:
    replica: int
    golden: Golden
    prompt: str

    @property
    def expected(self) -> str:
        return self.golden.answers[self.prompt]


@dataclass(frozen=True)
class Heard:
    """`why_not`: why there is no answer, empty where there is one. `got`: text and how it ended."""

    question: Question
    got: tuple[str, str] = ("", "")
    why_not: str = ""
    request_id: str = ""

    @property
    def right(self) -> bool:
        return not self.why_not and self.got == (self.question.expected, self.question.golden.finish)

    @property
    def wrong(self) -> bool:
        return not self.why_not and not self.right


class KeyRefused(Exception):
    """The probe's key is no operator's any more."""


async def ask(session: aiohttp.ClientSession, url: str, key: str, question: Question) -> Heard:
    """Raises KeyRefused; nothing else, whatever the fleet does."""
    body = {
        "model": question.golden.adapter_id,
        "messages": [{"role": "user", "content": question.prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {key}", HEADER: str(question.replica)}
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
        ):
            text, request_id = await answer.read(), answer.headers.get("x-request-id", "")
    except TimeoutError:
        return Heard(question, why_not=f"no answer within {LIMIT_S:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Heard(question, why_not=f"{type(error).__name__}: {error}")
    if answer.status in (401, 403):
        raise KeyRefused(_reason(text))
    if answer.status != 200:
        return Heard(question, why_not=f"{answer.status}: {_reason(text)}", request_id=request_id)
    [choice] = msgspec.json.decode(text, type=_Answer).choices
    return Heard(question, (choice.message.content, choice.finish_reason), request_id=request_id)


def _reason(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return repr(body[:80])

"""An accepted request's answer, from its first token to its last, whatever carries it to the client.

Owns nothing but the texts so far. Whatever ends an answer early, the switchboard cancels what still runs.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from gateway import openai_api
from gateway.base_model import BaseModel
from gateway.choice import Choice, Piece
from gateway.chunks import NO_LOGPROBS
from gateway.endings import failure
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.line import Lines
from gateway.openai_api import PromptDetails, Usage
from gateway.rates import Standing
from gateway.shown_text import Scored, ShownText
from gateway.style import Style
from gateway.switchboard import Switchboard
from schemas.reasons import Outcome, Tier

FIRST_WITHIN_S = 10.0
NEXT_WITHIN_S = 15.0


@dataclass(frozen=True)
class Told:
    """Chunks, encoded, in order; none after a silence. `last`: the answer is complete."""

    chunks: list[bytes]
    last: bool


class Answer:
    """`lines` are `asked.choices` for each prompt, in order. `limits`: how its customer stands, by what is counted."""

    def __init__(
        self,
        request_id: str,
        switchboard: Switchboard,
        model: BaseModel,
        asked: Generation,
        lines: Lines,
        style: Style,
        limits: Mapping[str, Standing],
    ) -> None:
        self.request_id, self.asked, self.limits = request_id, asked, limits
        self._switchboard, self._lines, self._style = switchboard, lines, style
        self._scored = asked.top_logprobs_asked is not None
        self._choices = {
            line: Choice(index, line, ShownText(model.vocabulary, asked.stops, model.stop_ids), self._scored)
            for index, line in enumerate(lines.all)
        }
        self._scorers = [style.scorer(model.vocabulary) for _ in lines.all]
        self._created = int(time.time())
        self.id = f"{style.prefix}{request_id}"

    async def whole(self) -> openai_api.Answer:
        """Raises ApiError."""
        texts = [""] * len(self._choices)
        scores: list[list[Scored]] = [[] for _ in texts]
        finishes = [""] * len(texts)
        while not self._over:
            for choice, piece in await self._pieces():
                if piece.failed is not None:
                    raise self._failure(piece)
                texts[choice.index] += piece.text
                scores[choice.index] += piece.scored
                finishes[choice.index] = piece.finish or ""
        told = [
            self._style.choice(index, text, self._logprobs(index, scores[index]), finishes[index])
            for index, text in enumerate(texts)
        ]
        return openai_api.Answer(self.id, self._style.kind, self._created, self.asked.model, told, self.usage)

    async def told(self) -> AsyncGenerator[Told]:
        """Chunk by chunk. Raises ApiError; what came before the failure has been told by then."""
        encoded = self._style.chunks(self.id, self._created, self.asked.model, self.asked.include_usage)
        begun: set[int] = set()
        while True:
            chunks: list[bytes] = []
            problem: ApiError | None = None
            for choice, piece in await self._pieces(NEXT_WITHIN_S if begun else FIRST_WITHIN_S):
                if piece.failed is not None:
                    problem = self._failure(piece)
                    if not piece.text:
                        break
                if choice.index not in begun:
                    begun.add(choice.index)
                    chunks += encoded.begin(choice.index)
                if piece.text or piece.scored:
                    chunks.append(encoded.text(choice.index, piece.text, self._logprobs(choice.index, piece.scored)))
                if piece.finish is not None:
                    chunks.append(encoded.finish(choice.index, piece.finish))
            if problem is not None:
                if chunks:
                    yield Told(chunks, last=False)
                raise problem
            if over := self._over:
                chunks += encoded.usage(self.usage)
            yield Told(chunks, over)
            if over:
                return

    def cancel(self, detail: str) -> None:
        """Its client takes no more."""
        for line in self._lines.all:
            self._switchboard.cancel(line, Outcome.CANCELLED, detail)

    @property
    def adapter(self) -> str:
        """Its id; "none" is the base model."""
        return self._lines.all[0].flight.ask.adapter or "none"

    @property
    def tier(self) -> Tier | None:
        """None while no worker has said it: for an adapter, "none" would be wrong."""
        flight = self._lines.all[0].flight
        return flight.tier if flight.tier is not Tier.NONE or not flight.ask.adapter else None

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token on any line; None before."""
        firsts = [(line.first_token_at, line.flight.ask.arrived_at) for line in self._lines.all]
        return min((first - arrived for first, arrived in firsts if first is not None), default=None)

    @property
    def used_tokens(self) -> int:
        """Of prompts and outputs, so far; none while nothing came."""
        usage = self.usage
        return usage.total_tokens if usage.completion_tokens else 0

    @property
    def _over(self) -> bool:
        return all(choice.over for choice in self._choices.values())

    async def _pieces(self, timeout_s: float | None = None) -> list[tuple[Choice, Piece]]:
        """What is new, of each choice that is not over; nothing if nothing came within `timeout_s`."""
        pieces = []
        for news in await self._lines.news(timeout_s):
            choice = self._choices[news.line]
            if choice.over:  # a stop string ended it
                continue
            pieces.append((choice, choice.take(news)))
            if choice.stopped:
                self._switchboard.cancel(news.line, Outcome.OK)
        return pieces

    def _failure(self, piece: Piece) -> ApiError:
        assert piece.failed is not None
        return failure(piece.failed, self.asked.model, self.request_id)

    def _logprobs(self, index: int, scored: list[Scored]) -> bytes:
        return self._scorers[index](scored) if self._scored else NO_LOGPROBS

    @property
    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices it has; its cached tokens are its first choice's."""
        flights = [line.flight for line in self._lines.all]
        firsts = flights[:: self.asked.choices]
        prompt = sum(len(flight.ask.prompt) for flight in firsts)
        output = sum(flight.output.position for flight in flights)
        return Usage(prompt, output, prompt + output, PromptDetails(sum(flight.cached for flight in firsts)))

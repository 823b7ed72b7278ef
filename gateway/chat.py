"""POST /v1/chat/completions and /v1/completions: a request from its body to accepted outputs.

The client's going away cancels the handler, in whatever phase, and with it the request. Each choice is an output of its
own, with a Submit, a seed and a row of its own, and one request id and answer with the others.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Generic, TypeVar

from aiohttp import web

from gateway import sse
from gateway.answer import Answer
from gateway.auth import Identity, Keys
from gateway.base_model import BaseModel
from gateway.body import read_body
from gateway.catalogue import Catalogue, not_found
from gateway.decoding import bad
from gateway.errors import ApiError
from gateway.flight import Ask
from gateway.formats import Formats
from gateway.generation import Generation
from gateway.limits import InFlight
from gateway.middleware import REQUEST_ID
from gateway.openai_api import parse_chat, parse_completion
from gateway.pinned import HEADER, not_live, place_of
from gateway.prompts import Prompts
from gateway.rates import Rates
from gateway.readiness import Readiness
from gateway.style import Chat as ChatStyle
from gateway.style import Style
from gateway.style import Text as TextStyle
from gateway.switchboard import Switchboard
from schemas.customers import Customer
from schemas.reasons import Role

if TYPE_CHECKING:
    from gateway.traces import Traces

G = TypeVar("G", bound=Generation)

HEARD_WITHIN_S = 1.0


class Chat:
    """`limit_s`: how long a request may take, all attempts together. `traces`: where answers are traced."""

    def __init__(
        self,
        model: BaseModel,
        keys: Keys,
        catalogue: Catalogue,
        switchboard: Switchboard,
        readiness: Readiness,
        rates: Rates,
        limit_s: float,
        traces: "Traces | None" = None,
    ) -> None:
        self._model, self._keys, self._catalogue = model, keys, catalogue
        self._switchboard, self._readiness, self._limit_s = switchboard, readiness, limit_s
        self._prompts, self._rates, self._in_flight = Prompts(model), rates, InFlight()
        self._formats = Formats(model.grammars)
        self._traces = traces

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Raises ApiError until the first token has come."""
        return await self._post(request, CHAT)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Raises ApiError until the first token has come."""
        return await self._post(request, COMPLETION)

    async def _post(self, request: web.Request, kind: "Kind[G]") -> web.StreamResponse:
        key, pin = request.headers.get("Authorization"), request.headers.getall(HEADER, [])
        async with self.answer(key, request[REQUEST_ID], kind, partial(read_body, request), pin) as answer:
            return await (sse.stream(answer, request) if answer.asked.stream else sse.whole(answer))

    @asynccontextmanager
    async def answer(
        self,
        authorization: str | None,
        request_id: str,
        kind: "Kind[G]",
        body: Callable[[], Awaitable[bytes]],
        pin: Sequence[str] = (),
    ) -> AsyncIterator[Answer]:
        """Accepts a request and gives its answer; on leaving, what still runs for it is cancelled. Raises ApiError.

        `pin`: what the header of gateway/pinned.py says, which only an operator may send.
        """
        arrived_at = time.monotonic()
        await self._heard()
        identity = self._keys.allow(authorization, Role.OPERATOR if pin else Role.CUSTOMER)
        only_on = self._pinned(pin) if pin else None
        customer = identity.customer
        with self._in_flight.places(customer.customer, customer.max_in_flight) as places:
            asked = kind.parse(await body())
            prompts = await kind.prompts(self._prompts, asked)
            places.take(len(prompts) * asked.choices - 1)
            await self._formats.check(asked.schema)
            asks = self._asks(request_id, identity, asked, prompts, arrived_at, only_on)
            tokens = sum(len(prompt) for prompt in prompts) + sum(ask.max_tokens for ask in asks)
            paid, answer = self._rates.take(customer, tokens, arrived_at), None
            try:
                with self._switchboard.open(asks) as lines:
                    limits = self._rates.standing(customer, arrived_at)
                    answer = Answer(request_id, self._switchboard, self._model, asked, lines, kind.style, limits)
                    yield answer
            finally:
                if self._traces is not None and answer is not None:
                    self._traces.answered(answer)
                paid.settle(0 if answer is None else answer.used_tokens, time.monotonic())

    async def _heard(self) -> None:
        """A pause of this process looks like the broker's silence until its readers have run: no reason to refuse.

        Raises ApiError.
        """
        end = time.monotonic() + HEARD_WITHIN_S
        while self._readiness.deaf and time.monotonic() < end:  # noqa: ASYNC110 - a clock's tick tells, not an event
            await asyncio.sleep(0.02)
        self._readiness.check()

    def _pinned(self, pin: Sequence[str]) -> int:
        """Raises ApiError (400, 404)."""
        place = place_of(pin)
        if not self._switchboard.takes_work(place):
            raise not_live(place)
        return place

    def _asks(
        self,
        request_id: str,
        identity: Identity,
        asked: Generation,
        prompts: Sequence[list[int]],
        arrived_at: float,
        only_on: int | None,
    ) -> list[Ask]:
        """One for each choice of each prompt. Raises ApiError."""
        customer = identity.customer
        if not identity.key.allows(asked.model):
            raise not_found(asked.model)
        conversation = asked.conversation
        target = self._catalogue.resolve(customer.customer, asked.model, conversation)
        self._prompts.check_ids("logit_bias", asked.logit_bias or {})
        return [
            Ask(
                request_id=request_id if number == 0 else f"{request_id}-{number}",
                customer=customer.customer,
                model=asked.model,
                adapter=target.adapter,
                content_id=target.content_id,
                prompt=prompt,
                max_tokens=self._max_tokens(customer, asked, len(prompt)),
                sampling=sampling,
                stop_ids=self._model.stop_ids,
                arrived_at=arrived_at,
                deadline_at=arrived_at + self._limit_s,
                conversation=conversation,
                only_on=only_on,
            )
            for number, (prompt, sampling) in enumerate(product(prompts, asked.sampling()))
        ]

    def _max_tokens(self, customer: Customer, asked: Generation, prompt: int) -> int:
        """What the client asks for, or the default, within the context. Raises ApiError where it does not fit."""
        if customer.max_input_tokens and prompt > customer.max_input_tokens:
            raise ApiError(
                "invalid_request",
                f"{asked.prompt_name}: the prompt is longer than the {customer.max_input_tokens} tokens that this "
                "customer may send: shorten it",
                asked.prompt_name,
            )
        if customer.max_output_tokens and (asked.limit or 0) > customer.max_output_tokens:
            raise bad(asked.limit_name, asked.limit, f"this customer may have {customer.max_output_tokens}")
        context = self._model.context
        left = context - prompt
        if left < 1:
            raise ApiError(
                "context_length_exceeded",
                f"{asked.prompt_name}: the prompt is {context} tokens or more, and the context of this model "
                f"{context}, output included: shorten it",
                asked.prompt_name,
            )
        if asked.limit is not None and asked.limit > left:
            raise ApiError(
                "context_length_exceeded",
                f"{asked.limit_name} is {asked.limit}: the context of this model is {context} tokens, and "
                f"the prompt has {prompt}: give at most {left}",
                asked.limit_name,
            )
        if asked.limit is not None:
            return asked.limit
        return min(asked.default_max_tokens, left, customer.max_output_tokens or left)


@dataclass(frozen=True)
class Kind(Generic[G]):
    """What chats and completions do differently on their way in, and the style in which they are answered."""

    parse: Callable[[bytes], G]
    prompts: Callable[[Prompts, G], Awaitable[list[list[int]]]]
    style: Style


CHAT = Kind(parse_chat, Prompts.chat, ChatStyle)
COMPLETION = Kind(parse_completion, Prompts.completion, TextStyle)

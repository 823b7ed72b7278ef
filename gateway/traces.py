"""The gateway's spans: one for each request, and under it one for each attempt, from its Submit to its last word.

Owns the open ones: an output's entry lives from its first Submit to its End, which comes exactly once. An attempt's
context goes with its Submit in the record's headers; the worker's span comes back with `tokens` and is linked. Which
request an attempt is of, its first Submit knows: it is sent in the request's own task. Names and attributes are those
of OpenTelemetry's conventions for HTTP, messaging and GenAI, and ours begin with lorafleet. Nothing of what was said
goes in, nor any header: a key may stand there. A crash loses what is open.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context

from gateway.answer import Answer
from gateway.errors import ApiError
from gateway.middleware import REQUEST_ID
from gateway.pinned import OBEYED
from schemas.reasons import FinishReason, Outcome
from schemas.requests import Cancel, Submit
from schemas.stats import RequestFinished
from schemas.tokens import Admitted, Finished, Rejected, TokenBatch, Tokens
from schemas.topics import REQUESTS
from streams.bus.reader import Headers
from streams.tracing.context import extracted, injected, told_of

OPERATIONS = dict(zip(OBEYED, ("chat", "text_completion"), strict=True))
TOLD = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
WELL = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
Attribute = str | int | float | bool | list[str]


@dataclass
class _Output:
    """`left_at`: when the attempt was cancelled, unix ns; what becomes of it is known by what follows."""

    request: Span
    attempt: Span
    submit: Submit
    left_at: int | None = None
    begun: bool = False


class Traces:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._outputs: dict[str, _Output] = {}

    @web.middleware
    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every other middleware: what is refused has a span too."""
        if request.method != "POST" or request.path not in OPERATIONS:
            return await handler(request)
        about: dict[str, Attribute] = {
            "http.request.method": "POST",
            "http.route": request.path,
            "url.path": request.path,
            "url.scheme": request.scheme,
            "network.protocol.version": f"{request.version.major}.{request.version.minor}",
            "gen_ai.operation.name": OPERATIONS[request.path],
        }
        with self.request(f"POST {request.path}", request.headers.items(), about) as span:
            response = await handler(request)
            span.set_attribute("http.response.status_code", response.status)
            span.set_attribute("lorafleet.request.id", request[REQUEST_ID])
            if response.status >= 400:
                span.set_attribute("error.type", str(response.status))
            if response.status >= 500:
                span.set_status(StatusCode.ERROR)
            return response

    @contextmanager
    def request(self, name: str, headers: Iterable[tuple[str, str]], about: Mapping[str, Attribute]) -> Iterator[Span]:
        """The span of what is asked inside, in this task: it continues the trace that `headers` name."""
        span = self._tracer.start_span(name, extracted(headers), SpanKind.SERVER, about)
        token = attach(set_span_in_context(span))
        try:
            yield span
        except asyncio.CancelledError:
            span.set_attribute("error.type", "cancelled")
            raise
        except Exception as problem:
            _failed(span, problem.reason if isinstance(problem, ApiError) else type(problem).__name__)
            raise
        finally:
            detach(token)
            span.end()

    def answered(self, answer: Answer) -> None:
        """What was asked and given, as the answer's end has it; in the request's own task."""
        span, asked, usage = get_current_span(), answer.asked, answer.usage
        about: dict[str, Attribute] = {
            "gen_ai.provider.name": "lorafleet",
            "gen_ai.request.model": asked.model,
            "gen_ai.request.choice.count": asked.choices,
            "gen_ai.request.stream": bool(asked.stream),
            "gen_ai.response.id": answer.id,
            "gen_ai.response.model": answer.adapter,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
            "lorafleet.request.id": answer.request_id,
            "lorafleet.tier": answer.tier or "",
        }
        told = {name: getattr(asked, name) for name in TOLD} | {"max_tokens": asked.limit}
        span.set_attributes(
            about | {f"gen_ai.request.{name}": value for name, value in told.items() if value is not None}
        )
        if (ttft_s := answer.ttft_s) is not None:
            span.set_attribute("gen_ai.server.time_to_first_token", ttft_s)

    def sent(self, submit: Submit) -> Headers:
        """The headers that the attempt's Submit is to have."""
        output = self._outputs.get(submit.request_id)
        if output is not None:
            _end(output, "lost", failed=True)
        request = get_current_span() if output is None else output.request
        about: dict[str, Attribute] = {
            "messaging.system": "kafka",
            "messaging.destination.name": REQUESTS.name,
            "messaging.destination.partition.id": str(submit.replica),
            "lorafleet.request.id": submit.request_id,
            "lorafleet.attempt": submit.attempt,
            "lorafleet.customer.id": submit.customer,
            "lorafleet.adapter.id": submit.adapter,
            "lorafleet.content.id": submit.content_id,
            "lorafleet.replica": submit.replica,
            "lorafleet.replica.incarnation": submit.incarnation,
            "lorafleet.first_position": len(submit.generated),
        }
        span = self._tracer.start_span("attempt", set_span_in_context(request, Context()), SpanKind.PRODUCER, about)
        self._outputs[submit.request_id] = _Output(request, span, submit)
        return injected(span)

    def heard(self, batch: TokenBatch, headers: Headers) -> None:
        """What a replica says of its attempts, before it is acted upon."""
        for request_id, attempt, worker in told_of(headers):
            if (output := self._of(batch, request_id, attempt)) is not None:
                output.attempt.add_link(worker)
        for event in batch.events:
            if (output := self._of(batch, event.request_id, event.attempt)) is None:
                continue
            match event:
                case Admitted():
                    output.attempt.add_event("admitted")
                    output.attempt.set_attribute("lorafleet.tier", event.tier)
                case Tokens() if not output.begun:
                    output.begun = True
                    output.attempt.add_event("first token")
                case Finished():
                    _end(output, event.reason, failed=event.reason not in WELL)
                case Rejected():
                    _end(output, event.reason, failed=True)

    def left(self, cancel: Cancel) -> None:
        """The attempt counts no more."""
        output = self._outputs.get(cancel.request_id)
        if output is not None and output.submit.attempt <= cancel.attempt:
            output.left_at = time.time_ns()

    def ended(self, row: RequestFinished) -> None:
        """The last word on an output."""
        output = self._outputs.pop(row.request_id, None)
        failed = row.outcome not in (Outcome.OK, Outcome.CANCELLED)
        request = get_current_span() if output is None else output.request
        request.set_attribute("lorafleet.customer.id", row.customer)
        request.set_attribute("lorafleet.adapter.id", row.adapter)
        request.set_attribute("lorafleet.content.id", row.content_id)
        if output is not None:
            request.set_attribute("lorafleet.replica", row.replica)
            request.set_attribute("lorafleet.attempts", row.attempts)
            _end(output, row.outcome, failed)
        if failed:
            _failed(request, row.outcome)

    def _of(self, batch: TokenBatch, request_id: str, attempt: int) -> _Output | None:
        output = self._outputs.get(request_id)
        if output is None:
            return None
        submit = output.submit
        said = (attempt, batch.replica, batch.incarnation)
        return output if said == (submit.attempt, submit.replica, submit.incarnation) else None


def _end(output: _Output, how: str, failed: bool) -> None:
    if output.attempt.is_recording():
        output.attempt.set_attribute("lorafleet.attempt.end", how)
        if failed:
            _failed(output.attempt, how)
        output.attempt.end(output.left_at)


def _failed(span: Span, why: str) -> None:
    span.set_attribute("error.type", why)
    span.set_status(StatusCode.ERROR)

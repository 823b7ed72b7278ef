"""The worker's spans: one for each attempt that it takes, under the gateway's, and in it the attempt's stages.

Owns the contexts of Submits that are read and not yet answered (MOST of them, the oldest go first) and the spans of
admitted attempts, each of which ends with its row. A Submit that comes without a context has no span. Nothing of what
was said goes in. A crash loses what is open.
"""

import time
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context

from schemas.reasons import FinishReason, RejectReason, Tier
from schemas.requests import Submit
from schemas.stats import AttemptFinished
from schemas.topics import REQUESTS
from streams.bus.reader import Headers
from streams.tracing.context import of_record, told_back

MOST = 4_096
WELL = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}


@dataclass(frozen=True)
class _Read:
    context: Context
    at: int  # unix ns


class Traces:
    def __init__(self, tracer: Tracer, replica: int, incarnation: int) -> None:
        self._tracer, self._replica, self._incarnation = tracer, replica, incarnation
        self._read: dict[tuple[str, int], _Read] = {}
        self._open: dict[tuple[str, int], Span] = {}

    def read(self, submit: Submit, headers: Headers) -> None:
        """A Submit, before anything is decided about it."""
        if context := of_record(headers):
            self._read[submit.request_id, submit.attempt] = _Read(context, time.time_ns())
            if len(self._read) > MOST:
                del self._read[next(iter(self._read))]

    def admitted(self, submit: Submit, tier: Tier) -> Headers:
        """What tells its gateway where it runs."""
        if (span := self._begun(submit)) is None:
            return ()
        span.set_attribute("lorafleet.tier", tier)
        self._open[submit.request_id, submit.attempt] = span
        return told_back(submit.request_id, submit.attempt, span)

    def rejected(self, submit: Submit, reason: RejectReason) -> None:
        if (span := self._begun(submit)) is not None:
            _failed(span, reason)
            span.end()

    def ended(self, row: AttemptFinished) -> None:
        """The attempt's last word, with how long each stage took."""
        span = self._open.pop((row.request_id, row.attempt), None)
        if span is None:
            return
        end = time.time_ns()
        span.set_attribute("gen_ai.usage.input_tokens", row.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", row.output_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [row.reason])
        span.set_attribute("lorafleet.slot", row.slot)
        if row.first_token_ms >= 0:
            span.set_attribute("gen_ai.server.time_to_first_token", row.first_token_ms / 1000)
        if row.reason not in WELL:
            _failed(span, row.reason)
        self._stages(row, set_span_in_context(span, Context()), end)
        span.end(end)

    def _stages(self, row: AttemptFinished, context: Context, end: int) -> None:
        """One after the other from its admission on; one that was not passed lasted to the end, and was the last."""
        began = at = end - _ns(row.total_ms)
        ready = row.load_ms + row.queue_ms
        for name, took_ms in (
            ("load", row.load_ms),
            ("queue", row.queue_ms),
            ("prefill", row.first_token_ms - ready if row.first_token_ms >= 0 else -1.0),
            ("decode", -1.0),
        ):
            until = end if took_ms < 0 else min(end, at + _ns(took_ms))
            if name != "load" or until > began:  # of the base model, and of what is in a slot, there is none
                self._tracer.start_span(name, context, start_time=at).end(until)
            if took_ms < 0:
                return
            at = until

    def _begun(self, submit: Submit) -> Span | None:
        read = self._read.pop((submit.request_id, submit.attempt), None)
        if read is None:
            return None
        about: dict[str, str | int] = {
            "messaging.system": "kafka",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": REQUESTS.name,
            "messaging.destination.partition.id": str(self._replica),
            "lorafleet.request.id": submit.request_id,
            "lorafleet.attempt": submit.attempt,
            "lorafleet.customer.id": submit.customer,
            "lorafleet.adapter.id": submit.adapter,
            "lorafleet.content.id": submit.content_id,
            "lorafleet.replica": self._replica,
            "lorafleet.replica.incarnation": self._incarnation,
        }
        return self._tracer.start_span("generate", read.context, SpanKind.CONSUMER, about, start_time=read.at)


def _ns(ms: float) -> int:
    return int(ms * 1e6)


def _failed(span: Span, why: str) -> None:
    span.set_attribute("error.type", why)
    span.set_status(StatusCode.ERROR)

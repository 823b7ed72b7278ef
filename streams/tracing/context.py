"""A trace's context in headers, as W3C has it: over HTTP in, to a worker with the record of `requests`, and back.

On the way back one record of `tokens` speaks of many attempts, so that the header of each bears its name. What is
malformed is as good as absent, and never worth a line in our log: it is a client's. Of a tracestate only TRACESTATE
characters, which W3C asks for, are carried on.
"""

import logging
from collections.abc import Iterable, Iterator

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from streams.bus.reader import Headers

PARENT, STATE = "traceparent", "tracestate"
PARENT_CHARACTERS, STATE_CHARACTERS = 256, 512
BACK = f"{PARENT}/"  # and request id, and attempt
_W3C = TraceContextTextMapPropagator()

logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)


def extracted(headers: Iterable[tuple[str, str]]) -> Context:
    """The context to be continued; an empty one where there is none, or more than one."""
    parents, states = [], []
    for name, value in headers:
        if name.lower() == PARENT:
            parents.append(value)
        elif name.lower() == STATE:
            states.append(value)
    if len(parents) != 1 or len(parents[0]) > PARENT_CHARACTERS:
        return Context()
    carrier = {PARENT: parents[0]}
    if states and len(state := ",".join(states)) <= STATE_CHARACTERS:
        carrier[STATE] = state
    return _W3C.extract(carrier, Context())


def of_record(headers: Headers) -> Context:
    """The context that came with a record."""
    return extracted((name, value.decode("latin-1")) for name, value in headers)


def injected(span: Span) -> Headers:
    """What carries the span to those who continue it."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return [(name, value.encode("latin-1", "replace")) for name, value in carrier.items()]


def told_back(request_id: str, attempt: int, span: Span) -> Headers:
    """What tells the sender of an attempt under which span it runs."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return [(f"{BACK}{request_id}/{attempt}", carrier[PARENT].encode())]


def told_of(headers: Headers) -> Iterator[tuple[str, int, SpanContext]]:
    """Request id, attempt and the span under which it runs."""
    for name, value in headers:
        if name.startswith(BACK):
            request_id, _, attempt = name.removeprefix(BACK).rpartition("/")
            span = get_current_span(extracted([(PARENT, value.decode("latin-1"))])).get_span_context()
            if attempt.isdecimal() and span.is_valid:
                yield request_id, int(attempt), span

"""A trace's context in headers: what is carried on, what is as good as absent, and what comes back."""

import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span

from streams.tracing.context import STATE_CHARACTERS, extracted, injected, of_record, told_back, told_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("t")


def test_there_and_on() -> None:
    span = TRACER.start_span("a", extracted([("Traceparent", PARENT), ("tracestate", "a=1"), ("TraceState", "b=2")]))
    headers = dict(injected(span))
    own = span.get_span_context()
    assert headers["traceparent"].decode() == f"00-{PARENT[3:35]}-{own.span_id:016x}-01"
    assert headers["tracestate"] == b"a=1,b=2"
    assert get_current_span(of_record(list(headers.items()))).get_span_context().span_id == own.span_id


def test_a_long_state_is_left_behind() -> None:
    long = ",".join(f"k{n}=" + "v" * 100 for n in range(6))
    assert len(long) > STATE_CHARACTERS
    span = TRACER.start_span("a", extracted([("traceparent", PARENT), ("tracestate", long)]))
    assert [name for name, _ in injected(span)] == ["traceparent"]


def test_the_malformed_is_absent_and_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="root"):
        for parent in ("", "x", "y" * 100_000, PARENT.replace("00-", "ff-", 1), PARENT + "-more", PARENT[:-1] + "x"):
            assert not extracted([("traceparent", parent)])
        assert not extracted([("traceparent", PARENT)] * 2)
        assert extracted([("traceparent", PARENT), ("tracestate", "no state, = ,,,===")])
        assert not of_record([("traceparent", b"\xff\x00")])
    assert caplog.records == []


def test_what_comes_back_names_its_attempt() -> None:
    span = TRACER.start_span("a")
    [(request, attempt, context)] = told_of([*told_back("r/1-2", 3, span), ("other", b"x"), ("traceparent/r/x", b"y")])
    assert (request, attempt, context.span_id) == ("r/1-2", 3, span.get_span_context().span_id)

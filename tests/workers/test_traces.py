"""An attempt's stages in its span, and what the worker forgets."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.reasons import FinishReason, RejectReason, Tier
from schemas.requests import Sampling, Submit
from schemas.stats import AttemptFinished
from workers import traces
from workers.traces import Traces

HEADERS = [("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")]


def submit(request: str = "r", attempt: int = 0) -> Submit:
    return Submit(
        request, attempt, "acme", "acme/x@1", "c1", "base", 3, 7, 0, 5, [1], [], 9, Sampling(1), [2], 60_000
    )  # fmt: skip


def row(reason: FinishReason, load: float, queue: float, first: float, total: float) -> AttemptFinished:
    return AttemptFinished(
        "r", 0, 0, "acme", "acme/x@1", "c1", 1, 1, Tier.REMOTE, reason, 0, 5, 3, 7, 1, 0, 9, queue, load, first, total
    )


class Seen:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = Traces(provider.get_tracer("t"), 3, 7)

    def lengths(self) -> dict[str, float]:
        """Milliseconds."""
        spans = self.exporter.get_finished_spans()
        return {span.name: round(((span.end_time or 0) - (span.start_time or 0)) / 1e6, 1) for span in spans}


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.mark.parametrize(
    ("told", "stages"),
    [
        (row(FinishReason.LENGTH, 40, 5, 60, 100), {"load": 40, "queue": 5, "prefill": 15, "decode": 40}),
        (row(FinishReason.LENGTH, 0, 5, 60, 100), {"queue": 5, "prefill": 55, "decode": 40}),
        (row(FinishReason.LOAD_FAILED, -1, -1, -1, 100), {"load": 100}),
        (row(FinishReason.CANCELLED, 40, -1, -1, 100), {"load": 40, "queue": 60}),
        (row(FinishReason.ERROR, 0, 0, -1, 100), {"queue": 0, "prefill": 100}),
    ],
)
def test_stages_follow_one_another_as_far_as_they_were_reached(
    seen: Seen, told: AttemptFinished, stages: dict[str, float]
) -> None:
    seen.traces.read(submit(), HEADERS)
    assert seen.traces.admitted(submit(), Tier.REMOTE)
    seen.traces.ended(told)
    lengths = seen.lengths()
    del lengths["generate"]
    assert lengths == stages
    [generate] = [span for span in seen.exporter.get_finished_spans() if span.name == "generate"]
    assert generate.status.is_ok is (told.reason in traces.WELL)


def test_a_refused_one_has_a_span_and_one_without_a_context_none(seen: Seen) -> None:
    seen.traces.read(submit(), HEADERS)
    seen.traces.rejected(submit(), RejectReason.DRAINING)
    [span] = seen.exporter.get_finished_spans()
    assert span.attributes is not None
    assert (span.attributes["error.type"], span.attributes["lorafleet.adapter.id"]) == ("draining", "acme/x@1")
    for headers in ([], [("traceparent", b"nonsense")]):
        seen.traces.read(submit("s"), headers)
        assert seen.traces.admitted(submit("s"), Tier.GPU) == ()
    assert len(seen.exporter.get_finished_spans()) == 1


def test_what_is_never_answered_is_forgotten(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST", 3)
    for number in range(5):
        seen.traces.read(submit(f"r{number}"), HEADERS)
    assert [bool(seen.traces.admitted(submit(f"r{number}"), Tier.GPU)) for number in range(5)] == [False] * 2 + [
        True
    ] * 3

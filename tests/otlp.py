"""A collector: takes spans as OTLP over HTTP, and keeps what came."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """`parent` is empty for a root. `links`: (trace, span)."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    kind: int
    attributes: dict[str, Any]
    events: list[str]
    links: list[tuple[str, str]]
    error: bool
    start: int
    end: int


class Collector:
    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.raw: list[bytes] = []

    def named(self, name: str, trace: str = "") -> list[Seen]:
        """In the order in which they began."""
        found = [span for span in self.spans if span.name == name and trace in ("", span.trace)]
        return sorted(found, key=lambda span: span.start)

    @asynccontextmanager
    async def at(self, port: int) -> AsyncIterator[str]:
        """The endpoint."""

        async def take(request: web.Request) -> web.Response:
            self.raw.append(body := await request.read())
            self.spans += _decoded(body)
            return web.Response(content_type="application/x-protobuf")

        async with serving(port, take) as url:
            yield url


@asynccontextmanager
async def serving(port: int, take: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    """Whatever answers to exports."""
    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def _decoded(body: bytes) -> list[Seen]:
    told = ExportTraceServiceRequest.FromString(body)
    return [
        Seen(
            _attributes(group.resource.attributes)["service.name"],
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind,
            _attributes(span.attributes),
            [event.name for event in span.events],
            [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            span.status.code == span.status.STATUS_CODE_ERROR,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
        )
        for group in told.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}

"""Ended spans, to an OTLP endpoint over HTTP, behind the back of whoever made them.

Owns the spans that are not exported yet: at most OTEL_BSP_MAX_QUEUE_SIZE (2,048), and what is too much is dropped. A
thread of its own sends them; nothing that is traced waits for it. A crash loses what was not sent.
"""

import asyncio
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_NAMESPACE, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

FLUSH_S = 2.0


class Exporter:
    """`service` and `place` say whose spans they are. The endpoint is that of the environment."""

    def __init__(self, service: str, place: int) -> None:
        about = {SERVICE_NAME: service, SERVICE_NAMESPACE: "lorafleet", SERVICE_INSTANCE_ID: str(place)}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self._provider.get_tracer("lorafleet")

    async def stop(self) -> None:
        """Sends what is left, for up to FLUSH_S."""
        # Its own time limit is not kept while an answer hangs; a daemon's thread holds up nobody's end.
        flushing = threading.Thread(target=self._provider.shutdown, name="spans' flush", daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, FLUSH_S)

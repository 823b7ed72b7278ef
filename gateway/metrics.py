"""What Prometheus is told. Labels are bounded: outcomes, tiers, reasons; never a customer, an adapter or a request.

What vLLM's users know has vLLM's name, so that their dashboards read it; the rest is ours.
"""

from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from schemas.stats import RequestFinished

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
TPOT_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
WHOLE_S = (0.1, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)


class Metrics:
    """One registry per process' gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        registry = self.registry
        finished = Counter(
            "lorafleet_gateway_requests", "Accepted requests that ended.", ["outcome"], registry=registry
        )
        ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", ["tier"], buckets=TTFT_S, registry=registry
        )
        # By label, kept: the library takes longer to find a child than to count in it.
        self._finished, self._ttft = cache(finished.labels), cache(ttft.labels)
        self._tpot = Histogram(
            "vllm:time_per_output_token_seconds", "Per output token after the first.", buckets=TPOT_S, registry=registry
        )
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to the last word.", buckets=WHOLE_S, registry=registry
        )
        self._prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._output_tokens = Counter("vllm:generation_tokens", "Output tokens of ended requests.", registry=registry)
        self._errors = Counter("lorafleet_gateway_errors", "Error answers.", ["reason"], registry=registry)
        self.loop_lag = Histogram(
            "lorafleet_gateway_loop_lag_seconds", "How late the event loop ran.", buckets=LAG_S, registry=registry
        )

    def ended(self, row: RequestFinished) -> None:
        self._finished(row.outcome).inc()
        self._prompt_tokens.inc(row.prompt_tokens)
        self._output_tokens.inc(row.output_tokens)
        if row.ttft_ms >= 0:
            self._ttft(row.tier).observe(row.ttft_ms / 1000)
        if row.tpot_ms >= 0:
            self._tpot.observe(row.tpot_ms / 1000)
        self._whole.observe(row.total_ms / 1000)

    def refused(self, reason: str) -> None:
        """An error answer; `reason` is a key of gateway.errors.REASONS."""
        self._errors.labels(reason).inc()

    def gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """A value that is read when Prometheus asks."""
        Gauge(f"lorafleet_gateway_{name}", about, registry=self.registry).set_function(read)

    def counter(self, name: str, about: str, read: Callable[[], float]) -> None:
        """A count that is kept elsewhere, read when Prometheus asks."""
        self.registry.register(_Kept(f"lorafleet_gateway_{name}", about, read))

    def text(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


class _Kept:
    def __init__(self, name: str, about: str, read: Callable[[], float]) -> None:
        self._name, self._about, self._read = name, about, read

    def collect(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._about, value=self._read())]

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._about)]

"""What Prometheus is told. Labels are bounded: outcomes, tiers, reasons; never a customer, an adapter or a request."""

from collections.abc import Callable, Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from schemas.stats import RequestFinished

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
TPOT_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)


class Metrics:
    """One registry per process' gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        prefix = "lorafleet_gateway_"
        finished = Counter(f"{prefix}requests", "Accepted requests that ended.", ["outcome"], registry=self.registry)
        ttft = Histogram(
            f"{prefix}ttft_seconds", "Arrival to first token.", ["tier"], buckets=TTFT_S, registry=self.registry
        )
        # By label, kept: the library takes longer to find a child than to count in it.
        self._finished, self._ttft = cache(finished.labels), cache(ttft.labels)
        self._tpot = Histogram(
            f"{prefix}tpot_seconds", "Time per output token after the first.", buckets=TPOT_S, registry=self.registry
        )
        tokens = Counter(f"{prefix}tokens", "Tokens of ended requests.", ["kind"], registry=self.registry)
        self._prompt_tokens, self._output_tokens = tokens.labels("prompt"), tokens.labels("output")
        self._errors = Counter(f"{prefix}errors", "Error answers.", ["reason"], registry=self.registry)
        self.loop_lag = Histogram(
            f"{prefix}loop_lag_seconds", "How late the event loop ran.", buckets=LAG_S, registry=self.registry
        )

    def ended(self, row: RequestFinished) -> None:
        self._finished(row.outcome).inc()
        self._prompt_tokens.inc(row.prompt_tokens)
        self._output_tokens.inc(row.output_tokens)
        if row.ttft_ms >= 0:
            self._ttft(row.tier).observe(row.ttft_ms / 1000)
        if row.tpot_ms >= 0:
            self._tpot.observe(row.tpot_ms / 1000)

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

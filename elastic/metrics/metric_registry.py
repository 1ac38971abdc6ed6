"""The values that are shown now, in a registry of prometheus-client. From any thread."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from elastic.metrics.catalogue import CATALOGUE, JOB, MetricKind


class MetricRegistry:
    """Each value is addressed by the name of its metric and the values of its labels, in the catalogue's order."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the counters
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in CATALOGUE:
            name, text, labels = metric.name, metric.text, metric.labels
            match metric.kind:
                case MetricKind.COUNTER:
                    self._counters[name] = Counter(name, text, labels, registry=self._registry)
                case MetricKind.GAUGE:
                    self._gauges[name] = Gauge(name, text, labels, registry=self._registry)
                case MetricKind.HISTOGRAM:
                    bounds = metric.buckets
                    self._histograms[name] = Histogram(name, text, labels, registry=self._registry, buckets=bounds)
        self._of_jobs = {metric.name for metric in CATALOGUE if JOB in metric.labels}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Raise a counter."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def put(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._gauges[name].labels(*labels).set(value)

    def observe(self, name: str, seconds: float, times: int = 1, *labels: str) -> None:
        """Put a time into a histogram, so many times."""
        histogram = self._histograms[name]
        for _ in range(times):
            (histogram.labels(*labels) if labels else histogram).observe(seconds)

    def clear(self, name: str) -> None:
        """Take back all values of a gauge."""
        self._gauges[name].clear()

    def take_back(self, name: str, job: str) -> None:
        """Take back a job's values of a gauge."""
        self._gauges[name].remove_by_labels({JOB: job})

    def forget(self, job: str, *, counters: bool = True) -> None:
        """Take back what is known of a job. counters: also counts and times; then the job never comes back."""
        both = {**self._counters, **self._histograms} if counters else {}
        for name, metric in {**self._gauges, **both}.items():
            if name in self._of_jobs:
                metric.remove_by_labels({JOB: job})

    def shown(self, accept: str) -> tuple[bytes, str]:
        """The text for a scraper, and its content type. accept: the scraper's header of that name."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # prometheus_client, of a version that is no number
            encoder, content_type = choose_encoder("")
        return encoder(self._registry), content_type

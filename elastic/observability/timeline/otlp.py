"""The spans of a job for an OpenTelemetry collector, by OTLP over HTTP (extra: elastic-ring[otlp])."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.errors import ConfigError, ElasticError
from elastic.observability.timeline.spans import Instant, Span
from elastic.version import __version__

BATCH = 512
"""Spans of one request, as OpenTelemetry's own processors send them."""
TIMEOUT_S = 10
"""Seconds until a request is given up."""


def export(found: Sequence[Span | Instant], job: str, url: str) -> int:
    """Send one trace: a span of the job, and in it all others; instants are its events. OTLP has no open span: one ends
    when it was looked at, and has the attribute `open`. Returns how many spans were sent.

    url: of the collector, such as http://127.0.0.1:4318. Raises ConfigError if the extra is not installed or the url is
    none, ElasticError if the collector does not take the spans.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp {url}: give the collector's URL, such as http://127.0.0.1:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.trace import set_span_in_context
    except ImportError as error:
        raise ConfigError(f"--otlp needs an extra: pip install 'elastic-ring[otlp]' ({error})") from None
    kept = InMemorySpanExporter()
    about_us = {"service.name": "elastic", "service.version": __version__, "elastic.job": job}
    provider = TracerProvider(resource=Resource(about_us), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("elastic", __version__)
    times = [at for it in found for at in ((it.at_ns,) if isinstance(it, Instant) else (it.start_ns, it.end_ns))]
    whole = tracer.start_span(f"job {job}", start_time=min(times, default=0))
    inside = set_span_in_context(whole)
    for it in found:
        about: dict[str, str | bool] = {
            "node": it.node,
            "track": it.track,
            "kind": it.kind,
            **{key: str(of) for key, of in it.about.items()},
        }
        if isinstance(it, Instant):
            whole.add_event(it.name, about, timestamp=it.at_ns)
        else:
            about |= {"open": True} if it.open else {}
            tracer.start_span(it.name, inside, attributes=about, start_time=it.start_ns).end(it.end_ns)
    whole.end(max(times, default=0))
    exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
    spans = kept.get_finished_spans()
    for first in range(0, len(spans), BATCH):
        if exporter.export(spans[first : first + BATCH]) is not SpanExportResult.SUCCESS:
            raise ElasticError(f"the collector at {url} has not taken the spans; see that it listens to OTLP over HTTP")
    return len(spans)

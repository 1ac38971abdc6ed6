"""A job on a time axis: `elastic trace`.

spans.py         journals and flights to spans and instants; pure
chrome_trace.py  the JSON that Perfetto and chrome://tracing open
otlp.py          the spans for an OpenTelemetry collector
"""

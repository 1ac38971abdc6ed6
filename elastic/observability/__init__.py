"""Views of a job or a fleet for people and for their tools. No running job depends on a module of this package.

    dashboard/  a page that shows a job or a fleet, and its buttons
    timeline/   a job on a time axis: traces for Chrome and OpenTelemetry
    trackers/   the process that sends steps to MLflow or W&B

What Prometheus reads is in elastic/metrics, as replicas and agents serve it.
"""

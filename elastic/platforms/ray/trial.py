"""A Trainer as a trial of Ray Tune: a function trainable, whose configuration is the last argument of the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic.platforms.common.job_driver import JobResult

WHERE = {"node:__internal_head__": 0.001}
"""The trial's own process only waits, on the head, as the trial ends with it. What its workers need is asked for beside
it, by the trial itself, because Tune gives each trial a fixed share."""

OnMetrics = Callable[[int, Mapping[str, Any]], None]


class Fits(Protocol):
    """A trainer for one configuration."""

    def fit(self, on_metrics: OnMetrics | None = None) -> JobResult: ...


def trainable(trainer_of: Callable[[Mapping[str, Any]], Fits]) -> Any:
    """For tune.Tuner. Reports the metrics of the newest step about once a second, with `step`; at the end those of the
    last one, with `digest` and `checkpoint_path`."""
    from ray import tune

    def trial(config: dict[str, Any]) -> None:
        def report(step: int, metrics: Mapping[str, Any]) -> None:
            tune.report({**metrics, "step": step})

        result = trainer_of(config).fit(report)
        tune.report(
            {
                **result.metrics,
                "step": result.steps - 1,
                "digest": result.digest,
                "checkpoint_path": result.checkpoint,
            }
        )

    return tune.with_resources(trial, WHERE)

"""`python -m elastic.observability.trackers KIND OPTIONS`, as the sink of a leader starts it.

KIND: "mlflow" or "wandb". OPTIONS: of the tracker's constructor, as a JSON object; secrets come from the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from elastic.observability.trackers.process import Lines, Tracker, serve


def make(kind: str, options: Mapping[str, Any]) -> Tracker:
    if kind == "mlflow":
        from elastic.observability.trackers.mlflow_tracker import MLflowTracker

        return MLflowTracker(**options)
    from elastic.observability.trackers.wandb_tracker import WandBTracker

    return WandBTracker(**options)


def main() -> int:
    kind, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is for the worker's log

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    return serve(make(kind, json.loads(options)), Lines(0), answer)


if __name__ == "__main__":
    sys.exit(main())

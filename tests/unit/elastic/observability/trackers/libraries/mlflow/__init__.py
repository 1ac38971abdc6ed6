"""Of MLflow what is used, over one JSON file; tests/engines has the real one. While the file `down` is beside it,
nothing answers."""

from __future__ import annotations

import fcntl
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

random.seed(0)  # libraries do such things


class MlflowClient:
    def __init__(self, tracking_uri: str) -> None:
        self._path = Path(tracking_uri.removeprefix("file:"))

    @contextmanager
    def _store(self) -> Iterator[dict[str, Any]]:
        if self._path.with_name("down").exists():
            raise ConnectionError("nobody answers")
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            state = json.loads(file.read() or '{"experiments": [], "tags": null, "status": "", "metrics": []}')
            yield state
            file.truncate(0)
            file.write(json.dumps(state))

    def get_experiment_by_name(self, name: str) -> Any:
        with self._store() as state:
            return SimpleNamespace(experiment_id=name) if name in state["experiments"] else None

    def create_experiment(self, name: str) -> str:
        with self._store() as state:
            state["experiments"].append(name)
        return name

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
        with self._store() as state:
            tags = state["tags"]
        if tags is None or filter_string != f"tags.`elastic.run` = '{tags['elastic.run']}'":
            return []
        return [self.get_run("1")]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        with self._store() as state:
            state["tags"] = tags
        return self.get_run("1")

    def get_run(self, run: str) -> Any:
        with self._store() as state:
            newest = {name: value for name, value, _, _ in sorted(state["metrics"], key=lambda metric: metric[3])}
        data = SimpleNamespace(tags=state["tags"], metrics=newest)
        return SimpleNamespace(info=SimpleNamespace(run_id="1"), data=data)

    def set_tag(self, run: str, name: str, value: str) -> None:
        with self._store() as state:
            state["tags"][name] = value

    def update_run(self, run: str, status: str) -> None:
        with self._store() as state:
            state["status"] = status

    set_terminated = update_run

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        assert len(metrics) <= 1000
        with self._store() as state:
            state["metrics"] += [list(metric) for metric in metrics]

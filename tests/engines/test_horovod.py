"""horovod.spark.run, run_elastic and RayExecutor, on a real Spark and a real Ray."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.horovod import ray as horovod_ray
from elastic.horovod import spark as horovod_spark

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]


def summed(offset: float, scale: float = 1.0) -> tuple[int, int, float]:
    """(rank, size, a sum over the ranks)."""
    import torch

    import elastic.horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total) * scale + offset


def trained(steps: int) -> tuple[int, int]:
    """(size, steps), of a function that trains elastically."""
    import torch

    import elastic.horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        while state.step < steps:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).pow(2).mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, step=0)
    body(state)
    return hvd.size(), state.step


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pickled with its code: engines have no such module."""
    cloudpickle = pytest.importorskip("cloudpickle")
    here = __import__(function.__module__, fromlist=["x"])
    cloudpickle.register_pickle_by_value(here)
    return function


def test_functions_on_the_executors_of_spark(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark", reason="make test-engines installs it")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    from tests.engines.test_spark import session

    with session(2, tmp_path):
        found = horovod_spark.run(by_value(summed), (10.0,), {"scale": 2.0}, num_proc=2, verbose=2)
        assert found == [(0, 2, 12.0), (1, 2, 12.0)]
        world: dict[str, Any] = {"num_proc": 2, "min_num_proc": 1, "checkpoint_dir": str(tmp_path)}
        assert horovod_spark.run_elastic(by_value(trained), (5,), **world) == [(2, 5), (2, 5)]
        with pytest.raises(ConfigError, match="hosts= names hosts"):
            horovod_spark.run(summed, (0.0,), num_proc=2, hosts="a:2")


def test_functions_on_ray(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="make test-engines installs it")
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # sockets are below: a short path
        monkeypatch.setenv("RAY_TMPDIR", directory)
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        try:
            on_ray(tmp_path)
        finally:
            ray.shutdown()


def on_ray(home: Path) -> None:
    settings = horovod_ray.RayExecutor.create_settings(timeout_s=60)
    executor = horovod_ray.RayExecutor(settings, num_workers=2, checkpoint_dir=str(home / "checkpoints"))
    executor.start(extra_env_vars={"SEEN": "yes"})
    assert executor.run(by_value(summed), args=(1.0,)) == [(0, 2, 2.0), (1, 2, 2.0)]
    with pytest.raises(ConfigError, match="workers that live between two calls"):
        executor.execute(print)
    executor.shutdown()
    settings = horovod_ray.RayExecutor.create_settings(timeout_s=60, min_num_proc=1, max_num_proc=2)
    elastic = horovod_ray.ElasticRayExecutor(settings, checkpoint_dir=str(home / "checkpoints"))
    elastic.start()
    assert elastic.run(by_value(trained), args=(5,)) == [(2, 5), (2, 5)]

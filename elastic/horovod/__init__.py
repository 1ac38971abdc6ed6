"""Horovod's names (docs/horovod.md): a script imports `elastic.horovod.torch` where it imported `horovod.torch`.

torch.py  for PyTorch
spark.py  run() and run_elastic(): a function on the executors of Spark
ray.py    RayExecutor and ElasticRayExecutor: a function on a Ray cluster
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    **options: Any,
) -> list[T]:
    """Call a function in several workers, and return what it returns on each rank, by rank.

    num_proc: how many workers (np= is the same; default 1). options: min_num_proc and max_num_proc, or
    host_discovery_script: the function trains in one with @hvd.elastic.run, and workers come and go. Without them it is
    called again on all workers when one is lost. hosts="a:2,b:4", hostfile, slots, start_timeout, elastic_timeout,
    ssh_port, ssh_identity_file, reset_limit, cooldown_range=(10, 100): as of `elastic horovodrun`; without hosts the
    workers are on this machine, and further options are those of elastic.launch(). Of Horovod's other arguments a line
    says what became of them. Raises ConfigError for arguments that do not go together, and what elastic.launch() does.
    """
    from elastic.platforms.horovod import function_calls

    return function_calls.run(function_calls.call_of(func, args, kwargs, {"num_proc": num_proc, **options}))

"""horovod.spark's functions, on the executors of the active Spark session (docs/spark.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    **options: Any,
) -> list[T]:
    """Call a function in several workers on executors of Spark, and return what it returns on each rank, by rank.

    num_proc: how many workers (default: Spark's default parallelism). The function is called again on all workers when
    one is lost. options: start_timeout, how long the job waits for all its executors, and those of elastic.spark.run();
    of Horovod's other arguments a line says what became of them. Raises what elastic.spark.run() raises.
    """
    from elastic.platforms.horovod import function_calls
    from elastic.platforms.spark import launcher

    number = num_proc or launcher.active_context().defaultParallelism
    call = function_calls.call_of(fn, args, kwargs, {"num_proc": number, **options})
    return list(launcher.run(call.function, **call.of_engine()).values)


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    **options: Any,
) -> list[T]:
    """As run(), for a function that trains in one with @hvd.elastic.run: workers come and go. options: also
    min_num_proc and max_num_proc (default: num_proc), and elastic_timeout."""
    return run(fn, args, kwargs, num_proc, **{"min_num_proc": num_proc or 1, **options})

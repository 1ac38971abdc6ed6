"""Horovod's names (docs/horovod.md): a script imports `elastic.horovod.torch` where it imported `horovod.torch`.

torch.py  for PyTorch
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from elastic.errors import ConfigError

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    min_np: int | None = None,
    max_np: int | None = None,
    **options: Any,
) -> T:
    """Call a function in several workers on this machine, as elastic.launch(), and return what rank 0 returns.

    func: trains in a function of its own with @hvd.elastic.run. np, max_np: how many workers, the larger number.
    min_np: training goes on with so many at least. options: of elastic.launch(). Raises what that raises; ConfigError
    for numbers that do not go together.
    """
    from elastic.platforms.local.launcher import launch

    most, least = max_np or np, min_np or 1
    if not 1 <= least <= np <= most:
        raise ConfigError(f"horovod.run(min_np={least}, np={np}, max_np={most}): write them in ascending order")
    function = functools.partial(func, **(kwargs or {}))
    functools.update_wrapper(function, func)  # a job has the name of its function
    return launch(function, *args, workers=most, min_workers=least, **options)

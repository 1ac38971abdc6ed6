"""Optimizers of torch that step without torch._dynamo, and programs that need it all the same.

torch's optimizers import torch._dynamo in their first step, to tell the compiler what it has to leave alone. That
import takes longer than that of torch itself, and while nobody has imported the compiler there is nothing to tell it.
So methods of the optimizers are replaced by methods that ask first whether torch._dynamo has been imported: if so,
they call torch's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

DYNAMO = "torch._dynamo"

KNOWN = {"elastic", "numpy", "torch", "torchvision"} | sys.stdlib_module_names
"""Packages that use torch._dynamo only where a script asks for it by one of ASKING."""

ASKING = frozenset(
    {"checkpoint", "checkpoint_sequential", "compile", "compiler", "distribute_module", "distribute_tensor", "DTensor"}
    | {"export", "fully_shard", "FullyShardedDataParallel", "parallelize_module"}
)
"""Names of torch that import torch._dynamo when they are called. DistributedDataParallel does so too, but not with
logical ranks."""


def asks_for_dynamo(packages: Collection[str], names: Collection[str]) -> bool:
    """Whether each worker would import torch._dynamo on its own. packages: installed ones that the program imports.
    names: all identifiers in its source. Workers of a program for which this is wrong import it when they need it."""
    return not ASKING.isdisjoint(names) or not KNOWN.issuperset(packages)


def defer_dynamo() -> None:
    """Let torch's optimizers not import torch._dynamo. torch has to be imported. Another torch whose methods look
    different keeps them as they are."""
    optim = sys.modules["torch.optim"]
    for owner in {optim.Optimizer, *_optimizers(optim)}:
        for name, method in list(vars(owner).items()):
            if callable(method) and _imports_dynamo(method):
                setattr(owner, name, _stepping(method) if name == "step" else _plain(method))


def _optimizers(optim: Any) -> Iterator[type]:
    for one in vars(optim).values():
        if isinstance(one, type) and issubclass(one, optim.Optimizer):
            yield one


def _imports_dynamo(method: Callable[..., Any]) -> bool:
    """Whether it is such a method of torch's around the one that does the work."""
    return hasattr(method, "__wrapped__") and DYNAMO in getattr(getattr(method, "__code__", None), "co_names", ())


def _stepping(method: Any) -> Any:
    """As torch's _use_grad_for_differentiable of torch/optim/optimizer.py, which also breaks compiled graphs."""
    import torch

    own = method.__wrapped__

    @functools.wraps(own)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if DYNAMO in sys.modules:
            return method(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return own(self, *args, **kwargs)

    return step


def _plain(method: Any) -> Any:
    """As torch's _disable_dynamo of torch/_compile.py, which also keeps the compiler out."""
    own = method.__wrapped__

    @functools.wraps(own)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return (method if DYNAMO in sys.modules else own)(*args, **kwargs)

    return plain

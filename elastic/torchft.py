"""torchft's names for scripts of `elastic run --ranks N`: `from elastic.torchft import Manager, ...` (docs/torchft.md).

Process groups and transports are names without a content: the job has connections and copies of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from elastic.errors import NotCarried

if TYPE_CHECKING:
    from runtime.frontends.torchft import DistributedDataParallel, DistributedSampler, Manager
    from runtime.frontends.torchft import OptimizerWrapper as Optimizer
    from runtime.frontends.torchft import Unused as PGTransport
    from runtime.frontends.torchft import Unused as ProcessGroupBabyNCCL
    from runtime.frontends.torchft import Unused as ProcessGroupBabyXCCL
    from runtime.frontends.torchft import Unused as ProcessGroupGloo
    from runtime.frontends.torchft import Unused as ProcessGroupNCCL
    from runtime.frontends.torchft import Unused as ProcessGroupXCCL

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "Manager",
    "Optimizer",
    "PGTransport",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupXCCL",
]
_UNUSED = {name: "Unused" for name in __all__ if name.startswith("P")}
_NAMES = {**{name: name for name in __all__}, "Optimizer": "OptimizerWrapper", **_UNUSED}


def __getattr__(name: str) -> object:
    if name in ("DiLoCo", "LocalSGD"):
        raise NotCarried(
            f"elastic.torchft has no {name}: the ranks of a worker share one model. Write the loop as `for step in "
            f"job.steps(train, outer=elastic.{name}(...))`, see docs/algorithms.md, and start it without --ranks; or "
            "start this script with torchft"
        )
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runtime import torch_names

    torch_names.check({**torch_names.OF_WORKERS, **torch_names.OF_RANKS})
    found = importlib.import_module("runtime.frontends.torchft")
    found.tell_script()
    value: object = getattr(found, _NAMES[name])
    globals()[name] = value
    return value

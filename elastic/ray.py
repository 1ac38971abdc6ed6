"""Jobs on a Ray cluster: the public name of elastic/platforms/ray, and Ray Train's question about notices."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from elastic.platforms.ray import JobResult, Trainer

if TYPE_CHECKING:
    from runtime.frontends.preemption_info import PreemptionInfo, get_preemption_info

__all__ = ["JobResult", "PreemptionInfo", "Trainer", "get_preemption_info"]
_OF_WORKERS = ("PreemptionInfo", "get_preemption_info")


def __getattr__(name: str) -> object:
    if name not in _OF_WORKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module("runtime.frontends.preemption_info"), name)
    globals()[name] = value
    return value

"""Elastic, fault-tolerant training for PyTorch. `job = elastic.join()` is where a script starts.

What lives in `runtime`, which imports torch, is resolved at first use, so that agents and the command line, which
import this package too, stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from elastic import errors

if TYPE_CHECKING:
    from runtime.job import Job, join
    from runtime.sinks import JsonLines, TensorBoard

__all__ = ["Job", "JsonLines", "TensorBoard", "errors", "join"]
_LAZY = {"Job": "runtime.job", "join": "runtime.job", "JsonLines": "runtime.sinks", "TensorBoard": "runtime.sinks"}
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

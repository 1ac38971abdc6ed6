"""Logical ranks asked for in a script, and batches that it draws itself: `import elastic.ddp as ddp`.

enable()    what `elastic run --ranks N` does, said in the file; nothing under torchrun and in a script of one process
batches()   training batches without a DataLoader
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.frontends.ddp.drawn_batches import batches
    from runtime.frontends.frameworks.imports import enable

__all__ = ["batches", "enable"]
_LAZY = {"batches": "runtime.frontends.ddp.drawn_batches", "enable": "runtime.frontends.frameworks.imports"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runtime import torch_names

    torch_names.check({**torch_names.OF_WORKERS, **torch_names.OF_RANKS})
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value

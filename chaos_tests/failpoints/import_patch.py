"""Changes to a module of the product, made from outside when a process imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

Patch: TypeAlias = Callable[[Any], None]


def patch_when_imported(module: str, patch: Patch) -> None:
    """In this process, and those forked from it."""
    sys.meta_path.insert(0, _Finder(module, patch))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, patch: Patch) -> None:
        self._module, self._patch = module, patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._patch)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, patch: Patch) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)

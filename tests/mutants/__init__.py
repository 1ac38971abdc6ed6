"""Defects planted into a running product from outside, to see whether the judge finds them.

The directory `site` on PYTHONPATH makes every Python process of a job import this package at its start (Python runs a
`sitecustomize` it finds there); the variable ELASTIC_MUTANT says which defect its modules get as they are imported.
The product knows nothing of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.mutants.catalogue import MUTANTS, Patch

VARIABLE = "ELASTIC_MUTANT"
SITE = Path(__file__).parent / "site"


def install(name: str) -> None:
    """Patch the mutant's module when it is imported in this process."""
    patch_when_imported(MUTANTS[name].module, MUTANTS[name].patch)


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

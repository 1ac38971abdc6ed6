"""Run by Python itself at the start of every process that has this directory on its path: those of a job whose
failpoints may be armed. A `sitecustomize` further down the path, which this one hides, is run too."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

from chaos_tests.failpoints import injected
from chaos_tests.scenario import failpoints

if where := os.environ.get(failpoints.FAILPOINTS_VARIABLE):
    injected.install(where)
_spec = PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.realpath(path or ".") != os.path.dirname(__file__)]
)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

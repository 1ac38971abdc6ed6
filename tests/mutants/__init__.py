"""Defects planted into a running product from outside, to see whether the judge finds them.

The directory `site` on PYTHONPATH makes every Python process of a job import this package at its start (Python runs a
`sitecustomize` it finds there); the variable ELASTIC_MUTANT says which defect its modules get as they are imported.
The product knows nothing of it.
"""

from __future__ import annotations

from pathlib import Path

from chaos_tests.failpoints.import_patch import patch_when_imported
from tests.mutants.catalogue import MUTANTS

VARIABLE = "ELASTIC_MUTANT"
SITE = Path(__file__).parent / "site"


def install(name: str) -> None:
    """Patch the mutant's module when it is imported in this process."""
    patch_when_imported(MUTANTS[name].module, MUTANTS[name].patch)

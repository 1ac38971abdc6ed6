"""Run by Python itself at the start of every process that has this directory on its path."""

import os

if name := os.environ.get("ELASTIC_MUTANT"):
    from tests.mutants import install

    install(name)

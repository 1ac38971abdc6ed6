"""Run by Python itself at the start of every process of a job that has this directory on its path."""

from tests.live.exchanges import gated_start
from tests.mutants import patch_when_imported

patch_when_imported("runtime.mpi", gated_start)

"""Run by Python itself at the start of every process of a job that has this directory on its path."""

from tests.live.exchanges import gated, gloo_for_nccl
from tests.mutants import patch_when_imported

patch_when_imported("runtime.nccl", gloo_for_nccl)
patch_when_imported("runtime.process_group", gated)

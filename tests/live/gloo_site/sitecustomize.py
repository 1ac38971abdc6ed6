"""Run by Python itself at the start of every process of a job that has this directory on its path."""

from chaos_tests.failpoints.import_patch import patch_when_imported
from tests.live.exchanges import gated, gloo_for_nccl

patch_when_imported("runtime.allreduce.ring.nccl", gloo_for_nccl)
patch_when_imported("runtime.allreduce.ring.process_group", gated)

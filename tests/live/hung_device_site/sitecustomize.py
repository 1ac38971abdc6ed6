"""Run by Python itself at the start of every process of a job that has this directory on its path."""

from typing import Any

from chaos_tests.failpoints.import_patch import patch_when_imported
from tests.live.exchanges import gated, gloo_for_nccl, hangs_after_abort, named_gpus


def hung(process_group: Any) -> None:
    gated(process_group)
    hangs_after_abort(process_group)


patch_when_imported("runtime.allreduce.ring.nccl", gloo_for_nccl)
patch_when_imported("runtime.allreduce.ring.process_group", hung)
patch_when_imported("runtime.worker.gpu", named_gpus)

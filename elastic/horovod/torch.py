"""Horovod's names for PyTorch: `import elastic.horovod.torch as hvd` (docs/horovod.md).

They are resolved at first use, so that this module imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "batch_norm": "SyncBatchNorm",
    "collectives": "allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_ alltoall "
    "alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ grouped_allgather "
    "grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ "
    "grouped_reducescatter grouped_reducescatter_async join poll reducescatter reducescatter_async "
    "sparse_allreduce_async synchronize",
    "compression": "Compression",
    "current": "add_process_set cross_rank cross_size get_process_set_ids_and_ranks global_process_set init "
    "is_homogeneous is_initialized local_rank local_size rank remove_process_set shutdown size",
    "interrupts": "HorovodInternalError HostsUpdatedInterrupt",
    "objects": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "optimizer": "DistributedOptimizer",
    "process_sets": "ProcessSet",
    "timeline": "start_timeline stop_timeline",
}
"""Module of runtime/frontends/horovod -> its names."""
_OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_BUILT = {
    **dict.fromkeys(("gloo_built", "gloo_enabled"), True),
    **dict.fromkeys(("mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "ddl_built"), False),
    **dict.fromkeys(("ccl_built", "cuda_built", "rocm_built"), False),
}
"""Horovod's questions about what it was compiled with. True is what a script may rely on: collectives on CPUs."""
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted([*_HOME, *_OPS, *_BUILT, "elastic"])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: Any
    if name in _BUILT:
        answer = _BUILT[name]
        found = lambda *args: answer  # noqa: E731  # a function of Horovod's, which takes no arguments
    else:
        found = _of_runtime(name)
    globals()[name] = found
    return found


def _of_runtime(name: str) -> Any:
    from runtime import torch_names

    torch_names.check({**torch_names.OF_WORKERS, **torch_names.OF_RANKS})
    package = "runtime.frontends.horovod"
    if name == "elastic":
        return importlib.import_module(f"{package}.elastic_mode")
    if name in _OPS:
        from runtime.frontends.horovod.arithmetic import ReduceOp

        return ReduceOp[name.upper()]
    return getattr(importlib.import_module(f"{package}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

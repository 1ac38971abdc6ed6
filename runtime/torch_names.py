"""Names of torch that torch does not document, and that it may rename: for which part of this program each is used.

All were seen in each torch from 2.11 to 2.15. tests/unit/runtime/test_torch_names.py finds each use that is not listed
here, and what the installed torch lacks.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping

from elastic.errors import UnsupportedTorch
from elastic.version import __version__, torch_releases

OF_WORKERS: Mapping[str, str] = {
    "torch._C._distributed_c10d.AllreduceOptions": "the sum of gradients on GPUs",
    "torch._C._distributed_c10d.PrefixStore": "connections between GPUs",
    "torch._C._distributed_c10d.ReduceOp": "the sum of gradients on GPUs",
    "torch._C._distributed_c10d.Store": "connections between GPUs",
    "torch._C._distributed_c10d.TCPStore": "connections between GPUs",
    "torch._C._nn.flatten_dense_tensors": "the sum of gradients",
    "torch._C._nn.unflatten_dense_tensors": "the sum of gradients",
    "torch._C._storage_Use_Count": "gradients that are not copied before they are added",
    "torch.Tensor._indices": "batches with sparse tensors",
    "torch.Tensor._use_count": "gradients that are not copied before they are added",
    "torch.UntypedStorage._cdata": "gradients that are not copied before they are added",
    "torch._foreach_copy_": "the sum of gradients",
    "torch._foreach_mul_": "the sum of gradients",
    "torch._foreach_norm": "seeing which buffers a script changes",
    "torch._foreach_zero_": "the sum of gradients",
    "torch.Tensor._values": "batches with sparse tensors",
    "torch.Tensor._version": "seeing what a script changes",
    "torch._debug_has_internal_overlap": "copying the state to a newcomer",
    "torch.nn.modules.batchnorm._NormBase": "the statistics of BatchNorm",
}
"""Name -> what each worker uses it for."""

OF_RANKS: Mapping[str, str] = {
    "torch._C._distributed_c10d.HashStore": "the process group of --ranks",
    "torch._C._distributed_c10d._create_work_from_future": "the process group of --ranks",
    "torch._disable_dynamo": "compiled models with --ranks",
    "torch.distributed.distributed_c10d._object_to_tensor": "objects in collectives of --ranks",
    "torch.distributed.distributed_c10d._tensor_to_object": "objects in collectives of --ranks",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "DistributedDataParallel with --ranks",
    "torch.nn.parallel.DistributedDataParallel._set_static_graph": "DistributedDataParallel with --ranks",
    "torch.utils._pytree.tree_flatten": "batches of elastic.ddp.batches()",
    "torch.utils.data._utils.worker._worker_info": "a worker_init_fn with --ranks",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "loaders without a DistributedSampler with --ranks",
}
"""The same with --ranks."""

OF_KEPT: Mapping[str, str] = {
    "torch._debug_has_internal_overlap": "elastic.keep",
    "torch.nn.Module._save_to_state_dict": "elastic.keep",
    "torch._foreach_copy_": "elastic.keep",
}
"""The same where a script calls elastic.keep."""

OF_SHARDS: Mapping[str, str] = {
    "torch.distributed.tensor.DTensor._local_tensor": "elastic.keep with sharded tensors",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "elastic.keep with sharded tensors",
    "torch.nn.utils.clip_grad._get_total_norm": "elastic.keep with units=",
}
"""The same where elastic.keep is given DTensors; seen in 2.13."""

OF_KEPT_RANKS: Mapping[str, str] = {
    "torch.nn.parallel.DistributedDataParallel._build_params_for_reducer": "elastic.keep with --ranks",
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": "elastic.keep with --ranks",
    "torch._C._distributed_c10d.Reducer._autograd_hook": "elastic.keep with --ranks",
    "torch._C._distributed_c10d.Reducer._rebuild_buckets": "elastic.keep with --ranks",
}
"""The same where elastic.keep runs with --restart --ranks; seen in 2.13."""

OF_NCCL: Mapping[str, str] = {
    "torch._C._distributed_c10d.DebugLevel": "--ring nccl",
    "torch._C._distributed_c10d.get_debug_level": "--ring nccl",
    "torch._C._distributed_c10d.set_debug_level": "--ring nccl",
    "torch.distributed.ProcessGroupNCCL.Options._timeout": "--ring nccl",
    "torch.distributed.ProcessGroupNCCL.Options.config": "--ring nccl",
    "torch.distributed.ProcessGroupNCCL.eager_connect_single_device": "--ring nccl",
}
"""The same with --ring nccl, where torch was built with NCCL."""


def check(names: Mapping[str, str]) -> None:
    """Raise UnsupportedTorch if the installed torch lacks one of them."""
    import torch

    for name, use in names.items():
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            raise UnsupportedTorch(
                f"torch {torch.__version__} lacks {name}, which elastic-ring {__version__} uses for {use}; "
                f"it was tested with {torch_releases()}"
            ) from None

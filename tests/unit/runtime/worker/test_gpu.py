from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from runtime.worker.gpu import is_of_device

LAUNCH = "CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(LAUNCH),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:133, unhandled cuda error"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
    ],
    ids=str,
)
def test_errors_of_cuda_and_nccl_are_those_of_the_device(error: Exception) -> None:
    assert is_of_device(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error: what a script says about one"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        SystemExit(1),
    ],
    ids=str,
)
def test_mistakes_of_a_script_are_not(error: BaseException) -> None:
    assert not is_of_device(error)


def test_what_a_script_raises_from_an_error_of_its_device_is_one() -> None:
    def raised(*, hidden: bool) -> BaseException:
        try:
            try:
                raise torch.AcceleratorError(LAUNCH)
            except RuntimeError as error:
                if hidden:
                    raise ValueError("no loss") from None
                raise ValueError("no loss") from error
        except ValueError as error:
            return error

    assert is_of_device(raised(hidden=False)) and not is_of_device(raised(hidden=True))


def test_errors_that_name_each_other_as_their_cause_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_of_device(first)

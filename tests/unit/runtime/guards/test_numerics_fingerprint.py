"""What decides bits on a GPU is compared; on a CPU none of it counts. The settings exist without a GPU, too."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.backends import cuda, cudnn

from elastic.errors import Disagree, TimedKernels
from runtime.guards import numerics_fingerprint
from tests.unit.jobs import Recorded, Setup, make_job, set_up, train
from tests.unit.worlds import World

ANY: Any = torch.backends
"""Its types lack the newer names."""
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_what_a_gpu_computes_with_is_in_the_fingerprint_and_a_cpu_has_none_of_it(gpu: None) -> None:
    assert numerics_fingerprint.fingerprint(1, GPU).endswith("1 threads, NVIDIA H100, CUDA 13.0, cuDNN 92000")
    assert "cu" not in numerics_fingerprint.fingerprint(1, CPU).partition(", ")[2].casefold()
    assert numerics_fingerprint.settings(CPU) == {}


CHANGES: dict[str, Callable[[], None]] = {
    "torch's cudnn.benchmark": lambda: setattr(cudnn, "benchmark", True),
    "torch's cudnn.deterministic": lambda: setattr(cudnn, "deterministic", True),
    "torch's deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch's cuda.matmul.fp32_precision": lambda: setattr(cuda.matmul, "fp32_precision", "tf32"),
    "torch's cudnn.conv.fp32_precision": lambda: setattr(ANY.cudnn.conv, "fp32_precision", "ieee"),
    "torch's bf16 sums": lambda: setattr(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "torch's flash attention": lambda: cuda.enable_flash_sdp(False),
}
"""Name of a part -> a call that changes it."""

OLD: dict[str, Callable[[], None]] = {
    "torch's cuda.matmul.fp32_precision": lambda: setattr(cuda.matmul, "allow_tf32", True),
    "torch's cudnn.conv.fp32_precision": lambda: setattr(cudnn, "allow_tf32", False),
}
"""Torch refuses to read one name once the other was set."""


def in_a_fork(check: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", OLD)
def test_the_older_names_for_tf32_count_in_the_same_part(name: str) -> None:
    def check() -> None:
        before = numerics_fingerprint.settings(GPU)
        OLD[name]()
        after = numerics_fingerprint.settings(GPU)
        assert before[name] != after[name], after
        ANY.cuda.matmul.fp32_precision = "ieee"
        ANY.cudnn.conv.fp32_precision = "ieee"
        numerics_fingerprint.settings(GPU)

    in_a_fork(check)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_is_a_part_of_its_own(name: str) -> None:
    def check() -> None:
        before = numerics_fingerprint.settings(GPU)
        CHANGES[name]()
        after = numerics_fingerprint.settings(GPU)
        assert name in {part for part in after if after[part] != before[part]}, after

    in_a_fork(check)


def onto_a_gpu(setup: Setup) -> None:
    """Behind the first epoch, so that no tensor is ever there."""
    setup.job._training.registered.device = torch.device("cuda", setup.job.rank)


def test_members_with_other_settings_disagree_before_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    monkeypatch.setattr(
        numerics_fingerprint,
        "settings",
        lambda device: {"torch's cudnn.deterministic": str(device.index == 1)} if device.type == "cuda" else {},
    )
    world.run(lambda session: train(set_up(make_job(session)), body=onto_a_gpu))
    assert {type(error) for error in world.errors.values()} == {Disagree}
    assert "torch's cudnn.deterministic: w0=False, w1=True" in str(world.errors["w0"])


@pytest.mark.parametrize("reduction", ["exact", "fixed", "allreduce"])
def test_kernels_that_are_chosen_by_their_time_are_refused_where_bits_are_promised(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(2, reduction=reduction)
    monkeypatch.setattr(cudnn, "benchmark", True)
    world.run(lambda session: train(set_up(make_job(session)), body=onto_a_gpu))
    assert {type(error) for error in world.errors.values()} == (set() if reduction == "allreduce" else {TimedKernels})
    for error in world.errors.values():
        assert "Set torch.backends.cudnn.benchmark = False" in str(error) and "--reduction allreduce" in str(error)


def test_on_a_cpu_and_alone_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "benchmark", True)
    world = World(2)
    world.run(lambda session: train(set_up(make_job(session))))
    assert world.errors == {}
    train(set_up(make_job(Recorded())), body=onto_a_gpu)

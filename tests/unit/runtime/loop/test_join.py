"""elastic.join() in this process: arguments, seeds, hooks into the interpreter."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import elastic
from elastic.errors import ConfigError, NotUnderElastic
from runtime.data.fetch_process import _sendable
from runtime.loop import process_start
from runtime.script_end import raised_at


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent and no launcher."""
    for name in ("ELASTIC_AGENT_SOCKET", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_an_agent_it_is_a_job_of_one() -> None:
    with elastic.join() as job:
        assert (job.rank, job.world_size, job.is_leader) == (0, 1, True)


def test_all_generators_are_seeded() -> None:
    def draws(seed: int) -> tuple[float, float, float]:
        with elastic.join(seed=seed):
            return torch.rand(1).item(), float(np.random.rand()), random.random()

    assert draws(1) == draws(1) != draws(2)


def test_the_thread_count_is_set_and_defaults_to_one() -> None:
    with elastic.join(threads=2):
        assert torch.get_num_threads() == 2
    with elastic.join():
        assert torch.get_num_threads() == 1


def test_a_second_join_is_refused_while_the_first_job_is_open() -> None:
    with elastic.join(), pytest.raises(ConfigError, match="called twice"):
        elastic.join()


def test_closing_puts_the_exception_hook_back() -> None:
    before = sys.excepthook
    job = elastic.join()
    assert sys.excepthook != before
    job.close()
    assert sys.excepthook == before
    job.close()


def test_several_processes_without_an_agent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotUnderElastic, match="elastic run"):
        elastic.join()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"seed": 1 << 63}, "seed="),
        ({"threads": 0}, "threads=0"),
        ({"device": "tpu:x"}, "device='tpu:x'"),
        ({"device": 1.5}, "device=1.5"),
        ({"device": "cuda"}, "device='cuda': torch sees 0 CUDA devices"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        elastic.join(**arguments)


def test_the_device_is_the_one_that_was_asked_for() -> None:
    with elastic.join(device="meta") as job:
        assert job.device == torch.device("meta")


@pytest.mark.parametrize(
    ("given", "slot", "chosen"),
    [
        ("cuda", "", 0),
        ("cuda", "1", 1),
        ("cuda", "3", 1),
        (None, "3", 1),
        ("cuda:0", "1", 0),
        (torch.device("cuda"), "1", 1),
    ],
)
def test_cuda_without_an_index_is_this_workers_own_device(
    given: Any, slot: str, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with two; the calls are torch's, which a build without CUDA has too."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    if slot:
        monkeypatch.setenv("ELASTIC_SLOT", slot)
    assert process_start.device(given) == torch.device("cuda", chosen)
    assert current == [torch.device("cuda", chosen)]
    with pytest.raises(ConfigError, match="device='cuda:2': torch sees 2 CUDA devices"):
        process_start.device("cuda:2")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The UUIDs of a machine's GPUs, in the order in which torch counts them."""
    gpus = ["GPU-a", "GPU-b"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(process_start, "uuid_of", lambda device: gpus[device.index])
    for variable in ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"):
        monkeypatch.delenv(variable, raising=False)
    return gpus


def test_a_replacement_has_the_gpu_of_its_slot_whatever_has_become_of_the_others(
    two_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_SLOT", "1")
    monkeypatch.setenv("ELASTIC_DEVICE", "GPU-b")
    assert process_start.device(None) == torch.device("cuda", 1)
    del two_gpus[0]
    assert process_start.device(None) == torch.device("cuda", 0), "the GPUs behind a lost one have other numbers"
    two_gpus[:] = ["GPU-a", "GPU-c"]
    with pytest.raises(ConfigError, match=r"GPU-b, on which the workers of slot 1 .* is gone: torch sees GPU-a, GPU-c"):
        process_start.device(None)
    assert process_start.device("cuda:1") == torch.device("cuda", 1), "the script has said which"


def test_of_equal_uuids_as_of_parts_of_a_gpu_that_with_the_number_of_the_slot_is_taken(
    two_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus[:] = ["GPU-a", "GPU-a"]
    monkeypatch.setenv("ELASTIC_SLOT", "1")
    monkeypatch.setenv("ELASTIC_DEVICE", "GPU-a")
    assert process_start.device(None) == torch.device("cuda", 1)


def test_with_nccl_workers_do_not_share_a_gpu_unless_nccl_was_told_so(
    two_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_SLOT", "2")
    assert process_start.device(None) == torch.device("cuda", 0)
    monkeypatch.setenv("ELASTIC_RING", "nccl")
    with pytest.raises(ConfigError, match=r"worker 2 of this node would share a GPU, as torch sees 2.*--ring tcp"):
        process_start.device(None)
    monkeypatch.setenv("NCCL_HOSTID", "another host")
    assert process_start.device(None) == torch.device("cuda", 0)
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    del two_gpus[0]
    assert process_start.device(None) == torch.device("cuda", 0), "a wrapper has given each worker its own"


def test_a_machine_whose_gpus_torch_cannot_use_does_not_train_on_its_cpu_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")

    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(process_start, "GPU_FILES", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"nvidia0\).*built for CUDA 13\.0.*too old \(found version 11040\)\. Mostly"):
        elastic.join()
    assert process_start.device("cpu") == torch.device("cpu"), "on purpose"
    for hides_all in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides_all)
        assert process_start.device(None) == torch.device("cpu"), "a fleet, or Slurm, hides the GPUs of others"
    for hides_some in ("0", "1,2", "GPU-8f2a", "MIG-8f2a"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides_some)
        with pytest.raises(ConfigError, match="cannot use them"):
            process_start.device(None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert process_start.device(None) == torch.device("cpu"), "a torch without CUDA was chosen"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "nvidia0").unlink()
    assert process_start.device(None) == torch.device("cpu")


def test_an_error_in_a_library_is_at_the_line_of_the_script_that_called_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 3)(torch.zeros(1, 5))
    assert "site-packages" in str(caught.traceback[-1].path)
    line = caught.traceback[0].lineno + 1
    assert raised_at(caught.value) == f"{__file__}:{line}"
    assert raised_at(KeyError("no frame")) == "unknown"


def test_an_error_in_a_process_that_fetches_is_at_its_line_there() -> None:
    try:
        raise ValueError("sample 13")
    except ValueError as error:
        sent = pickle.loads(pickle.dumps(_sendable(error)))
        line = error.__traceback__.tb_lineno if error.__traceback__ is not None else 0
    with pytest.raises(ValueError, match="sample 13") as caught:
        raise sent
    assert raised_at(caught.value) == f"{__file__}:{line}"

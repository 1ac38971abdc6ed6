"""elastic.join() in this process: arguments, seeds, hooks into the interpreter."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import elastic
from elastic.errors import ConfigError, NotUnderElastic
from runtime.data.fetch_process import _sendable
from runtime.job import process_start
from runtime.script_end import raised_at
from tests.unit.jobs import one_thread


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No agent and no launcher, and torch's thread count put back."""
    for name in ("ELASTIC_AGENT_SOCKET", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with one_thread():
        yield


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

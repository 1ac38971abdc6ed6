"""Every feature of docs/exactness.md on a GPU: a run with kills and a newcomer, and a resumed run, have the bits of the
quiet run. The workers are threads of one process; only parameters, buffers and batches are on the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import GraphCaptured
from runtime.session import Session
from tests.unit.features import FEATURES, loader, mlp, train
from tests.unit.jobs import Recorded, cross_entropy, dataset, ledger, make_job, one_thread
from tests.unit.worlds import FakeMember, Killed, World

DEVICE = "cuda"

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here: nothing of this was tried"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step"),
]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    with one_thread():
        yield
    torch.use_deterministic_algorithms(False)


def run(name: str, session: Session) -> str:
    """The digest of the feature's script, whose modules go to the GPU when they are registered."""
    job = make_job(session, device=DEVICE)
    register = job.register

    def moved(**objects: object) -> None:
        for module in objects.values():
            if isinstance(module, nn.Module):
                module.to(job.device)
        register(**objects)  # type: ignore[arg-type]

    job.register = moved  # type: ignore[method-assign]
    FEATURES[name](job)
    digest = job.digest()
    job.close()
    return digest


@pytest.mark.parametrize("sums_on", [DEVICE, "cpu"])
@pytest.mark.parametrize("reduction", ["exact", "fixed"])
@pytest.mark.parametrize("name", FEATURES)
def test_a_run_with_kills_and_a_newcomer_has_the_bits_of_the_quiet_run(
    name: str, reduction: str, sums_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeMember, "sums_on", torch.device(sums_on))
    quiet = Recorded(reduction)
    quiet.sums_on = torch.device(DEVICE)
    digest = run(name, quiet)
    world = World(3, kills={"w1": (2, 0), "w0": (5, 0)}, reduction=reduction)
    world.run(lambda session: run(name, session), newcomers=1, asked_at=1, copy_at=1, admit_at=2)
    assert {worker: type(error) for worker, error in world.errors.items()} == {"w0": Killed, "w1": Killed}
    assert world.digests == {"w2": digest, "n0": digest}
    assert ledger(world.sessions["w2"]) == ledger(quiet)
    assert ledger(world.sessions["n0"]) == ledger(quiet)[world.joined_at["n0"] :]


@pytest.mark.parametrize("name", FEATURES)
def test_a_resumed_run_has_the_bits_of_the_quiet_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_up(settings: Settings) -> None:
        for key, value in settings.to_environment().items():
            monkeypatch.setenv(key, value)

    set_up(Settings(root=str(tmp_path), every="4 steps"))
    digest = run(name, Recorded())
    (entry,) = Series(storage_at(str(tmp_path))).names()
    set_up(Settings(root=str(tmp_path), resume=str(entry)))
    assert run(name, Recorded()) == digest


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_model_of_graphed_callables_has_the_bits_of_the_plain_one() -> None:
    def digest(graphed: bool) -> str:
        job = make_job(device=DEVICE)
        model: Any = mlp().to(job.device)
        if graphed:
            model = torch.cuda.make_graphed_callables(model, (torch.zeros(4, 6, device=job.device),))
        train(job, model, data=job.loader(dataset(48), 16, shards=4, shuffle=True))
        return job.digest()

    assert digest(graphed=True) == digest(graphed=False)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_around_a_pass_is_refused_by_name() -> None:
    job = make_job(device=DEVICE)
    model = mlp().to(job.device)
    job.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step = next(iter(job.steps(loader(job), total=1)))
    refused = pytest.raises(GraphCaptured, match=r"torch\.cuda\.make_graphed_callables")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        for x, y in step:
            cross_entropy(model(x), y).backward()

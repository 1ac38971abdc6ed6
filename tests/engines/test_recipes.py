"""The recipes of docs/data.md, as they stand there, trained with a worker that is killed."""

from __future__ import annotations

import io
import os
import re
import signal
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from tests.live.jobs import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text()
ROWS = 400


def recipe(heading: str) -> str:
    """The code below that heading."""
    below = PAGE.partition(f"### {heading}\n")[2]
    found = re.search(r"```python\n(.*?)```", below, re.DOTALL)
    assert found is not None
    return found[1]


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 4, generator=made)
    return x, (x.sum(1) > 0).long()


def saved_dataset(home: Path) -> dict[str, Any]:
    import datasets

    x, y = numbers()
    datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).save_to_disk(str(home / "saved"))
    return {"PATH": str(home / "saved")}


def tar_files(home: Path) -> dict[str, Any]:
    x, y = numbers()
    files = []
    for number in range(8):
        files.append(str(home / f"part-{number}.tar"))
        with tarfile.open(files[-1], "w") as tar:
            for row in range(number, ROWS, 8):
                tensor = io.BytesIO()
                torch.save(x[row], tensor)
                for name, content in (("x.pth", tensor.getvalue()), ("y.cls", str(int(y[row])).encode())):
                    entry = tarfile.TarInfo(f"{row:06}.{name}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return {"FILES": files}


def in_memory(home: Path) -> dict[str, Any]:
    return {"DATASET": torch.utils.data.TensorDataset(*numbers())}


def train(code: str, names: dict[str, Any], dies_in: int) -> str:
    """dies_in: the step in which the worker local.1.0 kills itself, -1: none."""
    job = elastic.join(seed=0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.register(model=model, optimizer=optimizer)
    there: dict[str, Any] = {**names, "job": job}
    exec(code, there)
    for _ in job.epochs(3):
        for step in job.steps(there["train"]):
            for batch in step:
                time.sleep(0.02 if dies_in >= 0 else 0)
                x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else map(torch.as_tensor, batch)
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
                if step.index == dies_in and job.worker_id == "local.1.0":
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
    return job.digest()


@pytest.mark.parametrize(
    ("heading", "made"),
    [
        ("Hugging Face datasets, from disk", saved_dataset),
        ("WebDataset", tar_files),
        ("torchdata's StatefulDataLoader", in_memory),
    ],
)
@pytest.mark.filterwarnings("default")
def test_a_recipe_has_the_bits_of_the_quiet_run(
    heading: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names, code = made(tmp_path), recipe(heading)
    quiet = elastic.launch(train, code, names, -1, workers=1, job_dir=tmp_path / "quiet", quiet=True)
    killed = elastic.launch(train, code, names, 10, workers=2, job_dir=tmp_path / "killed", quiet=True)
    assert killed == quiet
    journal = "".join(path.read_text() for path in (tmp_path / "killed" / "journal").glob("*.jsonl"))
    assert "local.1.1" in journal, "the worker was killed, and another one came"

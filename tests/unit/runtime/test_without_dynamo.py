"""What fork servers import of torch's compiler: nothing, unless a program is going to ask for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.forkserver.without_dynamo import asks_for_dynamo
from tests.unit.sources import ROOT

STEPPED = """
import sys, torch
from runtime.forkserver.without_dynamo import _imports_dynamo, defer_dynamo

def train(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "differentiable": False})
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert torch.is_grad_enabled()
        rates.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()

def trained():
    names = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Rprop")
    return [train(getattr(torch.optim, name)) for name in names]

def importing():
    owners = [one for one in vars(torch.optim).values() if isinstance(one, type)]
    return sum(_imports_dynamo(m) for owner in owners for m in vars(owner).values() if callable(m))

before = importing()
defer_dynamo()
defer_dynamo()
found = trained()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert trained() == found
print(len(set(found)), before >= 12, importing())
"""

COMPILED = """
import sys, torch
from runtime.forkserver.without_dynamo import defer_dynamo

if sys.argv[1] == "deferred":
    defer_dynamo()

def trained(wrap):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    step = wrap(step)
    for _ in range(3):
        step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

print(trained(lambda step: step).tolist(), trained(lambda step: torch.compile(step, backend="eager")).tolist())
"""


def printed(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_optimizers_step_as_torchs_own_without_the_compiler_and_with_it() -> None:
    assert printed(STEPPED) == "7 True 0"


@pytest.mark.long
def test_a_step_may_be_compiled_later() -> None:
    assert printed(COMPILED, "deferred") == printed(COMPILED, "as torch has it")


@pytest.mark.parametrize(
    ("lines", "restarts", "imported"),
    [
        ("import torch\nfrom torch import nn", "", False),
        pytest.param("import torch\nmodel = torch.compile(torch.nn.Linear(1, 1))", "", True, marks=pytest.mark.long),
        pytest.param("import torch", "1", True, marks=pytest.mark.long),
    ],
)
def test_what_a_program_will_need_is_imported_beforehand(
    tmp_path: Path, lines: str, restarts: str, imported: bool
) -> None:
    (tmp_path / "train.py").write_text(lines)
    program = """
import sys
from elastic.agent.worker.import_scan import Program
from runtime.forkserver.server import prepare
prepare(Program(sys.argv[1], False, ()), restarts=bool(sys.argv[2]))
print("torch._dynamo" in sys.modules, "torch.optim" in sys.modules)
"""
    assert printed(program, str(tmp_path / "train.py"), restarts) == f"{imported} True"


def test_a_program_asks_by_a_name_or_by_a_package_that_is_not_known() -> None:
    assert not asks_for_dynamo({"torch", "os", "numpy", "elastic"}, {"fit", "backward"})
    assert asks_for_dynamo({"torch"}, {"fully_shard"}) and asks_for_dynamo({"torch"}, {"compile", "fit"})
    assert asks_for_dynamo({"torch", "transformers"}, set())

"""Copies of the weights that a script has, kept in one process and filled in the next one."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import NotCarried, OtherState
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.restart.kept_averages import KeptAverages

SCRIPT = """
import copy
import torch

class Average:
    def __init__(self, model):
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self, model):
        for shadow, parameter in zip(self.shadow, model.parameters()):
            shadow.data.lerp_(parameter.data, 0.5)

class Trainer:
    best = None

def loop(call, model, steps, remember, averages):
    average, frozen = Average(model) if averages else None, copy.deepcopy(model)
    trainer, found = Trainer(), {}
    alias = found
    mean = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    last = initial = copy.deepcopy(mean)
    call("begin")
    for step in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        if averages:
            average.step(model)
        mean = {name: 0.5 * tensor + 0.5 * model.state_dict()[name] for name, tensor in mean.items()}
        last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if step == 1:
            best = remember(model)
            found["best"] = trainer.best = remember(model)
        call("step")
    trainer.ends = [mean, last, initial]
    return trainer, average and average.shadow, frozen, (locals().get("best"), alias.get("best"), trainer.best)
"""


def nothing(model: nn.Module) -> None:
    return None


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Process:
    """A process of the script."""

    def __init__(self, home: Path, value: float, found: dict[str, Any] | None = None) -> None:
        """value: of the weights. found: what an earlier process had kept behind its last step."""
        self.model = nn.Linear(3, 2)
        for parameter in self.model.parameters():
            nn.init.constant_(parameter, value)
        self.found = found
        self.states: list[dict[str, Any]] = []
        """Behind each step."""
        self.kept: Any = None
        self._frames = ScriptFrames(sys._getframe())
        self._home = home

    def call(self, what: str) -> None:
        if what == "begin":
            self.kept = KeptAverages(self._frames, [self.model], [])
            if self.found is not None:
                self.kept.load_state_dict(self.found)
            return
        if self.found is not None and not self.states:
            self.kept.put_late()
        self.kept.note()
        self.states.append(copy.deepcopy(self.kept.state_dict()))

    def run(
        self, steps: int, remember: Callable[[nn.Module], Any] = nothing, *, averages: bool = True
    ) -> tuple[Any, Any, Any]:
        path = self._home / "script_of_averages.py"
        path.write_text(SCRIPT)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        trainer, *found = module.loop(self.call, self.model, steps, remember, averages)
        self.ends = [float(weights["weight"].mean()) for weights in trainer.ends]
        """Of a mean that is bound anew in each step, of the weights of the last one, and of the initial ones."""
        return found[0], found[1], found[2]


def test_averages_go_on_in_the_next_process_and_what_never_changes_is_not_kept(tmp_path: Path) -> None:
    first = Process(tmp_path, 0.0)
    shadow, _, _ = first.run(2)
    assert first.states[-1]["own"].keys() == {f"1 loop {name}" for name in ("average", "mean", "last")}
    tensors = first.states[-1]["own"]["1 loop average"]
    assert [float(tensor.mean()) for tensor in tensors.values()] == [1.25, 1.25]
    again = Process(tmp_path, 7.0, first.states[-1])
    mine, frozen, _ = again.run(0)
    assert all(map(torch.equal, mine, shadow)) and frozen.weight.detach().mean() == 7
    mine, _, _ = Process(tmp_path, 7.0, first.states[-1]).run(1)
    assert mine[0].mean() == (1.25 + 8) / 2


def test_what_was_filled_is_kept_in_the_next_round_too(tmp_path: Path) -> None:
    first = Process(tmp_path, 0.0)
    first.run(1)
    again = Process(tmp_path, 0.0, first.states[-1])
    again.run(1)
    assert "1 loop average" in again.states[-1]["own"]


def test_names_of_one_value_at_first_are_two_values_again(tmp_path: Path) -> None:
    quiet, first = Process(tmp_path, 0.0), Process(tmp_path, 0.0)
    quiet.run(3)
    first.run(2)
    again = Process(tmp_path, 0.0, first.states[-1])
    nn.init.constant_(again.model.weight, 2.0)  # keep() has filled it
    again.run(1)
    assert again.ends == quiet.ends


def test_best_weights_of_the_loop_are_there_in_the_next_process(tmp_path: Path) -> None:
    first = Process(tmp_path, 0.0)
    _, _, (best, *_) = first.run(3, weights)
    assert [len(state["late"]) for state in first.states] == [1, 3, 3], "the first is `initial`, which was `last`"
    _, _, again = Process(tmp_path, 7.0, first.states[-1]).run(1)
    for found in again:  # a name, an entry of a dict that has two names, an attribute
        assert found.keys() == best.keys() and all(map(torch.equal, found.values(), best.values()))


def test_a_copy_in_an_object_that_was_made_in_the_loop_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotCarried, match="best in loop, a copy of the weights, was made in the training loop"):
        Process(tmp_path, 0.0).run(2, copy.deepcopy)


def test_a_script_without_the_average_that_was_kept_is_named(tmp_path: Path) -> None:
    first = Process(tmp_path, 0.0)
    first.run(1)
    with pytest.raises(OtherState, match=r"1 loop average\.shadow\.0, an average of the weights"):
        Process(tmp_path, 0.0, first.states[-1]).run(1, averages=False)

"""The plain values of a script, read in one process and put back in another one."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.restart import script_values
from runtime.frontends.restart.script_values import Told, changed

SCRIPT = """
import numpy as np
import torch

class Meter:
    def __init__(self):
        self.total = 0

def loop(call, steps):
    meter, losses, best, seen, where, scale = Meter(), [], None, 0, {"at": 0}, np.float64(1.5)
    counted = torch.zeros(2)
    alias = losses
    call()
    for step in range(steps):
        meter.total += step
        losses.append(torch.tensor(step / 2))
        best, seen, scale = step + 0.5, seen + 10, scale + 1
        where["at"] = (step, "x")
        counted += 1
        late = [step]
        loss = torch.ones(1, requires_grad=True) * step
    call()
    return meter.total, losses, best, seen, where, scale, counted, alias is losses, locals().get("late")
"""


def script(tmp_path: Path, call: Callable[[], None], steps: int) -> Any:
    """What the function returns; it stands in a file of a script."""
    path = tmp_path / "script_of_values.py"
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.loop(call, steps)


def test_what_a_process_has_counted_is_there_in_the_next_one(tmp_path: Path) -> None:
    frames = ScriptFrames(sys._getframe())
    read: list[dict[str, Told]] = []
    wanted = script(tmp_path, lambda: read.append(script_values.read(frames)), 3)
    before, after = read
    told = changed(after, before)
    assert not any(text.endswith((" call", " steps", " loss")) for text in told)

    def put() -> None:
        script_values.write(frames, told)

    found = script(tmp_path, put, 0)
    for one, other in zip(found, wanted, strict=True):
        assert repr(one) == repr(other) and type(one) is type(other)


def test_a_name_of_a_module_that_comes_up_in_its_loop_is_there_in_the_next_process(tmp_path: Path) -> None:
    frames = ScriptFrames(sys._getframe())
    path = tmp_path / "script.py"
    code = compile("call()\nfor step in range(steps):\n    late = step\ncall()\n", str(path), "exec")
    path.write_text("")
    read: list[dict[str, Told]] = []
    exec(code, {"call": lambda: read.append(script_values.read(frames)), "steps": 2})
    told = changed(read[1], read[0])
    names: dict[str, Any] = {"call": lambda: script_values.write(frames, told), "steps": 0}
    exec(code, names)
    assert (names["late"], names["step"]) == (1, 1)


def test_what_is_no_plain_value_now_stays(tmp_path: Path) -> None:
    frames = ScriptFrames(sys._getframe())

    def put() -> None:
        (text,) = [text for text in script_values.read(frames) if text.endswith(" meter.total")]
        script_values.write(frames, {text: 7, text.replace("meter.total", "call"): 7})

    total, *_ = script(tmp_path, put, 1)
    assert total == 7


def test_values_that_are_no_numbers_are_compared_as_they_are() -> None:
    before: dict[str, Told] = {"a": 1, "b": ["x"], "c": True, "d": math.inf}
    assert changed({"a": 1, "b": ["y"], "c": 1, "d": math.inf, "e": None}, before) == {"b": ["y"], "c": 1, "e": None}

"""The fake device: torch's CUDA build on a machine without a GPU, steered by a test.

`build` makes the library; fake_device.h says what is real about it. `FakeDevice` is the file that steers it, and runs
functions in processes under the library. The names of settings, counters and notes are those of the header.

A function of a test module runs under the device, and its result comes back:

    def one_exchange() -> int:
        device = FakeDevice.of_this_process()
        ...
        return device.count("sends")

    def test_...(device: FakeDevice) -> None:
        assert device.call(one_exchange) == 4

For a whole job the variables of `FakeDevice.environment` go to the job, and the test steers and counts from outside.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HEADER = HERE / "fake_device.h"
SOURCES = ("control.c", "cuda_runtime.c", "cuda_driver.c", "nccl.c")
LIBRARY = "libcuda.so.1"
"""It stands in for the driver, too, which torch looks for by this name."""

DEADLINE_S = 120.0
"""Of one function: the import of torch, and what takes seconds on a quiet machine."""

_TEXT = HEADER.read_text()
SETTINGS, COUNTERS, NOTES = (
    re.findall(rf"^ +{kind}\((\w+)\)", _TEXT, re.MULTILINE) for kind in ("SETTING", "COUNTER", "NOTE")
)
DEVICES_MAX, MEMBERS_MAX, WORLDS_MAX, NOTES_MAX = (
    int(re.findall(rf"^#define {name} (\d+)", _TEXT, re.MULTILINE)[0])
    for name in ("DEVICES_MAX", "MEMBERS_MAX", "WORLDS_MAX", "NOTES_MAX")
)

# struct control, in its order.
_SETTING, _LONG, _NOTE = struct.Struct("4i"), struct.Struct("q"), struct.Struct("2i3q")
_COUNTERS_AT = _SETTING.size * len(SETTINGS)
_TOUCHED_AT = _COUNTERS_AT + _LONG.size * len(COUNTERS)
_NOTED_AT = _TOUCHED_AT + _LONG.size * DEVICES_MAX
_NOTES_AT = _NOTED_AT + _LONG.size
_SIZE = _NOTES_AT + _NOTE.size * NOTES_MAX + _LONG.size * (1 + WORLDS_MAX * (2 + MEMBERS_MAX))


@dataclass(frozen=True, slots=True)
class Note:
    """What was done, in order; see NOTES in fake_device.h."""

    kind: str
    pid: int
    stream: int
    other: int
    bytes: int


def missing() -> str:
    """Why the fake device cannot be used here; "" if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is no CUDA build: the fake device was not tried (make test-gpu-fake)"
    if shutil.which("gcc") is None:
        return "there is no gcc: the fake device was not built"
    return ""


def _includes() -> list[Path]:
    """Where the headers of the CUDA wheels are. Those of crt/ come with Triton only."""
    found = []
    for package, inside in (
        ("nvidia.cu13", "include"),
        ("nvidia.nccl", "include"),
        ("triton", "backends/nvidia/include"),
    ):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations, f"{package} is not installed beside torch"
        found.append(Path(spec.submodule_search_locations[0]) / inside)
    return found


def build(into: Path) -> Path:
    """Compile the library, against the headers of the CUDA that torch was built for."""
    library = into / LIBRARY
    words = ["gcc", "-O1", "-g", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    words += [word for directory in _includes() for word in ("-isystem", str(directory))]
    words += [f"-Wl,-soname,{LIBRARY}", *(str(HERE / source) for source in SOURCES), "-o", str(library)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return library


class FakeDevice:
    """The file that steers the device, and what was counted there."""

    def __init__(self, file: Path, library: Path | None = None) -> None:
        """library: None where nothing is started."""
        self._file, self._library = file, library
        with open(file, "r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _SIZE)

    @classmethod
    def made_in(cls, directory: Path, library: Path) -> Self:
        """A new one, with every setting 0."""
        file = directory / "fake_device"
        file.write_bytes(bytes(_SIZE))
        return cls(file, library)

    @classmethod
    def of_this_process(cls) -> Self:
        """For what runs under the device itself."""
        return cls(Path(os.environ["FAKE_DEVICE"]))

    # ----------------------------------------------------------------------------------------- steer and count

    def set(self, name: str, value: int = 1, *, pid: int = 0, world: int = 0) -> None:
        """pid, world: for this process alone, for communicators of so many members alone; 0: for all."""
        _SETTING.pack_into(self._memory, _SETTING.size * SETTINGS.index(name), value, pid, world, 0)

    def count(self, name: str) -> int:
        return self._long(_COUNTERS_AT + _LONG.size * COUNTERS.index(name))

    def touched(self, device: int) -> int:
        """How many calls would have made a context on this device."""
        return self._long(_TOUCHED_AT + _LONG.size * device)

    def notes(self, *kinds: str) -> list[Note]:
        """Everything noted so far, of these kinds (none given: of all)."""
        made = self._long(_NOTED_AT)
        assert made <= NOTES_MAX, f"{made} notes were made, and {NOTES_MAX} are kept"
        found = []
        for place in range(made):
            kind, pid, stream, other, size = _NOTE.unpack_from(self._memory, _NOTES_AT + _NOTE.size * place)
            found.append(Note(NOTES[kind], pid, stream, other, size))
        return [each for each in found if not kinds or each.kind in kinds]

    def _long(self, place: int) -> int:
        (value,) = _LONG.unpack_from(self._memory, place)
        return int(value)

    # ------------------------------------------------------------------------------------------------- run

    def environment(self) -> dict[str, str]:
        """The variables of whatever is to run under the device."""
        return {"LD_PRELOAD": str(self._library), "FAKE_DEVICE": str(self._file)}

    def run(
        self,
        function: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        at_once: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a function of a module in a process of its own, with arguments that JSON knows; the last line of stdout
        is its result, as JSON. at_once: the process ends without the end of Python, which threads of torch may hurt."""
        module, name = function.__module__, function.__qualname__
        words = f"import json; from {module} import {name}; print(json.dumps({name}(*{list(arguments)!r})), flush=True)"
        if at_once:
            words += "; import os; os._exit(0)"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self.environment()}
        return subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", words],
            cwd=ROOT,
            env={**variables, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=deadline_s,
        )

    def call(
        self,
        function: Callable[..., Any],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """Like `run`, at once, and return the function's result."""
        done = self.run(function, *arguments, environment=environment, deadline_s=deadline_s, at_once=True)
        assert done.returncode == 0, f"{function.__name__} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

"""Runs of a script for `elastic doctor`: each a process that notes what it finds step by step, and ends after some."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic.agent.worker.environment import AGENT_SOCKET
from elastic.agent.worker.examination import MIDDLE, Examination
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError
from elastic.platforms.local.run_differences import EndedRun, Line
from elastic.process import children

OUTPUT_SHOWN_CHARACTERS = 2000
PROGRESS_S = 10.0
"""How often a run that takes long says how far it is."""


def failure(ended: EndedRun, how: str = "") -> ConfigError:
    """The error for a script that has failed; the end of its output is shown. how: a clause that says in which run."""
    sys.stderr.write(ended.errors[-OUTPUT_SHOWN_CHARACTERS:])
    return ConfigError(f"the script failed with exit code {ended.exit_code}{how}; the end of its output is above")


@dataclass(frozen=True)
class ScriptRuns:
    """All runs of one examination. command: that of a worker. steps: after how many a run ends. directory: for what
    the runs leave to each other. environment: of all runs."""

    command: tuple[str, ...]
    steps: int
    directory: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def at(self) -> int:
        """The step before which others enter; 0: there are too few for that."""
        return min(MIDDLE, self.steps - 1)

    def examination(self, name: str, **more: Any) -> Examination:
        """The examination of the run with this name: `once` leaves what `resumed` and `joins` begin with."""
        recording = str(self.directory / "recording")
        made = Examination(path=str(self.directory / f"{name}.jsonl"), steps=self.steps, **more)
        if name == "once" and self.at:
            return replace(made, at=self.at, recording=recording)
        return replace(made, joins=True, recording=recording) if name == "joins" else made

    def run(self, name: str, examination: Examination, title: str = "") -> EndedRun:
        """Run the script. title: what to call the run while it lasts; "": nothing is said. Nothing that the process has
        started is left when this returns or is interrupted."""
        path = Path(examination.path)
        path.unlink(missing_ok=True)
        if os.path.exists(self._checkpoints(name)):  # of an earlier run with this name
            shutil.rmtree(self._checkpoints(name))
        settings = Settings(root=self._checkpoints(name))
        if name == "resumed":
            settings = Settings(root=self._checkpoints("once"), resume=self._entry())
        variables = {**self.environment, **examination.to_environment(), **settings.to_environment()}
        variables.pop(AGENT_SOCKET, None)
        began_s = time.monotonic()
        with open(self.directory / f"{name}.err", "w+", errors="replace") as errors:
            own: dict[str, Any] = {"env": variables, "stdout": subprocess.DEVNULL, "stderr": errors}
            own |= {"process_group": None, "start_new_session": True}
            process = children.start(children.dying_with_this(*self.command), obeys=False, **own)
            try:
                while not _ended(process):
                    _say(title, path, self.steps, began_s)
            finally:
                with suppress(ProcessLookupError):  # what the script has left running, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            text = errors.read()
        _say(title, path, self.steps, began_s)
        lines = _lines(path)
        raised = lines.pop() if lines and "raised" in lines[-1] else None
        return EndedRun(process.returncode, lines, raised, text)

    def _checkpoints(self, name: str) -> str:
        return str(self.directory / f"{name}-checkpoints")

    def _entry(self) -> str:
        """The name of the checkpoint that the run `once` has written. Raises ConfigError if there is none."""
        names = Series(storage_at(self._checkpoints("once"))).names()
        if not names:
            raise ConfigError(
                f"no checkpoint of the script could be written to {self.directory}; is there room? TMPDIR=DIRECTORY "
                "takes another place"
            )
        return str(names[0])


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(PROGRESS_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _say(title: str, path: Path, steps: int, began_s: float) -> None:
    if title:
        reached = max((line["step"] for line in _lines(path) if "step" in line), default=0)
        seconds = time.monotonic() - began_s
        print(f"elastic: {title}: step {reached} of {steps} after {seconds:.0f} s", file=sys.stderr, flush=True)


def _lines(path: Path) -> list[Line]:
    """Whole lines only: the process may be in the middle of another."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

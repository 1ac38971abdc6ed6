"""A job on this machine, as the harness sees it: start it, follow it, end it.

As a program it runs the job of a specification, as `elastic run` does the job of a script:

python -m chaos_tests.cluster.local_job SPECIFICATION.json JOB_DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos_tests.cluster.job_handle import Followed
from chaos_tests.support.json_lines import Tail
from chaos_tests.support.processes import Command
from elastic.platforms.local import reruns
from elastic.records import host_memory, job_directory
from elastic.wire import codec


def elastic_run(job_dir: Path, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """The command line of a script's job."""
    run = [sys.executable, "-m", "elastic.cli", "run", "--quiet"]
    return [*run, "--job-dir", str(job_dir), *options, *command]


class LocalJob(Followed):
    """A job's command as a child, its output in ``<job_dir>.out``.

    program: the command line, such as `elastic_run` makes it. cwd: where it runs; None: here.
    """

    def __init__(
        self,
        job_dir: Path,
        program: Sequence[str],
        on_poll: Callable[[Followed], None],
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        super().__init__(on_poll, lambda: (job_dir / "journal").glob("*.jsonl"))
        self.dir = job_dir
        self._ledger = Tail(job_dir / "steps.jsonl", json.loads)  # its writer repairs a torn line
        self._steps: list[dict[str, Any]] = []
        output = job_dir.with_name(f"{job_dir.name}.out")
        self._command = Command(program, output, environment=environment, cwd=cwd)

    def stop(self) -> None:
        self._command.stop()

    def exit_code(self) -> int | None:
        return self._command.process.poll()

    @property
    def mark(self) -> str:
        return self._command.mark

    # Following

    def output(self) -> str:
        """What the script's leader and the command itself have said."""
        return self._command.output

    def steps(self) -> list[dict[str, Any]]:
        """The ledger so far."""
        self._steps += self._ledger.lines()
        return self._steps


def main(specification: Path, job_dir: Path) -> int:
    """Returns the exit code of the job."""
    spec = codec.job_from_json(specification.read_bytes(), str(specification))
    claim = job_directory.claim(spec, job_dir, fresh=False)
    with job_directory.running(claim.path), host_memory.directory(wanted=spec.snapshot_every != "off") as memory:
        return reruns.to_the_end(
            spec, claim.path, again=claim.again, memory=memory, notices="none", grace_s=None, quiet=True, as_json=False
        )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

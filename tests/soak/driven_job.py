"""A job on this machine, of which a test or the demo kills members as it likes."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from chaos_tests.cluster.job_handle import JobFailed
from chaos_tests.cluster.local_job import LocalJob
from elastic.errors import ElasticError
from elastic.records.journal import Journal, journal_path
from elastic.rendezvous.job_status import job_status


class DrivenJob(LocalJob):
    """A context manager, as LocalJob."""

    def members(self) -> list[dict[str, Any]]:
        """As `elastic status --json` shows them, in rank order; empty while nobody leads."""
        try:
            return list(job_status(self.dir, wait_s=1.0)["members"])
        except ElasticError:
            return []

    def wait(self, deadline_s: float) -> dict[str, Any]:
        """The job's result.json. Raises JobFailed unless it ended with exit code 0."""
        status = self.ended(deadline_s)
        if status is None:
            raise JobFailed(f"the job did not end within {deadline_s:.0f} s\n{self.last_words()}")
        if status:
            raise JobFailed(f"the job ended with {status}\n{self.last_words()}")
        result: dict[str, Any] = json.loads((self.dir / "result.json").read_bytes())
        return result

    def inject(self, member: dict[str, Any], number: signal.Signals) -> None:
        """Send a signal to a member's process, and write so into the harness's journal first."""
        name = json.loads((self.dir / "job.json").read_bytes())["name"]
        with Journal(journal_path(self.dir, "harness"), name, "harness", member["node"]) as journal:
            journal.write("fault_injected", worker_id=member["worker_id"], pid=member["pid"], fault=number.name)
        os.kill(member["pid"], number)

"""Runs the job of a specification on this machine, as `elastic run` does the job of a script:

python -m chaos_tests.harness.starter SPECIFICATION.json JOB_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic import codec, hostmemory, jobdir, runs


def main(specification: Path, job_dir: Path) -> int:
    """Returns the exit code of the job."""
    spec = codec.job_from_json(specification.read_bytes(), str(specification))
    claim = jobdir.claim(spec, job_dir, fresh=False)
    with jobdir.running(claim.path), hostmemory.directory(wanted=spec.snapshot_every != "off") as memory:
        return runs.to_the_end(
            spec,
            claim.path,
            again=claim.again,
            memory=memory,
            notices="none",
            grace_s=None,
            quiet=True,
            as_json=False,
        )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

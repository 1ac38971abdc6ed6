"""From the files of a job to its history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos_tests.checkers import Truth, judge
from chaos_tests.run.read_history import read_history
from elastic.config.job_spec import JobSpec
from elastic.wire import codec
from tests.unit.histories import good


@pytest.mark.parametrize(("restart", "world"), [(False, 3), (True, 4)])
def test_the_world_of_a_step_is_its_members_or_the_ranks_of_a_script_in_rounds(
    restart: bool, world: int, tmp_path: Path
) -> None:
    """With `--ranks` in place the ledger has the workers, with `--restart` the processes that torchrun would have."""
    spec = JobSpec(name="job", command=("train.py",), workers=3, ranks=4, restart=restart)
    (tmp_path / "job.json").write_bytes(codec.to_json(spec))
    (tmp_path / "journal").mkdir()
    every = {"t_wall": 0.0, "job": "job", "node": "n"}
    lines = [
        json.dumps({**every, **one.line}) for one in good().faulty.events if one.generation <= 1 and one.t_ns < 1.6e9
    ]
    (tmp_path / "journal" / "all.jsonl").write_text("\n".join(lines) + "\n")
    step = {**good().faulty.steps[0].line, "generation": 1}
    for said, answer in ((world, Truth.TRUE), (7 - world, Truth.FALSE)):
        (tmp_path / "steps.jsonl").write_text(json.dumps({**step, "world_size": said}) + "\n")
        found = {one.invariant.number: one.verdict for one in judge(read_history(tmp_path, tmp_path))}
        assert found["I4"].answer is answer, found["I4"]

"""How many steps a ledger has, told by its end; a checkpoint waits until they are its own."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from elastic.errors import CheckpointError
from runtime.recovery.checkpoint.ledger_barrier import _TAIL_BYTES, await_step, steps_on


def line(step: int, size: int = 0) -> bytes:
    return json.dumps({"step": step, "samples": "x" * size}).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        (b"", 0),
        (line(0)[:-1], 0),
        (line(0), 1),
        (line(0) + line(1) + line(2)[:-1], 2),
        (b"".join(line(step) for step in range(5000)), 5000),
        (line(0) + line(1, 3 * _TAIL_BYTES), 2),
        (line(0, 3 * _TAIL_BYTES), 1),
        (line(0) + line(1) + line(2, 3 * _TAIL_BYTES)[:-1], 2),
        *((line(0) + line(1, _TAIL_BYTES - cut), 2) for cut in range(20, 40)),
    ],
)
def test_the_last_whole_line_tells(content: bytes, steps: int, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    with path.open("rb", buffering=0) as file:
        assert steps_on(file) == steps


def test_a_checkpoint_waits_for_its_steps(tmp_path: Path) -> None:
    path, done = tmp_path / "steps.jsonl", threading.Event()
    path.write_bytes(line(0))

    def wait() -> None:
        await_step(path, 2, 30.0, durable=True)
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    with path.open("ab") as file:
        assert not done.is_set()
        file.write(line(1))
    waiting.join(30)
    assert done.is_set()


def test_a_ledger_that_stays_behind_or_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with pytest.raises(CheckpointError, match="is not there"):
        await_step(path, 1, 0.0, durable=False)
    path.write_bytes(line(0))
    with pytest.raises(CheckpointError, match="has 1 steps and not 2 within 0 s"):
        await_step(path, 2, 0.0, durable=False)
    path.write_bytes(b"something else\n")
    with pytest.raises(CheckpointError, match="is no step"):
        await_step(path, 2, 0.0, durable=False)

"""What Trainer cannot do in place is refused with a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.jobs import Job

pytest.importorskip("transformers", reason="frameworks are installed by `make test-frameworks`")

SCRIPT = Path(__file__).parent / "scripts" / "hf_refused.py"


def said(tmp_path: Path, *arguments: str) -> str:
    words = ("--workers", "1", "--ranks", "4", str(SCRIPT), str(tmp_path / "output"), *arguments)
    with Job(tmp_path, *words, environment={"HF_HUB_OFFLINE": "1"}) as job:
        job.wait()
        return "".join(log.read_text() for log in (job.dir / "logs").glob("local.*.log"))


def test_each_refusal_names_the_cause_and_what_to_do(tmp_path: Path) -> None:
    text = said(tmp_path)
    for kind, error, words in (
        ("stream", "ConfigError", "Stream has no random access"),
        ("own loader", "ConfigError", "accelerator.prepare()"),
        ("batch size", "ConfigError", "auto_find_batch_size cannot train in place; start the script with --restart"),
    ):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{kind}: "))
        assert line.startswith(f"{kind}: {error}: ") and words in line
    assert "first: trained" in text and "second: trained" in text


def test_a_collective_in_compute_loss_is_refused(tmp_path: Path) -> None:
    text = said(tmp_path, "collective")
    line = next(line for line in text.splitlines() if line.startswith("first: "))
    assert "dist.all_reduce" in line and "MidShardCollective" in line

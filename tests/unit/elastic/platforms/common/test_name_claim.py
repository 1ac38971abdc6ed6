"""Of two calls at once with one name, one trains; a call that was killed stands in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.errors import ConfigError, NameInUse
from elastic.platforms.common.name_claim import FILE, NameClaim

BEAT_S = 0.02
LONG_S = 60.0
"""Of silence, where no call was killed."""

HOLDER = """
import sys, time
from elastic.platforms.common.name_claim import NameClaim
claim = NameClaim("long", sys.argv[1], beat_s=0.02)
print("has it", flush=True)
while True:
    claim.check()
    time.sleep(0.01)
"""


@contextmanager
def holder(url: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the name."""
    command = [sys.executable, "-c", HOLDER, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_call_is_refused_while_the_first_one_lives_and_has_the_name_after_it(tmp_path: Path) -> None:
    url = str(tmp_path / "long-1")
    with NameClaim("long", url, beat_s=BEAT_S) as first:
        with pytest.raises(NameInUse, match=rf"job long now, process {os.getpid()} on .*wait until .* another name"):
            NameClaim("long", url, beat_s=BEAT_S, silence_s=LONG_S)
        NameClaim("other", str(tmp_path / "other-1"), beat_s=BEAT_S).close()
        first.check()
    assert list(tmp_path.iterdir()) == [], "nothing was saved there"
    with NameClaim("long", url, beat_s=BEAT_S, silence_s=LONG_S):
        (tmp_path / "long-1" / "owner.json").touch()
    assert list(tmp_path.rglob("*")) == [tmp_path / "long-1", tmp_path / "long-1" / "owner.json"]


def test_the_claim_of_a_call_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    with holder(str(tmp_path)) as process:
        process.kill()
        process.wait()
        assert (tmp_path / FILE).exists()
        NameClaim("long", str(tmp_path), beat_s=BEAT_S, silence_s=0.3).close()
    assert not (tmp_path / FILE).exists()


def test_a_frozen_call_that_continues_gives_up_what_another_one_has_taken_over(tmp_path: Path) -> None:
    with holder(str(tmp_path)) as process:
        process.send_signal(signal.SIGSTOP)
        with NameClaim("long", str(tmp_path), beat_s=BEAT_S, silence_s=0.3) as second:
            process.send_signal(signal.SIGCONT)
            assert process.stderr is not None
            assert f"NameInUse: another call trains job long now, process {os.getpid()} on" in process.stderr.read()
            assert process.wait(LONG_S) == 1
            second.check()
        assert not (tmp_path / FILE).exists()


def test_of_calls_at_the_same_moment_one_has_the_name(tmp_path: Path) -> None:
    together = threading.Barrier(4)
    claims: list[NameClaim] = []
    refused: list[NameInUse] = []

    def call() -> None:
        together.wait()
        try:
            claims.append(NameClaim("long", str(tmp_path), beat_s=BEAT_S, silence_s=LONG_S))
        except NameInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline_s = time.monotonic() + LONG_S
    while len(having := [claim for claim in claims if has(claim)]) > 1:
        assert time.monotonic() < deadline_s
        time.sleep(BEAT_S)
    assert len(having) == 1 and len(claims) + len(refused) == 4
    for claim in claims:
        claim.close()
    assert not (tmp_path / FILE).exists()


def has(claim: NameClaim) -> bool:
    try:
        claim.check()
    except NameInUse:
        return False
    return True


def test_what_is_no_claim_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"[half a")
    NameClaim("long", str(tmp_path), beat_s=BEAT_S, silence_s=0.1).close()


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be used from here: Not a directory; .* another checkpoint_dir"):
        NameClaim("long", str(tmp_path / "file" / "long-1"))

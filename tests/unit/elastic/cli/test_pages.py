"""That a page's commands are those of the program, and what counts as the output that it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from elastic.cli import parser
from tests.live import pages
from tests.live.jobs import ROOT
from tests.live.pages import Block, alike

GUIDE = pages.section(ROOT / "docs" / "fleet.md", "From nothing to three nodes")


def commands(block: Block) -> Iterator[list[str]]:
    """Words of each `elastic ...` of a block, as a shell would make them."""
    shown = [command for command, _ in block.commands()]
    for line in shown or block.text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("elastic "):
            yield shlex.split(line)[1:]


def test_every_command_of_the_guide_is_one_that_the_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/live/test_pages.py gives them; this says in a moment that none has lost an option."""
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", "10.0.0.11:7070")
    found = [words for block in GUIDE if not block.kind for words in commands(block)]
    assert {words[0] for words in found} >= {"certs", "rendezvous", "agent", "jobs", "submit", "status", "doctor"}
    for words in found:
        assert parser().parse_args(words).verb, words


def test_every_block_of_the_guide_says_where_it_belongs() -> None:
    for block in GUIDE:
        services = re.match(r"etcd |elastic (rendezvous|agent) ", block.text)
        assert not services or "on each machine" in block.before, block
        assert block.kind != "toml" or re.search(r"`\w+\.toml`", block.before), block


STATUS = "rank 0  gpu-1.0.0  on gpu-1  pid 31  16 steps  3 shards of 73.1 ms\nbecause 3 of 3 are here\n"


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ("rank 2   gpu-3.0.4  on gpu-3  pid 4711  9 steps\nbecause 1 of 1 are here\n", True),
        ("rank 0  gpu-1.0.0  on gpu-1  pid 31  16 steps  1 shard of 4 ms\nbecause 3 of 3 are here\n", True),
        (STATUS + "one more\n", False),
        (STATUS.replace("here", "here: one of them joins") + "newest checkpoint step-000000000265.0.g2-d128\n", True),
        (STATUS.replace("on gpu-1", "on none"), False),
        (STATUS.splitlines()[0], False),
    ],
)
def test_an_output_is_as_shown_but_for_what_varies(said: str, same: bool) -> None:
    assert alike(STATUS, said) is same

"""Which numbers of shards are said to be bad, and the table of docs/data.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.protocol.shard_advice import UNEVEN, WORTH, Worlds, advice, bytes_factor
from elastic.protocol.shard_assignment import owned, sizes, slack_percent

PAGE = Path(__file__).resolve().parents[4] / "docs" / "data.md"
BEGIN, END = "<!-- shards:begin -->\n", "<!-- shards:end -->"
SHARDS = (8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 256, 512)
WORKERS = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)


def table() -> str:
    """As docs/data.md shows it."""
    lines = [f"| V \\ P | {' | '.join(map(str, WORKERS))} |", "|---" * (len(WORKERS) + 1) + "|"]
    for shards in SHARDS:
        cells = [f"{bytes_factor(shards, workers):.1f}" if workers <= shards else "" for workers in WORKERS]
        lines.append(f"| {shards} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_the_docs_is_what_is_dealt(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if request.config.getoption("--rewrite"):
        PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
    else:
        assert shown == table(), "run this test with --rewrite"


@pytest.mark.parametrize(
    ("shards", "workers", "factor"),
    [(8, 2, 1.0), (8, 3, 1.5), (12, 3, 1.0), (12, 2, 1.5), (64, 5, 2.0), (80, 5, 1.0), (64, 1, 1.0)],
)
def test_a_node_of_one_worker_sends_a_half_more_for_each_subtree(shards: int, workers: int, factor: float) -> None:
    assert bytes_factor(shards, workers) == factor
    hosts = tuple(map(str, range(workers)))
    most = max(map(len, owned(shards, (), hosts, slack_percent(workers))))
    assert factor == ((1 + most) / 2 if workers > 1 else 1.0)


def test_what_the_members_of_a_node_have_is_added_before_it_leaves() -> None:
    assert bytes_factor(16, 16, 8) == 1.0, "eight leaves on each node, which are one half of the tree"
    assert bytes_factor(16, 8, 8) == 1.0, "one node sends nothing"


@pytest.mark.parametrize(
    ("shards", "worlds", "better"),
    [
        (8, Worlds(1, 4, 1), None),
        (64, Worlds(1, 8, 1), None),
        (8, Worlds(3, 3, 1), 6),
        (64, Worlds(5, 5, 1), 80),
        (12, Worlds(2, 2, 1), 16),
        (12, Worlds(1, 2, 2), None),  # all on one node
        (12, Worlds(1, 3, 2), None),  # and a second node that is never full
        (64, Worlds(300, 320, 1), None),  # too many to look at
    ],
)
def test_a_bad_number_is_named_with_a_better_one(shards: int, worlds: Worlds, better: int | None) -> None:
    said = advice(shards, 10**6, worlds)
    assert (f"; shards={better} would be " in said) if better else not said
    assert "on average of the worlds" not in said, "there is one"
    if better:
        (workers,) = {worlds.most}
        assert bytes_factor(shards, workers) >= WORTH * bytes_factor(better, workers)


def test_no_number_is_named_with_which_a_shard_is_empty_or_a_pass_takes_longer() -> None:
    assert "shards=80 " in advice(64, 80, Worlds(5, 5, 1))
    assert "shards=40 " in advice(64, 79, Worlds(5, 5, 1)), "a batch of 79 samples has no 80 shards"
    for shards in range(4, 100):
        for workers in (3, 5, 6, 7):
            said = advice(shards, 10**6, Worlds(workers, workers, 1))
            if said:
                other = int(said.partition("; shards=")[2].partition(" ")[0])
                assert _takes(other, workers) <= _takes(shards, workers) + UNEVEN


def _takes(shards: int, workers: int) -> float:
    hosts = tuple(map(str, range(workers)))
    return max(sizes(owned(shards, (), hosts, slack_percent(workers)))) * workers / shards

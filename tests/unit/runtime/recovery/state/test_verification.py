"""Who computes a shard again, and who is wrong, by what all members say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from elastic.agent.worker.environment import VERIFY
from elastic.errors import ConfigError
from runtime.allreduce.reduction.flat_pool import Flats
from runtime.allreduce.reduction.leaves.unpacked_leaf import Loose
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.recovery.state.verification import VOUCHED, Suspect, Verification, digest_of, suspect, vouched

Headers = dict[str, Mapping[str, Json]]


def headers(votes: Mapping[str, tuple[list[str], str]], fingerprints: Mapping[str, str] | None = None) -> Headers:
    """Worker -> (digests of shard 3, of its state)."""
    said: Headers = {}
    for worker, (digests, state) in votes.items():
        part = (fingerprints or {}).get(worker, "same")
        about = vouched(3 if digests else -1, digests, {"model": state})
        said[worker] = {VOUCHED: about, "fingerprint": {"weights, rates and job.state": part}}
    return said


def test_nothing_is_verified_unless_it_is_asked_for() -> None:
    off = Verification.from_environ({})
    assert off.shard(0, 8) is None and not off.due(0)
    assert Verification.from_environ({VERIFY: "100"}) == Verification(100)
    with pytest.raises(ConfigError, match="ELASTIC_VERIFY='often'"):
        Verification.from_environ({VERIFY: "often"})


def test_every_nth_step_has_a_shard_and_each_shard_has_its_turn() -> None:
    verification = Verification(10)
    assert [step for step in range(30) if verification.due(step)] == [0, 10, 20]
    for units in (1, 2, 7, 8, 16):
        assert {verification.shard(10 * turn, units) for turn in range(units)} == set(range(units)), units
    assert verification.shard(5, 8) is None and verification.shard(0, 0) is None


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_enough_members_compute_it_again(world: int) -> None:
    """Two at least beside the owner, or the only other one twice."""
    verification = Verification(10)
    for step in range(0, 200, 10):
        for owner in range(world):
            again = [verification.again(step, rank, world, own=rank == owner) for rank in range(world)]
            assert again[owner] == 0
            assert sum(again) == 0 if world == 1 else 2 <= sum(again) <= 3
    assert verification.again(0, 3, 3, own=False) == 0, "it is no member"


@pytest.mark.parametrize(
    ("votes", "found"),
    [
        ({"a": (["x"], "s"), "b": (["x"], "s"), "c": (["x"], "s")}, None),
        ({"a": (["x"], "s"), "b": (["y"], "s"), "c": (["x"], "s")}, Suspect("b", "the values of shard 3")),
        ({"a": (["y"], "s"), "b": (["x", "x"], "s")}, Suspect("a", "the values of shard 3")),
        ({"a": (["x"], "s"), "b": (["x", "y"], "s")}, Suspect("b", "the values of shard 3")),
        ({"a": (["x"], "s"), "b": (["y"], "s")}, Suspect("", "the values of shard 3")),
        ({"a": ([], "s"), "b": ([], "t"), "c": ([], "s")}, Suspect("b", "the state of model")),
        ({"a": ([], "s"), "b": ([], "t")}, Suspect("", "the state of model")),
        ({"a": (["x"], "s"), "b": (["y", "y"], "t"), "c": ([], "s")}, Suspect("b", "the state of model")),
    ],
)
def test_the_minority_is_wrong(votes: Mapping[str, tuple[list[str], str]], found: Suspect | None) -> None:
    assert suspect(headers(votes)) == found
    assert suspect(dict(reversed(headers(votes).items()))) == found, "all members find the same"


def test_what_members_compare_anyway_names_one_of_three_and_none_of_two() -> None:
    alike: dict[str, tuple[list[str], str]] = {worker: ([], "s") for worker in "abc"}
    found = suspect(headers(alike, {"c": "other"}))
    assert found is not None and found.worker == "c" and found.what.startswith("a part of its state")
    assert suspect(headers({worker: ([], "s") for worker in "ab"}, {"b": "other"})) is None, "Disagree names both"
    unvouched: Headers = {worker: {"fingerprint": {}} for worker in "abc"}
    assert suspect(unvouched) is None


def test_any_bit_of_a_leaf_counts_and_its_form_does_not() -> None:
    values = torch.randn(6)
    leaf = Partial(0, 1, {"float32": values}, has_grad=1, weight=2.0, scalars={"loss": ("mean", 1.0, 2.0)})
    loose = Partial(3, 4, {}, has_grad=1, weight=2.0, scalars={"loss": ("mean", 1.0, 2.0)})
    loose.loose["float32"] = Loose([values[:4].clone(), values[4:].clone()], Flats(torch.float32, 6))
    digest = digest_of(leaf)
    assert digest_of(loose) == digest
    for bit in range(32):
        flipped = values.clone()
        flipped.view(torch.int32)[bit % 6] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert digest_of(Partial(0, 1, {"float32": flipped}, 1, 2.0, leaf.scalars)) != digest, bit
    assert digest_of(Partial(0, 1, {"float32": values}, 1, 2.5, leaf.scalars)) != digest
    logged = {"seconds": ("mean", 1.5, 2.0)}
    assert digest_of(Partial(0, 1, {"float32": values}, 1, 2.0, logged)) == digest, "workers may log their own time"

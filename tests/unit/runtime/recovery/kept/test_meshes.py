"""elastic.keep of models that are sharded over a mesh of two dimensions: any mesh reads what any other has kept."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unit.runtime.recovery.kept.test_chains import lines


@pytest.mark.long
@pytest.mark.parametrize("meshes", ["tp:2x2 tp:1x2 hsdp:1x3 tp:3x1", "hsdp:2x2 fsdp:3 tp:2x2"])
def test_each_round_begins_with_the_bits_with_which_the_one_before_ended(meshes: str) -> None:
    rounds = lines("meshes", *meshes.split())
    assert [said for said, *_ in rounds] == meshes.split()
    assert [int(first) for _, first, *_ in rounds] == [2 * number for number in range(len(rounds))]
    assert all(later[2] == earlier[3] for earlier, later in pairwise(rounds)), rounds
    assert len({ended for *_, ended in rounds}) == len(rounds), "each round changes them"


@pytest.mark.long
def test_with_tensor_parallelism_of_one_size_exact_sums_have_the_same_bits_in_any_world() -> None:
    found = [lines("meshes", *meshes)[-1] for meshes in (("exact:2x2", "exact:1x2"), ("exact:1x2", "exact:2x2"))]
    assert len({ended for *_, ended in found}) == 1, found


@pytest.mark.long
def test_exact_sums_refuse_tensor_parallelism_of_another_size_by_name() -> None:
    said = "units=3, and was units=3 with tensor parallelism of 2"
    with pytest.raises(AssertionError, match=said):
        lines("meshes", "exact:1x2", "exact:2x1")

"""Gradients that are sent while backward goes on: what was sent is what the shard has, or is found to be another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from threading import Event, get_ident

import pytest
import torch

from elastic.config import Compression, Reduction
from elastic.errors import RingBroken
from runtime.allreduce.fixed_point.exponents import BlockExponents
from runtime.allreduce.reduction import early_sums
from runtime.allreduce.reduction.early_sums import EarlySums, LastShard
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.leaves import early_leaf
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.allreduce.reduction.schedule import DTYPES, Cut
from runtime.session import Op
from tests.unit.features import FEATURES
from tests.unit.jobs import Recorded
from tests.unit.runtime.loop.test_exactness import quiet_run, run
from tests.unit.thoroughness import some

WRONG = {"several_backwards_a_shard", "ragged_batches_with_weigh", "sharpness_aware"}
"""Features whose gradients change after they were sent, in some pass."""
LATE = {"unused_parameters", "unused_in_some_shards", "embedding_sparse", "gan", "ema", "modes_in_the_inner_loop"}
LATE |= {"skipped_shards_and_sums"}
"""Features with gradients that never come, or are not dense: nothing behind them is sent early."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of tiny models; blocks of fixed_leaves.py still decide where they begin."""
    monkeypatch.setattr(early_sums, "PART_ELEMENTS_MIN", 1)


class Early(Recorded):
    """A job of one that sends its last shard early, to itself."""

    def __init__(self, reduction: str, compression: str) -> None:
        super().__init__(reduction, compression)
        self.passes: list[tuple[int, int, bool]] = []
        """(parts that were offered, parts, whether they were right) of each pass."""
        self.sums: EarlySums | None = None
        self.cuts: Sequence[Cut] = ()
        self.groups: dict[str, int] = {}

    def begin(
        self,
        op: Op,
        fingerprint: dict[str, str],
        groups: dict[str, int] | None = None,
        own: Json = None,
        cuts: Sequence[Cut] = (),
    ) -> None:
        super().begin(op, fingerprint, groups, own, cuts)
        self.cuts, self.groups = cuts, groups or {}

    def send_early(self) -> EarlySums | None:  # type: ignore[override]
        assert self._op is not None
        if self._todo or not self.cuts:
            return None
        out, room = (
            {group: torch.zeros(size, dtype=DTYPES[group]) for group, size in self.groups.items()} for _ in "ab"
        )
        held = list(self._held.values())
        for root in held:
            root.settle()
        units = self._op.units
        merged = self.reduction is not Reduction.EXACT
        self.sums = EarlySums(self.cuts, LastShard(units - 1, units, held, merged), out, room, alone, lambda: None)
        return self.sums

    def unit_done(self, leaf: Partial) -> None:
        super().unit_done(leaf)
        sums, self.sums = self.sums, None
        if sums is None:
            return
        (root,) = self._held.values()
        root.settle()
        right = sums.flush([root.flats])
        self.passes.append((sums.offered, len(sums.cuts), right))
        if right:
            for group, flat in root.flats.items():
                assert sums.out[group].view(torch.uint8).equal(flat.view(torch.uint8))


def in_its_shard(model: torch.nn.Module) -> tuple[Harvest, EarlySums]:
    """Of one shard, whose gradients go to sums of a world of one."""
    harvest = Harvest(list(model.named_parameters()))
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    out, room = ({"float32": torch.zeros(harvest.groups()["float32"])} for _ in "ab")
    sums = EarlySums(harvest.early.cuts, LastShard(0, 1, [], False), out, room, alone, lambda: None)
    harvest.early.expect(sums, lambda: 1.0)
    return harvest, sums


def alone(sums: EarlySums) -> None:
    """The sum over a world of one."""
    for number, cut in enumerate(sums.cuts):
        sums.wait_for(number)
        for group, lo, hi in cut:
            sums.out[group][lo:hi].copy_(sums.terms[0][group][lo:hi])


@pytest.mark.parametrize(
    ("fixed", "compression"), [(True, Compression.NONE), *((False, compression) for compression in Compression)]
)
def test_all_gradients_are_on_their_way_when_backward_is_over(fixed: bool, compression: Compression) -> None:
    """With the tops of their integers: what comes behind them would be a round of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 3).double())
    state = BlockExponents(always_wide=False) if fixed else None
    harvest = Harvest(list(model.named_parameters()), fixed=state, compression=compression)
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    groups = harvest.groups()
    out, room = ({group: torch.zeros(size, dtype=DTYPES[group]) for group, size in groups.items()} for _ in "ab")
    sums = EarlySums(harvest.early.cuts, LastShard(0, 1, [], fixed), out, room, alone, lambda: None)
    harvest.early.expect(sums, lambda: 1.0)
    model[1](model[0](torch.randn(5, 40)).double()).sum().backward()
    assert sums.offered == len(sums.cuts) > 3
    leaf = harvest.leaf(0, 1.0, {})
    leaf.settle()
    assert sums.flush([leaf.flats])
    assert out.keys() == leaf.flats.keys() and all(out[group].equal(leaf.flats[group]) for group in out)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(
    ("reduction", "compression"),
    [
        ("exact", "none"),
        pytest.param("fixed", "none", marks=pytest.mark.long),
        pytest.param("exact", "bf16", marks=pytest.mark.long),
        pytest.param("exact", "int8", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", some(list(FEATURES), 30, "sent early"))
def test_what_is_sent_early_is_the_gradient_or_is_found_to_be_another(
    name: str, reduction: str, compression: str
) -> None:
    session = Early(reduction, compression)
    assert run(FEATURES[name], session) == quiet_run(name, reduction, compression)[0]
    assert session.passes
    if name not in WRONG:
        assert all(right for _, _, right in session.passes)
    if name not in WRONG | LATE:
        assert all(offered > 0 for offered, _, _ in session.passes)


def test_a_closed_harvest_leaves_no_hook_on_a_parameter() -> None:
    model = torch.nn.Linear(4, 3)
    harvest, sums = in_its_shard(model)
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    harvest.early.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    sums.discard()


def test_a_shard_that_is_over_sends_nothing() -> None:
    """Its part is worthless, and another operation may have begun to use its memory."""
    model = torch.nn.Linear(4, 3, bias=False)
    harvest, sums = in_its_shard(model)
    leaf = harvest.leaf(0, 1.0, {})
    leaf.settle()
    model(torch.ones(2, 4)).sum().backward()
    assert sums.offered == 0 < len(sums.cuts)
    assert sums.flush([leaf.flats])


def test_roots_that_the_last_shard_does_not_join_are_terms_of_their_own() -> None:
    """Of 8 shards a member has 0, 1 and 6, and computes 7."""
    held = [Partial(first, first + 1, {"float32": torch.full((4,), float(first))}) for first in (1, 6, 0)]
    roots = [held[1], Partial(0, 2, {"float32": torch.full((4,), 1.0)})]
    out, room = ({"float32": torch.zeros(4)} for _ in "ab")
    cuts = ((("float32", 0, 4),),)
    sums = EarlySums(cuts, LastShard(7, 8, roots, False), out, room, alone, lambda: None)
    assert sums.nodes == [(0, 2), (6, 8)] and sums.terms == [roots[1].flats, room]
    sums.discard()
    sums = EarlySums(cuts, LastShard(7, 8, roots, True), out, room, alone, lambda: None)
    assert sums.nodes == [(0, 2), (6, 8)] and sums.terms == [room]
    sums.discard()
    sums = EarlySums(cuts, LastShard(None, 8, [], True), out, room, alone, lambda: None)
    assert (sums.nodes, sums.terms) == ([], [])
    sums.discard()


def test_a_part_is_read_by_a_stream_that_waits_for_the_stream_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events of CUDA replaced by a list of what they would do."""
    noted: list[tuple[int, int]] = []
    waited: list[tuple[int, bool]] = []

    def recorded(device: torch.device) -> early_sums.Wait:
        number = len(noted)
        noted.append((number, get_ident()))
        return lambda: waited.append((number, get_ident() == here))

    monkeypatch.setattr(early_sums, "recorded", recorded)
    here, read = get_ident(), Event()

    def sum_up(sums: EarlySums) -> None:
        sums.wait_for(0)
        assert waited == [(0, False), (1, False)], "for what the worker has held since before, and for the part"
        read.set()
        for number in (1, 2):
            sums.wait_for(number)

    held = [Partial(0, 1, {"float32": torch.ones(6)})]
    out, room = ({"float32": torch.zeros(6)} for _ in "ab")
    cuts = tuple((("float32", lo, lo + 2),) for lo in (4, 2, 0))
    sums = EarlySums(cuts, LastShard(1, 2, held, False), out, room, sum_up, lambda: None)
    sums.offer({"float32": torch.ones(2)})
    assert read.wait(60)
    assert sums.flush([{"float32": torch.full((6,), 2.0)}])
    assert waited[2] == (1, True), "flush() may be called on another stream than offer()"
    assert waited[3:] == [(0, False), (2, False), (0, False), (2, False)], "both other parts are noted at once"
    assert all(thread == here for _, thread in noted)


def test_gradients_of_several_streams_do_not_leave_early(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([1, 1, 2])
    monkeypatch.setattr(early_leaf, "_stream", lambda device: next(streams))
    model = torch.nn.Linear(4, 3)
    harvest, sums = in_its_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert next(streams, None) is None and sums.offered < len(sums.cuts)
    leaf = harvest.leaf(0, 1.0, {})
    leaf.settle()
    assert sums.flush([leaf.flats])


@pytest.mark.parametrize(("error", "raised"), [(RingBroken("aborted"), False), (RuntimeError("the GPU hangs"), True)])
def test_a_gpu_that_hangs_is_told_when_its_sums_are_left(error: Exception, raised: bool) -> None:
    """Its tensors must not be used again; a ring that broke is why they are left."""

    def sum_up(sums: EarlySums) -> None:
        raise error

    out, room = ({"float32": torch.zeros(4)} for _ in "ab")
    sums = EarlySums(((("float32", 0, 4),),), LastShard(0, 1, [], False), out, room, sum_up, lambda: None)
    with pytest.raises(RuntimeError, match="hangs") if raised else nullcontext():
        sums.discard()

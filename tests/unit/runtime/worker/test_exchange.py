"""What becomes of an operation whose exchange is broken off: it goes on where it was, and not for ever."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic.config import Overlap, Reduction
from elastic.errors import LinkSilent, LinkTooSlow, RingBroken
from elastic.protocol.messages import Generation, Kind, Member, Plan, Progress, RingState
from elastic.protocol.worker_state import Phase, WorkerState
from elastic.records.journal import Journal
from runtime.allreduce.reduction.early_sums import EarlySums
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.over_mesh import ReductionRequest, Sums
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.ring.ring import PARTS, Ring
from runtime.allreduce.ring.ring_set import Rings
from runtime.recovery.state.verification import Verification
from runtime.session import Op, OpKind
from runtime.worker.exchange import SILENCES_MAX, OperationSpec, RingExchange, Verifying
from runtime.worker.overlap import BackwardOverlap
from runtime.worker.progress_report import ProgressReporter
from runtime.worker.state_owner import SharedWorkerState

GROUPS = {"float32": 4}
TASK = OperationSpec(Op(OpKind.PASS, 2), {"w": "1"}, GROUPS, None)
MEMBERS = ("a.0.0", "b.0.0")


UNVERIFIED = Verifying(Verification(), dict, lambda found: None)


class Buffers:
    """Of a SharedWorkerState, its result buffers only."""

    sums_on = CPU

    def __init__(self) -> None:
        self.given_back: list[dict[str, torch.Tensor]] = []

    def result_buffer(self, groups: dict[str, int]) -> dict[str, torch.Tensor]:
        return {group: torch.empty(size) for group, size in groups.items()}

    def give_back(self, flats: dict[str, torch.Tensor]) -> None:
        self.given_back.append(flats)


@pytest.fixture
def buffers() -> Buffers:
    return Buffers()


@pytest.fixture
def turn(buffers: Buffers) -> RingExchange:
    shared, rings, reporter = cast(SharedWorkerState, buffers), cast(Rings, None), cast(ProgressReporter, None)
    return RingExchange(shared, rings, reporter, cast(Journal, None), Reduction.EXACT, Overlap.OFF, UNVERIFIED)


def test_the_same_members_go_on_with_the_sums_of_the_same_operation(turn: RingExchange, buffers: Buffers) -> None:
    begun = turn._begin(TASK, 7, MEMBERS)
    begun.sums.held[0] = 3
    turn._attempts = begun
    assert turn._begin(replace(TASK), 7, MEMBERS) is begun
    assert not buffers.given_back


@pytest.mark.parametrize(
    "other",
    [
        {"number": 8},
        {"members": MEMBERS[:1]},
        {"members": MEMBERS[::-1]},
        {"task": replace(TASK, fingerprint={"w": "2"})},
        {"task": replace(TASK, op=Op(OpKind.PASS, 2, step=1))},
    ],
)
def test_others_and_another_operation_begin_anew_and_the_memory_is_used_again(
    other: dict[str, Any], turn: RingExchange, buffers: Buffers
) -> None:
    begun = turn._attempts = turn._begin(TASK, 7, MEMBERS)
    begun.sums.held[0] = 3
    anew = turn._begin(**{"task": TASK, "number": 7, "members": MEMBERS, **other})
    assert anew.sums.held == {} and anew.silences == 0
    assert buffers.given_back == [begun.sums.out]


def test_a_link_that_falls_silent_again_and_again_in_one_operation_ends_the_job_by_name(turn: RingExchange) -> None:
    attempts = turn._begin(TASK, 7, MEMBERS)
    silent = LinkSilent("generation 3: b.0.0 cannot be reached any more: 10.0.0.2 has ... 0.01 Mbit/s", peer="b.0.0")
    for _ in range(SILENCES_MAX - 1):
        attempts.broken(silent)
        attempts.broken(RingBroken("the ring was aborted"))
    with pytest.raises(LinkTooSlow, match=r"operation 7 was begun 5 times in vain .* b.0.0 .* 0.01 Mbit/s"):
        attempts.broken(silent)


def test_a_link_over_which_another_piece_came_each_time_goes_on(turn: RingExchange) -> None:
    attempts = turn._begin(TASK, 7, MEMBERS)
    for number in range(4 * SILENCES_MAX):
        attempts.sums.held[1] = 1 + number // (SILENCES_MAX - 1)
        attempts.broken(LinkSilent("silent"))
    assert attempts.silences == SILENCES_MAX - 1


@pytest.mark.parametrize(
    ("overlap", "reduction", "hosts", "device", "again", "wanted"),
    [
        (Overlap.AUTO, Reduction.EXACT, ("a", "b"), "cpu", False, True),
        (Overlap.AUTO, Reduction.FIXED, ("a", "b"), "cpu", False, True),
        (Overlap.AUTO, Reduction.EXACT, ("a", "a"), "cpu", False, False),
        (Overlap.ON, Reduction.EXACT, ("a", "a"), "cpu", False, True),
        (Overlap.OFF, Reduction.EXACT, ("a", "b"), "cpu", False, False),
        (Overlap.ON, Reduction.EXACT, ("a",), "cpu", False, False),
        (Overlap.ON, Reduction.ALLREDUCE, ("a", "b"), "cpu", False, False),
        (Overlap.ON, Reduction.EXACT, ("a", "b"), "cpu", True, False),
        (Overlap.ON, Reduction.EXACT, ("a", "b"), "cuda", False, True),
        (Overlap.AUTO, Reduction.EXACT, ("a", "b"), "cuda", False, False),
    ],
)
def test_where_gradients_leave_early(
    overlap: Overlap, reduction: Reduction, hosts: tuple[str, ...], device: str, again: bool, wanted: bool
) -> None:
    """Not in the operation that a loss has interrupted, and on a GPU only if it was asked for."""
    early = BackwardOverlap(torch.device(device), cast(Journal, None), reduction, overlap)
    ring = cast(Ring, SimpleNamespace(hosts=hosts, world_size=len(hosts), generation=1))
    assert early.applies(ring, ((("float32", 0, 4),),), again) is wanted


def two_steps(overlap: Overlap, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Partial], Progress]:
    """The results of two operations of a member that sends nothing early, and what its beats say then. All members are
    there at once, and the tensors of each operation take a minute."""
    now_s = [100.0]
    monkeypatch.setattr("runtime.worker.progress_report.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def exchange(ring: Ring, request: ReductionRequest, *, sums: Sums | None = None, **_: Any) -> tuple[Any, Partial]:
        headers = {MEMBERS[0]: {**request.header, **request.agreed}}
        request.check(headers)
        now_s[0] += 60.0 if request.groups else 0.001
        return headers, Partial(0, 2, {} if sums is None else sums.out)

    monkeypatch.setattr("runtime.worker.exchange.exchange", exchange)
    monkeypatch.setattr("runtime.worker.overlap.exchange", exchange)
    ring = SimpleNamespace(
        hosts=("a", "b"), world_size=2, generation=1, members=MEMBERS, transport=None, wake=lambda: None
    )
    rings = cast(Rings, SimpleNamespace(get=lambda generation: ring, close_retired=lambda op: None))
    members = tuple(Member(name, name[0], name[0], 1, rank) for rank, name in enumerate(MEMBERS))
    shared = SharedWorkerState(MEMBERS[0], rings, lambda word: None, cast(Journal, None))
    root = Partial(0, 2, {"float32": torch.ones(4)})
    reporter = ProgressReporter(on_host=True, note=lambda event, text="", unit=-1: None)
    turn = RingExchange(shared, rings, reporter, cast(Journal, None), Reduction.EXACT, overlap, UNVERIFIED)
    results = []
    for step in range(2):
        task = replace(TASK, op=Op(OpKind.PASS, 2, step=step), cuts=((("float32", 0, 4),),))
        reporter.begin(task.op)
        shared._held = {root.node: root}
        shared.position = WorkerState(
            MEMBERS[0],
            phase=Phase.COLLECTING,
            reduced=step,
            units=2,
            roots=(root.node,),
            record=Generation(1, Kind.FORM, 1, members, Plan(), "all are here", token="t"),
            entered=1,
            ring=RingState.LIVE,
        )
        result = turn.exchange(task, 1, lambda event, result: True)
        assert result is not None
        results.append(result)
    return results, reporter.progress(shared.position, 0, "", ("", ""))


@pytest.mark.parametrize("overlap", [Overlap.ON, Overlap.OFF])
def test_what_is_still_to_be_sent_when_all_are_done_counts_as_the_exchange(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader takes that for a part of a pass: it decides how long a ring may stand still, and when the last call
    of a job comes."""
    _, told = two_steps(overlap, monkeypatch)
    assert told.exchange_us == pytest.approx(60_000_000, rel=0.01)


@pytest.mark.parametrize("overlap", [Overlap.ON, Overlap.OFF])
def test_the_memory_of_a_result_is_not_used_for_the_next_one_while_it_is_kept(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers and members that lack it copy it from there."""
    (first, second), _ = two_steps(overlap, monkeypatch)
    assert first.flats["float32"].data_ptr() != second.flats["float32"].data_ptr()


@pytest.mark.parametrize(("nonfinite", "given_up"), [(0, True), (1, False)])
def test_a_gradient_that_is_not_finite_does_not_end_the_overlap(
    nonfinite: int, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers have zeros in its place, so what was sent early is wrong: once, as a GradScaler's first steps are."""

    def exchange(ring: Ring, request: ReductionRequest) -> tuple[Any, Partial]:
        return {MEMBERS[0]: request.header, MEMBERS[1]: {**request.header, "early": True}}, Partial(0, 2)

    monkeypatch.setattr("runtime.worker.overlap.exchange", exchange)
    journal = cast(Journal, SimpleNamespace(write=lambda event, **fields: None))
    overlap = BackwardOverlap(CPU, journal, Reduction.FIXED, Overlap.ON)
    overlap._early = cast(EarlySums, SimpleNamespace(flush=lambda terms: False))
    ring = cast(Ring, SimpleNamespace(generation=1, members=MEMBERS))
    root = Partial(0, 2, {"float32": torch.ones(4)}, nonfinite=nonfinite)
    request = ReductionRequest(op=PARTS * 7 + PARTS - 1, units=2, groups=GROUPS, roots=[root])
    found = overlap.finish(ring, request, ((("float32", 0, 4),),), {"float32": torch.empty(4)})
    assert found is None, "all tensors are sent again"
    assert (overlap._wrong_in == 1) is given_up

"""The members of an elastic job: `elastic run --workers N` with hvd.elastic.run, where size() is the number of workers.

The job is one of job.steps(), whose step is what lies between two commits. Its first pass has no gradients: it is where
newcomers copy the state, and where workers leave as planned. All collectives of the script are operations of the job
behind that pass, so one that a loss interrupts is repeated among the survivors, and what it has given is kept for those
who were late. Each worker brings its own value to an operation, once: what was to come from a lost worker is missing.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from elastic.errors import ConfigError, Disagree, LeaderOnly, LeftAlone
from elastic.protocol.worker_id import node_of
from runtime.data.random_state import randomness_kept
from runtime.frontends.horovod.arithmetic import ReduceOp, mean_of, reduce_rows
from runtime.frontends.horovod.interrupts import CallsDiffer
from runtime.frontends.horovod.trained_modules import modules_of, of_none
from runtime.frontends.horovod.world import Call, RankStanding, World
from runtime.guards.checks import OPTIONAL, places
from runtime.loop.job import Job, begin
from runtime.loop.loops import Extent, Steps, pass_without_gradients
from runtime.loop.passes import PassWork
from runtime.loop.training import empty_leaf
from runtime.loop.training.gathering import content_of, from_bytes, to_bytes, vector_of
from runtime.loop.training.vector_sums import VectorSums
from runtime.session import OpKind

R = TypeVar("R")

SMALL_MAX = 4096
"""Bytes that travel with what the workers tell each other about a gather; more need an operation of their own."""


@contextmanager
def calls_named() -> Iterator[None]:
    """Workers that do different things are told so in the words of Horovod. Raises CallsDiffer."""
    try:
        yield
    except (Disagree, LeaderOnly, LeftAlone) as why:
        if not why.operations:
            raise
        raise CallsDiffer(
            f"the workers are at different places of the script ({places(why.operations, 'hvd')}). All make the "
            "same calls in one order, and commit at the same places: not under `if hvd.rank() == 0`, and with equally "
            "many batches. A DistributedSampler keeps the number of workers of its begin; ElasticSampler does not"
        ) from None


class BeginFound(NamedTuple):
    """What the beginning of the loop has found. changed: as next_step() returns it. resets: that, or this worker has
    the state of others, or of an earlier run, or the workers are other ones than when the script began."""

    changed: bool
    resets: bool


class WorkerBytes(NamedTuple):
    """What a worker brings. rank: as its script knows it."""

    worker: str
    rank: int
    content: bytes


class MemberWorld(World):
    """Used by the thread of the script only."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._training = job._training
        self._roster = self._members()
        self._together: list[str] | None = None
        """The workers that have taken part in the last commit, by rank; None before the first one."""
        self._vectors = VectorSums(self._training.calls, self._training.session.sums_on)
        self._steps: Steps | None = None
        self._modules: list[nn.Module] = []
        """Those that broadcast_parameters() has named before the loop."""
        self._calls = 0
        """Collectives before the loop."""

    @classmethod
    def of_this_process(cls) -> MemberWorld:
        """Join the job of this process, which ends with the script."""
        held: list[MemberWorld] = []
        job = begin(close=lambda: held[0].close())
        held.append(cls(job))
        return held[0]

    def _members(self) -> list[str]:
        """Worker ids by rank. A newcomer counts itself: it will be one of them."""
        place = self._training.session.place()
        own = self._training.session.worker_id
        return [*place.members, *([] if own in place.members else [own])]

    @property
    def standing(self) -> RankStanding:
        roster, own = self._roster, self._training.session.worker_id
        if own not in roster:  # a newcomer that is late goes with the others' results, whatever it computes
            own = roster[-1]
        nodes = list(dict.fromkeys(map(node_of, roster)))
        there = [worker for worker in roster if node_of(worker) == node_of(own)]
        return RankStanding(
            roster.index(own),
            len(roster),
            self._training.session.local_rank,  # its slot, and its CUDA device, for its whole life
            len(there),
            nodes.index(node_of(own)),
            len(nodes),
        )

    # Steps

    @property
    def running(self) -> bool:
        """Whether hvd.elastic.run has begun."""
        return self._steps is not None

    def check_first(self) -> None:
        """Raises ConfigError if a function with @hvd.elastic.run was called before: a newcomer begins the script at its
        top, in the first one, while the others are in the second, whose models it would not copy."""
        if self._steps is not None:
            raise ConfigError(
                "a function with @hvd.elastic.run was called a second time in an elastic job. Workers that come later "
                "begin with the first call, and could not follow: put both parts into one function, and into its state "
                "which part it is in"
            )

    def start(self, named: Mapping[str, object]) -> BeginFound:
        """Begin the loop, with this state, or enter that of the others, which is a commit of theirs."""
        job, training = self._job, self._training
        if training.session.verification.every:
            raise ConfigError(
                "--verify compares workers that are alike; under hvd.elastic.run each has its own buffers"
            )
        modules = [thing for thing in named.values() if isinstance(thing, nn.Module)]
        parts = {id(part) for module in modules for part in module.modules()}
        besides = [module for module in self._modules if id(module) not in parts]
        # A job trains something; a script may keep plain values only.
        if not modules and not besides:
            besides = [nothing := nn.Linear(1, 1, bias=False)]
            nn.init.zeros_(nothing.weight)
        things = {**named, **{f"besides{number}": module for number, module in enumerate(besides)}}
        job.register(buffers=None, **things)
        # Each worker has its own: statistics of its batches, plain values such as its times, moments with Adasum.
        training.carrier.leave_undigested(*(name for name, _, _, _ in training.carrier.named_buffers()))
        training.carrier.leave_undigested(*(name for name, thing in named.items() if not _is_alike(thing)))
        training.agreement.alike_buffers = False
        training.registered.choose([])  # nothing is summed in the first pass, and no gradient is touched
        training.agreement.claim_shards(1)
        training.agreement.plan_steps(None, 1)
        if training.at.joining:  # all begin their function at its top when it comes, and it need not make calls before
            training.session.hold_to_join()
        first = training.begin_steps(None)
        elsewhere = training.at.joining or training.at.step > first
        work = PassWork(1, None, "mean", OPTIONAL)
        self._steps = Steps(training, work, Extent(first, 0, None, None, None))
        began_with = self._roster
        changed = self.next_step()
        if not elsewhere:
            job.print(
                "elastic: Horovod's elastic mode: a lost worker's batch is missing from one mean, and no step is done "
                "again; the bits of the result depend on when workers come and go"
            )
        return BeginFound(changed, changed or elsewhere or began_with != self._roster)

    def next_step(self) -> bool:
        """A commit: newcomers copy the state of this moment. Returns whether all workers take the plain values of rank
        0 now, and begin their function at its top. They do when they are other ones than in the last commit; and when a
        newcomer has copied the state, which makes the calls of its function from the top on, with the results of the
        others, until it is one of them: so the others have to make the same calls."""
        assert self._steps is not None
        with calls_named(), randomness_kept():  # each worker has its own; what is seeded for a step is alike
            try:
                next(self._steps)
            except StopIteration:
                raise SystemExit(0) from None  # the job is stopped
            running = self._steps.running
            assert running is not None
            pass_without_gradients(self._training, running)
        # A newcomer goes with the results of the others until it is one of them, so all know what these have found. If
        # a worker that gave the state is lost before it has said so here, the workers are other ones.
        session = self._training.session
        said = self._exchange("roster", [session.place().rank, self._together, session.state_given])
        self._roster = self._together = _by_rank({worker: rank for worker, (rank, _, _) in said.items()})
        return any(given or before not in (None, self._roster) for _, before, given in said.values())

    def close(self) -> None:
        """The script has ended."""
        training = self._training
        with calls_named():
            if self._steps is not None and not training.at.is_over:
                training.end_loop()
            elif training.calls.idle:
                training.calls.may_be_all()  # a function that asks who it is, or reduces something, ends well
            self._job.close()

    # What the workers bring

    def _exchange(self, label: str, own: Any) -> dict[str, Any]:
        """Worker id -> JSON that it brings. Before the loop, newcomers and later runs are told what the first had."""
        calls = self._training.calls

        def brought(result: Any) -> Any:
            return result.note

        with calls_named():
            if self._steps is None:
                name, self._calls = f"{self._calls} {label}", self._calls + 1
                note = calls.shared(name, empty_leaf, brought, OpKind.ALLREDUCE, own)
            else:
                note = calls.collective(OpKind.ALLREDUCE, label, 1, empty_leaf, brought, own)
        return cast(dict[str, Any], note)

    def check_steps(self) -> None:
        self._check_running("DistributedOptimizer.step()")

    def _check_running(self, call: str) -> None:
        if self._steps is None:
            raise ConfigError(
                f"hvd.{call} came outside of a function with @hvd.elastic.run, in an elastic job. Call it there; or "
                "start a script without such a function with `elastic run --ranks N`, where all ranks are kept, or "
                "with --restart"
            )

    def _sums(
        self, label: str, own: Mapping[str, Sequence[torch.Tensor]], reply: Callable[[dict[str, torch.Tensor], int], R]
    ) -> R:
        """See VectorSums.sum. Raises CallsDiffer."""
        with calls_named():
            return self._vectors.sum(label, len(self._roster), own, reply)

    def _bytes(self, label: str, own: bytes) -> list[WorkerBytes]:
        """What each worker brings, by rank."""
        short = base64.b64encode(own).decode() if len(own) <= SMALL_MAX else ""
        said = self._exchange(label, [self.standing.rank, len(own), short])
        order = _by_rank({worker: rank for worker, (rank, _, _) in said.items()})
        if all(said[worker][1] <= SMALL_MAX for worker in order):
            return [WorkerBytes(worker, said[worker][0], base64.b64decode(said[worker][2])) for worker in order]
        self._check_running(f"{label} of {len(own)} bytes")
        sizes = [1 + _numbers(said[worker][1]) for worker in order]
        vector = torch.zeros(sum(sizes))
        if (worker := self._training.session.worker_id) in order:  # else a newcomer that has copied, and brings nothing
            begin_at = sum(sizes[: order.index(worker)])
            vector[begin_at] = 1.0  # it is there: a worker may be lost since it has said how much it has
            vector[begin_at + 1 : begin_at + 1 + _numbers(len(own))] = vector_of(own)
        whole = self._sums(f"{label}: values", {"float32": [vector]}, lambda sums, _: sums["float32"].cpu().clone())
        parts = whole.split(sizes)
        return [
            WorkerBytes(worker, said[worker][0], content_of(part[1:])[: said[worker][1]])
            for worker, part in zip(order, parts, strict=True)
            if float(part[0]) == 1.0
        ]

    # Collectives

    def reduce(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        if self._steps is None or any(map(_no_float, tensors)) or op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            rows = self.gather_objects(call, [*map(_on_cpu, tensors)])
            return [
                reduce_rows([row[number] for row in rows], op).to(tensor.device)
                for number, tensor in enumerate(tensors)
            ]
        found = [tensor.detach().clone() for tensor in tensors]
        self.reduce_into(call, found, op)
        return found

    @torch.no_grad()
    def reduce_into(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Sums and means of floats are read from the tensors, and written to them, without a copy between."""
        if self._steps is None or op not in (ReduceOp.SUM, ReduceOp.AVERAGE) or any(map(_no_float, tensors)):
            super().reduce_into(call, tensors, op)
            return
        wide: dict[str, list[torch.Tensor]] = {}
        for tensor in tensors:
            wide.setdefault("float64" if tensor.dtype is torch.float64 else "float32", []).append(tensor)

        def put(sums: dict[str, torch.Tensor], present: int) -> None:
            for group, members in wide.items():
                parts = sums[group].split([tensor.numel() for tensor in members])
                for tensor, part in zip(members, parts, strict=True):
                    part = part.view(tensor.shape)
                    if op is ReduceOp.AVERAGE and tensor.dtype is part.dtype and tensor.device == part.device:
                        torch.div(part, present, out=tensor)
                    else:
                        tensor.copy_(mean_of(part, present) if op is ReduceOp.AVERAGE else part)

        own = {group: [tensor.to(getattr(torch, group)) for tensor in members] for group, members in wide.items()}
        if own:
            self._sums(call.text, own, put)

    def gather(self, call: Call, tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        there = self._bytes(call.text, to_bytes([*map(_on_cpu, tensors)], call.text))
        ranks = [one.rank for one in there]
        if len(set(ranks)) < len(ranks):  # before the loop, a worker may have begun behind the loss of another one
            ranks = list(range(len(there)))
        return {
            rank: [row.to(tensor.device) for row, tensor in zip(from_bytes(one.content), tensors, strict=True)]
            for rank, one in zip(ranks, there, strict=True)
        }

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> torch.Tensor:
        found: torch.Tensor = self._from(root, call, lambda: _on_cpu(tensor))
        return found.to(tensor.device)

    def gather_objects(self, call: Call, thing: object) -> list[Any]:
        return [from_bytes(one.content) for one in self._bytes(call.text, to_bytes(thing, call.text))]

    def broadcast_object(self, call: Call, thing: object, root: int) -> Any:
        return self._from(root, call, lambda: thing)

    def _from(self, root: int, call: Call, thing: Callable[[], object]) -> Any:
        """What the root brings; if it is lost in this very call, the next one is asked for it, or the last."""
        mine = self.standing.rank == root
        while True:
            there = self._bytes(call.text, to_bytes(thing(), call.text) if mine else b"")
            for one in there:
                if one.content:
                    return from_bytes(one.content)
            next_root = next((one for one in there if one.rank > root), there[-1])
            mine = next_root.worker == self._training.session.worker_id

    def join(self) -> int:
        """Raises ConfigError."""
        raise ConfigError(
            "hvd.join() in an elastic job: workers that have no more data would have to know what the others do, which "
            "may be other ones by then. Give all workers equally many batches, as ElasticSampler does"
        )

    @property
    def alike_at_start(self) -> bool:
        return self._steps is None

    def will_be_alike(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Before the loop: the workers begin it with rank 0's, and newcomers copy them."""
        if self._steps is not None:
            return tensors
        modules = modules_of(tensors)
        self._modules += [module for module in modules if not any(module is known for known in self._modules)]
        return of_none(tensors, modules)


def _is_alike(thing: object) -> bool:
    """Whether it has one state on all workers."""
    if isinstance(thing, torch.optim.Optimizer):
        reduction = getattr(thing, "horovod_reduction", None)
        return reduction is None or reduction.op is not ReduceOp.ADASUM
    return isinstance(thing, nn.Module)


def _by_rank(ranks: Mapping[str, int]) -> list[str]:
    """Worker ids by rank, as each worker has said it: two may have said it in different generations."""
    return sorted(ranks, key=lambda worker: (ranks[worker], worker))


def _numbers(length: int) -> int:
    """How many numbers carry so many bytes, see vector_of."""
    return -(-length // 3)


def _no_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()

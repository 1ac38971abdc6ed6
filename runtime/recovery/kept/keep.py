"""elastic.keep: the state of a script that is started again in each round, in memory after each step.

Weights and the state of optimizers are copied by a thread while the script goes on: only the step of an optimizer
changes them, and it waits for the copy. Everything else is copied at once: on a GPU into memory of the GPU, from which
the thread copies it. On other devices all is copied at once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from elastic.errors import ConfigError, NotCarried
from elastic.security.roles import CERTS_VARIABLE
from runtime.allreduce.ring.tls import TlsContexts
from runtime.data.random_state import RandomNumbers, seed_all
from runtime.recovery.kept.agreed_end import AgreedEnd
from runtime.recovery.kept.choice import COPIES_MAX, HeldSegment, PartPlan, bytes_at, plan_part
from runtime.recovery.kept.comparison import apart_paths, apart_states, gathered, parameter_state, shards_of
from runtime.recovery.kept.content import CurrentState, LeftOutBuffers, Piece, named
from runtime.recovery.kept.copying import BodyLayout, NewSegment, StepCopy, WriteRule, size_of, table
from runtime.recovery.kept.ddp_order import GradientOrder
from runtime.recovery.kept.exact_sums import ExactUnits, clip_norm
from runtime.recovery.kept.loading import SavedState, load, opened
from runtime.recovery.kept.place import EXACT, LEFT_OUT, OFF, ORDER, PART, RANDOM, THIN, KeptPlace
from runtime.recovery.kept.reading import StateReader
from runtime.recovery.kept.remote import OtherMachines, SegmentMirror
from runtime.recovery.kept.segment import BUFFERS, SegmentWriter
from runtime.recovery.kept.step_log import StepLog
from runtime.recovery.state.available_memory import available_bytes, free_bytes
from runtime.recovery.state.encoding import decode
from runtime.recovery.state.small_values import Number, as_number
from runtime.recovery.transfer.connection import CopyFailed

ROUNDS = 2
"""Those of two rounds are in memory at once: the new round has none that is whole until its first step is kept."""
SHARE = 0.5
"""The part of the free memory that segments may take."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """Where this process stands in its round, as torchrun's environment says it."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> _Rank:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        return cls(*(int(environment[name]) for name in names))


def keep(*objects: object, units: int | None = None, every: int = 1, copies: int = 1, **more: object) -> KeptScript:
    """Keep the state of these objects in memory, and fill them with what was kept before.

    objects: models, optimizers, learning rate schedulers, and whatever else has state_dict() and load_state_dict();
    replicated or sharded (FSDP2). more: the same under a name, such as loader=. Their state has to be the same in all
    processes, but for shards. Call it once, in all processes, when all of them are as at the beginning. units: into so
    many each step is divided, see KeptScript.units; then FSDP2 sums gradients with the same bits in any world. every:
    the state is kept behind the first step of a round and behind each step whose number is a multiple of this, the same
    in all processes: a loss then costs up to so many steps, and a step costs less. What a planned end of a round would
    lose is always kept. copies: of each shard on other machines, 1 or 2, the same in all processes; with 2 a machine
    and the next one may be lost at once.

    Only a script under `elastic run --restart` is started again: elsewhere nothing is kept, and `step` begins at 0.
    Raises OtherState, naming what differs, if the objects are not like those that were kept; nothing is changed then.
    Raises ConfigError if every is no positive number or copies is neither 1 nor 2, and in a second call.
    """
    if every < 1:
        raise ConfigError(f"elastic.keep(every={every}): the state is kept behind each so many steps, 1 or more")
    if copies not in range(1, COPIES_MAX + 1):
        raise ConfigError(f"elastic.keep(copies={copies}): a shard is kept on 1 or {COPIES_MAX} other machines")
    if is_kept():
        raise ConfigError(
            "elastic.keep is called a second time in this process: call it once, with all objects. With --ranks, "
            "Trainer, Lightning and loops over what accelerate prepares are kept by themselves, unless it is called "
            "before they begin"
        )
    found = named(objects, more)
    exact = None if units is None else ExactUnits(found, units)
    place = KeptPlace.from_environment(os.environ)
    others = OtherMachines.read(place.others) if place is not None else None
    if exact is not None:
        found[EXACT] = exact
    if place is not None and place.own:
        found |= {ORDER: GradientOrder(), RANDOM: RandomNumbers(), LEFT_OUT: LeftOutBuffers(found)}
    if place is not None and place.source is not None:
        parts = {0, _Rank.of(os.environ).rank} if place.own else None
        with opened(place.memory, place.source, others, _seal(), parts) as segments:
            saved = SavedState.of_rank(segments[0], segments[-1]) if place.own else SavedState.of(segments)
            # An older version, of which a running job may have steps, has kept no such buffers.
            load({name: one for name, one in found.items() if name != LEFT_OUT or name in saved.plain}, saved)
    kept = KeptScript(found, place, exact, others, _Options(every, copies))
    if place is not None:
        KeptScript.newest = place
        if place.because:
            kept.turn_off(place.because)
    return kept


def is_kept() -> bool:
    """Whether this process of a round has called keep() already."""
    return KeptScript.newest is not None and KeptScript.newest == KeptPlace.from_environment(os.environ)


def kept_before(name: str) -> Any:
    """What an object had as plain values in the step that this round goes on from, before keep() fills anything, with
    an empty tensor in the place of each tensor; None: there is no such step, or it has no object with that name. Only
    with --ranks."""
    place = KeptPlace.from_environment(os.environ)
    if place is None or place.source is None or not place.own:
        return None
    rank = _Rank.of(os.environ).rank
    with opened(place.memory, place.source, OtherMachines.read(place.others), _seal(), {rank}) as (mine,):
        return decode(mine.table()["plain"].get(name), lambda number: torch.empty(0))


def _seal() -> TlsContexts:
    """The certificates of the job, if it has any."""
    directory = os.environ.get(CERTS_VARIABLE, "")
    return TlsContexts(Path(directory) if directory else None)


@dataclass(frozen=True, slots=True)
class _Options:
    """Of keep(), the same in all processes."""

    every: int = 1
    copies: int = 1

    def __str__(self) -> str:
        return f"every={self.every}, copies={self.copies}"


class KeptScript:
    """Used by the script's main thread. `step`: how many steps are done, so the number of the next one."""

    newest: ClassVar[KeptPlace | None] = None
    """Where this process keeps its state, once keep() has been called."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        place: KeptPlace | None = None,
        exact: ExactUnits | None = None,
        others: OtherMachines | None = None,
        options: _Options = _Options(),
    ) -> None:
        """place: None: nothing is kept. exact: None: steps have no units. others: None: all is on this machine."""
        self.step = place.source.step if place is not None and place.source is not None else 0
        self._objects = objects
        self._reader = StateReader(objects)
        self._exact = exact
        self._others = others
        self._mirrors: list[SegmentMirror] = []
        self._place = place
        self._at = _Rank.of(os.environ) if place is not None else None
        self._end: AgreedEnd | None = None
        self._options = options
        self._off = ""
        """Why nothing is kept any more."""
        self._begun = False
        self._apart: frozenset[str] = frozenset()
        """Paths of weights and optimizers' tensors that are not the same in all processes, where they need not be; and
        NAME.state.NUMBER for each parameter with such a path, of whose state tensors may appear in a later step."""
        self._writer: SegmentWriter | None = None
        """None: nothing is kept yet, or another process keeps the same."""
        self._plan = PartPlan(0, 1, True, 1, ())
        self._layout = BodyLayout(WriteRule(lambda piece: False, lambda piece: False, samples=False))
        self._copy: StepCopy | None = None
        self._at_once = False
        """Whether everything is copied in done(), because the script changes weights while they are copied."""
        self._log: StepLog | None = None
        if place is not None and self._at is not None:
            self._log = StepLog(place.round, self._at.rank, self._at.world)
            self._end = AgreedEnd(place, self._at.rank, self._at.world, os.environ)
            for name, one in objects.items():
                if isinstance(one, torch.optim.Optimizer):
                    one.register_step_pre_hook(functools.partial(self._before_step, name))

    def done(self) -> None:
        """A step is done: all processes call it behind the last change of the step, as that of the scheduler. If the
        step is one that is kept, it waits until the one before is in memory, on another machine too. If workers join or
        leave as planned, it does not return behind the last step of the round, but for a handler of SIGTERM."""
        step = self.step + 1
        ends = self._place is not None and self._end is not None and self._end.is_last(step)
        if self._begun and not ends and step % self._options.every:
            self.step = step
            self._write_log()
            return
        stepped = self._copy is not None and self._copy.stepped
        self.wait()
        self._await_mirror()
        self.step = step
        state = self._state()
        if self._place is None or state is None:
            return
        try:
            if not self._begun:
                self._begun = True
                self._begin(state)
            self._write_log()
            if self._writer is not None and self._place is not None:
                self._keep(state, self._writer, gpu_at_once=not stepped)
        except OSError as error:
            self._stop_here(_unwritable(error, self._place))
        if ends and self._end is not None and self._place is not None:
            self.wait()
            self._await_mirror()
            self._end.arrive()

    def log(self, **values: Number) -> None:
        """Values of the step in progress, as loss=loss, that the ledger of the job is to have: the mean of what all
        processes have logged under a name until done(), a process several times or not at all. With units, those of a
        unit that does not count are left out, and the mean has the same bits in any world.

        values: numbers, or tensors of one element. Raises UsageError for others."""
        if self._place is None or self._log is None or (self._exact is not None and self._exact.idle):
            return
        for name, value in values.items():
            self._log.take(name, as_number(value, f"kept.log: {name}"))

    def _write_log(self) -> None:
        """Before the step is kept."""
        if self._place is None or self._log is None:
            return
        try:
            self._log.write(self._place.directory(), self.step)
        except OSError as error:
            self._stop_here(_unwritable(error, self._place))

    def _before_step(self, name: str, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._copy is not None:
            self._copy.stepped = True
        self.wait()
        if self._log is not None:
            self._log.take_lr(name, optimizer)

    def _state(self) -> CurrentState | None:
        """None: nothing is kept. In the first step of a round all processes are told if one of them cannot keep its
        state, or has no directory for it: it would not come to what they do together. Raises NotCarried, then in all of
        them."""
        state, refused = None, ""
        try:
            state = self._reader.read() if self._place is not None else None
        except NotCarried as error:
            if self._begun:
                raise
            refused = str(error)
        if self._begun or self._at is None:
            return state
        mine = self._off
        if self._place is not None:
            try:
                self._place.directory()
            except OSError as error:
                mine = mine or _unwritable(error, self._place)
        for rank, (off, because, options) in enumerate(gathered([mine, refused, self._options])):
            if because:
                raise NotCarried(f"on rank {rank}: {because}")
            if options != self._options:
                raise ConfigError(f"elastic.keep({options}) on rank {rank}, and ({self._options}) here: say the same")
            if off and self._place is not None:
                self.turn_off(f"on rank {rank}: {off}")
        self._begun = self._place is None
        return state

    def units(self) -> Iterator[int]:
        """The units of the next step that this process computes: numbers below the `units` of keep(). Each takes one
        backward(), and sums are of all units: a loss is divided by their number, for a mean. The generators of torch,
        numpy and random are seeded from the step and the unit. At the end of a step some processes may compute a unit
        again that another one computes; it does not count."""
        if self._exact is None:
            raise ConfigError("kept.units() needs elastic.keep(..., units=N), N units in each step")
        return self._exact.turns(lambda unit: seed_all("kept", self.step, unit))

    def clip_norm(self, limit: float, parameters: Iterable[torch.Tensor] | None = None) -> float:
        """As torch.nn.utils.clip_grad_norm_ for models of FSDP2, with the same bits in any world. parameters: None:
        those of all models that keep() was given."""
        models = [one for one in self._objects.values() if isinstance(one, torch.nn.Module)]
        every = [parameter for model in models for parameter in model.parameters()]
        return clip_norm(every if parameters is None else parameters, limit)

    def wait(self) -> None:
        """Until the last step is in memory. The step of an optimizer that is kept waits by itself."""
        if (copy := self._copy) is None or copy.seen:
            return
        copy.wait()
        copy.seen = True
        if copy.error is not None and self._place is not None:
            self._stop_here(_unwritable(copy.error, self._place))
        elif copy.torn and not self._at_once:
            self._at_once = True
            self._say(
                f"{copy.torn} was changed while it was copied, not by the step of an optimizer that elastic.keep was "
                f"given: step {copy.step} is not kept, and later ones are copied in done() itself"
            )

    def _await_mirror(self) -> None:
        """Until the thread of the last step has ended."""
        if self._copy is not None:
            self._copy.join()
            for mirror, because in self._copy.unsent:
                self._mirrors.remove(mirror)
                self._say_fewer(because)
            self._copy = None

    def _say_fewer(self, because: str) -> None:
        """Of the machines that take what this process keeps, one takes no more."""
        if self._place is not None and self._at is not None:
            count = self._plan.machines + len(self._mirrors)
            where = f"{count} machines" if count > 1 else "one machine alone"
            self._say(f"the state is on {where} until the next round: {because}")
            if count == 1:
                self._place.leave_word(f"{THIN}{self._at.rank}", because)

    def _stop_here(self, because: str) -> None:
        """Keep nothing any more in this process, and say why, as no other process knows."""
        if self._at is not None and self._at.rank:
            print(f"elastic: on rank {self._at.rank}: the state is not kept: {because}", file=sys.stderr, flush=True)
        self.turn_off(because)

    def turn_off(self, because: str) -> None:
        """Keep nothing any more, and say why: rank 0 does so for all."""
        self._off = self._off or because
        if self._place is not None:
            self._say(f"the state is not kept in memory: {because}")
            self._place.leave_word(OFF, because)
        self._place = None

    def _say(self, what: str) -> None:
        if self._at is not None and self._at.rank == 0:
            print(f"elastic: {what}", file=sys.stderr, flush=True)

    def _begin(self, state: CurrentState) -> None:
        """Before the first step of the round is kept: all processes have the same state, and there is memory."""
        assert self._place is not None and self._at is not None
        directory = self._place.directory_there
        apart = apart_paths(state, own=self._place.own)
        self._apart = apart | apart_states(self._objects, apart)
        for one in self._objects.values():
            if isinstance(one, GradientOrder):
                one.close()
        nodes = gathered(self._at.node)
        plan = self._plan = self._part_of(state, nodes)
        mirrors = [
            self._others.mirrors[(node - self._at.node - 1) % (max(nodes) + 1)]
            for node in plan.targets
            if self._others is not None
        ]
        self._layout = BodyLayout(self._rule(state))
        targets = list(plan.targets) if mirrors else []
        bodies = gathered((size_of(self._layout.place(state)), [self._at.node, *targets]))
        for other in gathered(shortage(bytes_at(self._at.node, bodies), directory)):
            if other:
                self.turn_off(other)
                return
        if plan.part != self._at.rank:
            (directory / f"{PART}{self._at.rank}").write_text(str(plan.part))
        if plan.writes:
            held = self._held(state)
            self._writer = SegmentWriter(directory, held.group, held.part)
        failed = []
        for worker in mirrors:
            assert self._others is not None
            try:
                self._mirrors.append(SegmentMirror(self._others.dial.open(worker, _seal()), self._place.round))
            except CopyFailed as error:
                failed.append(str(error))
        for because in failed:
            self._say_fewer(because)

    def _part_of(self, state: CurrentState, nodes: list[int]) -> PartPlan:
        """What this process keeps in this round. nodes: the machine of each rank."""
        assert self._place is not None and self._at is not None
        if not self._in_parts(state):
            return PartPlan(0, 1, self._at.local_rank == 0, max(nodes) + 1, ())
        has: list[Any] = list(range(self._at.world))
        where = has if self._place.own else gathered(shards_of(state, bits=False))
        if len(set(where)) < len(has) and len(set(gathered(shards_of(state, bits=True)))) == len(set(where)):
            has = where  # otherwise no replicas, or they have not the same bits, and so keep a part each
        return plan_part(self._at.rank, has, nodes, self._options.copies)

    def _in_parts(self, state: CurrentState) -> bool:
        """Whether each process keeps a part of the state. Otherwise one process of each machine keeps all of it."""
        return state.is_sharded or (self._place is not None and self._place.own)

    def _is_first(self) -> bool:
        """Whether this process keeps what all processes have: once in the job, or, without parts, once a machine."""
        return self._plan.part == 0 and self._plan.writes

    def _rule(self, state: CurrentState) -> WriteRule:
        assert self._place is not None
        first, own = self._is_first(), self._place.own

        def writes(piece: Piece) -> bool:
            return self._plan.writes and (piece.sharded or first or (own and not self._is_alike(piece)))

        return WriteRule(writes, self._is_alike, samples=own)

    def _keep(self, state: CurrentState, writer: SegmentWriter, *, gpu_at_once: bool) -> None:
        assert self._place is not None and self._at is not None
        placed = self._layout.place(state)
        said = table(state.parts, placed, plain=self._place.own or self._is_first())
        segment = NewSegment(writer.oldest(), self._held(state), placed, said)
        mirrors = tuple(self._mirrors)
        self._copy = StepCopy(segment, mirrors, writer.thread, at_once=self._at_once, gpu_at_once=gpu_at_once)

    def _is_alike(self, piece: Piece) -> bool:
        """Whether all processes have this tensor alike, as far as the first step of the round could tell. The sample
        tells when they have not: that of another parameter's state may differ from a later step on."""
        if not piece.steady or piece.sharded:
            return False
        return not self._apart or not (piece.path in self._apart or parameter_state(piece.path) in self._apart)

    def _held(self, state: CurrentState) -> HeldSegment:
        """What the segment of this step is: a part of the state, or all of it, which each machine keeps."""
        assert self._place is not None and self._at is not None
        group, plan = 0 if self._in_parts(state) else self._at.node, self._plan
        return HeldSegment(self.step, self._place.round, group, plan.part, plan.parts, self._options.copies)


def _unwritable(error: OSError, place: KeptPlace) -> str:
    return f"{error.filename or place.memory} cannot be written ({error.strerror})"


def shortage(body: int, directory: Path) -> str:
    """Why there is no memory for the segments of a machine, if those of one step have so many bytes; "": there is.
    directory: of the round, beside those of earlier rounds, which take a part of that memory already."""
    wanted = BUFFERS * ROUNDS * body
    try:
        held = sum(path.stat().st_size for path in directory.parent.glob("*/*.*.*") if path.exists())
        left = ((free_bytes(directory), "in /dev/shm"), (available_bytes(), "on this machine"))
    except OSError as error:  # the other processes wait for what this one says
        return f"{error.filename or directory} cannot be read ({error.strerror})"
    for free, where in left:
        if wanted > SHARE * (held + free):
            return (
                f"{wanted / 1e6:.0f} MB for {BUFFERS} copies in each of {ROUNDS} rounds would take more than half of "
                f"the {(held + free) / 1e6:.0f} MB that are left {where}"
            )
    return ""

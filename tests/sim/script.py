"""The user's program, and what it computes: values that remember which parameters they came from.

A unit's value is (place of the operation in the program, unit, version of the parameters); a sum is the tuple of its
units' values in tree order. The state after an operation is a hash of the state before and the sum, so anything that is
lost, counted twice, or computed from the wrong parameters shows in every later number.

A job that goes on from a snapshot begins with SYNC again, which changes nothing, and has the operations from there on:
it ends in the state of a job that was never disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from elastic.protocol.loop_state import LoopKind

Value = tuple[int, ...]
"""Place, unit, version; in a round of replicas the inner steps, too."""

Sum = tuple[Value, ...]

WITHOUT_EFFECT = ("shared", "sync", "once")
"""Operations whose result is only read. The last one, LEAVE, has no state after it."""


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    units: int
    joinable: bool = False
    epoch: int = 0
    """As newcomers are bound to it: 0 in a loop without epochs."""
    step: int = 0
    place: int = 0
    """In the whole program."""
    handed_out: int = 0
    """The place of the first operation of its step."""

    def changes(self, state: int, result: Sum) -> int:
        """The parameters after it."""
        return state if self.name in WITHOUT_EFFECT else hash((state, result))


@dataclass(frozen=True, slots=True)
class Step:
    epoch: int
    """Of its data. A loop without epochs may go through its data several times."""
    early: tuple[Operation, ...]
    passes: tuple[tuple[Operation, ...], ...]
    """A pass has a second operation if its first result does not hold."""
    calls: tuple[Operation, ...]
    """Between its last pass and its end."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """between: the operation between this epoch and the next; None: it is the last. end: the step after its last."""

    before: tuple[Operation, ...]
    end: int
    after: tuple[Operation, ...]
    between: Operation | None


@dataclass(frozen=True, slots=True)
class Program:
    """A loop without epochs has one Epoch, of which only `end` is used."""

    loop: LoopKind
    shared: Operation | None
    sync: Operation
    epochs: tuple[Epoch, ...]
    steps: tuple[Step, ...]
    behind: tuple[Operation, ...]
    """After the loop."""
    leave: Operation
    operations: tuple[Operation, ...]
    """All of them, in order."""
    hold: bool
    """Whether newcomers ask a step to wait for their copy from the first one on."""


class _Pen:
    """Writes one operation after the other."""

    def __init__(self, random: Random, units: int) -> None:
        self.random = random
        self.units = units
        self.written: list[Operation] = []
        self.epoch = self.step = self.handed_out = 0

    def some(self, probability: float, name: str) -> tuple[Operation, ...]:
        return (self.write(name),) if self.random.random() < probability else ()

    def write(self, name: str, units: int = 1, *, joinable: bool = False) -> Operation:
        here = self.epoch, self.step, len(self.written), self.handed_out
        self.written.append(Operation(name, units, joinable, *here))
        return self.written[-1]

    def write_pass(self, number: int) -> tuple[Operation, ...]:
        first = self.write("pass", self.units, joinable=number == 0)
        return (first, self.write("again", self.units)) if self.random.random() < 0.02 else (first,)


def write_script(random: Random, steps: int, units: int, epoch_steps: int) -> Program:
    """A loop over epochs, or one without; steps of one or two passes, and calls wherever a script may make them."""
    pen, epochs, written = _Pen(random, units), list[Epoch](), list[Step]()
    kind = LoopKind.EPOCHS if epoch_steps < steps or random.random() < 0.5 else LoopKind.BARE
    in_epochs = kind is LoopKind.EPOCHS
    early, second = random.choice([(0.0, 0.4), (0.0, 0.2), (0.2, 0.0), (0.6, 0.0)])
    before, after = (random.choice([0.0, 0.5]), random.choice([0.0, 0.2])) if in_epochs else (0.0, 0.0)
    across = random.choice([5, steps])
    shared = next(iter(pen.some(0.3, "shared")), None)
    sync = pen.write("sync")
    for first in range(0, steps, epoch_steps):
        pen.epoch, pen.step, end = len(epochs), first, min(first + epoch_steps, steps)
        calls_before = pen.some(before, "once")
        for pen.step in range(first, end):
            pen.handed_out = len(pen.written)
            calls_early = pen.some(early, "early")
            passes = tuple(pen.write_pass(number) for number in range(1 + (random.random() < second)))
            calls = (pen.write("evaluate", random.randint(1, units)),) if pen.step % 5 == 4 else ()
            written.append(Step(pen.epoch if in_epochs else pen.step // across, calls_early, passes, calls))
        calls_after = pen.some(after, "after")
        between = pen.write("epochs") if end < steps else None
        epochs.append(Epoch(calls_before, end, calls_after, between))
    behind = pen.some(0.2, "behind")
    leave = pen.write("leave")
    hold = len(pen.written) % 7 == 0  # without a draw: what a seed draws behind this stays as it is
    return Program(kind, shared, sync, tuple(epochs), tuple(written), behind, leave, tuple(pen.written), hold)


class Script:
    """The operations of one run of the job. begins_with: the state of the parameters before them."""

    def __init__(self, program: Program, operations: tuple[Operation, ...], begins_with: int = 0) -> None:
        self.program = program
        self.operations = operations
        self.result = cache(self._result)
        self._states = [begins_with]

    @property
    def last(self) -> int:
        return len(self.operations) - 1

    def resumed(self, place: int, state: int) -> Script:
        """The rest of the program, from a state taken before the operation at that place."""
        return type(self)(self.program, (self.program.sync, *self.operations[place:]), state)

    def _result(self, op: int) -> Sum:
        """What a run without faults gets."""
        operation = self.operations[op]
        return tuple((operation.place, unit, self.state(op)) for unit in range(operation.units))

    def state(self, op: int) -> int:
        """The parameters before operation op in a run without faults. In a loop, as a script may be longer than the
        interpreter's stack is deep."""
        while (at := len(self._states) - 1) < op:
            self._states.append(self.operations[at].changes(self._states[at], self.result(at)))
        return self._states[op]

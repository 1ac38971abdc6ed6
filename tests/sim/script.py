"""The user's program, and what it computes: values that remember which parameters they came from.

A unit's value is (place of the operation in the program, unit, version of the parameters); a sum is the tuple of its
units' values in tree order. The state after an operation is a hash of the state before and the sum, so anything that is
lost, counted twice, or computed from the wrong parameters shows in every later number.

A job that goes on from a snapshot begins with SYNC again, which changes nothing, and has the operations from there on:
it ends in the state of a job that was never disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random

Value = tuple[int, int, int]
Sum = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    units: int
    joinable: bool = False
    epoch: int = 0
    place: int = 0
    """In the whole program."""


def write_script(random: Random, steps: int, units: int, epoch_steps: int) -> tuple[Operation, ...]:
    """SYNC, then steps of one or two passes with an evaluation now and then, then LEAVE."""
    operations = [Operation("sync", 1)]
    for step in range(steps):
        epoch = step // epoch_steps
        operations.append(Operation("pass", units, joinable=True, epoch=epoch))
        if random.random() < 0.3:
            operations.append(Operation("pass", units, epoch=epoch))
        if step % 4 == 3:
            operations.append(Operation("evaluate", random.randint(1, units), epoch=epoch))
    operations.append(Operation("leave", 1))
    return tuple(replace(operation, place=place) for place, operation in enumerate(operations))


class Script:
    """operations: from SYNC to LEAVE. begins_with: the state of the parameters before them."""

    def __init__(self, operations: tuple[Operation, ...], begins_with: int = 0) -> None:
        self.operations = operations
        self._begins_with = begins_with
        self.result = cache(self._result)
        self.state = cache(self._state)

    @property
    def last(self) -> int:
        return len(self.operations) - 1

    def resumed(self, place: int) -> Script:
        """The rest of the program, from a state taken before the operation at that place."""
        return Script((self.operations[0], *self.operations[place:]), self.state(place))

    def next_state(self, op: int, state: int, result: Sum) -> int:
        """The parameters after an operation."""
        return hash((state, result)) if self.operations[op].place else state

    def _result(self, op: int) -> Sum:
        """What a run without faults gets."""
        operation = self.operations[op]
        return tuple((operation.place, unit, self.state(op)) for unit in range(operation.units))

    def _state(self, op: int) -> int:
        """The parameters before operation op in a run without faults."""
        return self.next_state(op - 1, self.state(op - 1), self.result(op - 1)) if op else self._begins_with

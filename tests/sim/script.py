"""The user's program, and what it computes: values that remember which parameters they came from.

A unit's value is (operation, unit, version of the parameters); a sum is the tuple of its units' values in tree
order. The state after an operation is a hash of the state before and the sum, so anything that is lost, counted
twice, or computed from the wrong parameters shows in every later number.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    return tuple(operations)


class Script:
    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self.operations = operations
        self.result = cache(self._result)
        self.state = cache(self._state)

    @property
    def last(self) -> int:
        return len(self.operations) - 1

    def _result(self, op: int) -> Sum:
        """What a run without faults gets."""
        return tuple((op, unit, self.state(op)) for unit in range(self.operations[op].units))

    def _state(self, op: int) -> int:
        """The parameters before operation op in a run without faults."""
        return 0 if op == 0 else apply(self.state(op - 1), self.result(op - 1))


def apply(state: int, result: Sum) -> int:
    return hash((state, result))

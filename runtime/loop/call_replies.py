"""What the workers' collective calls between passes gave: newcomers, and runs that go on from a checkpoint, are told.

A call is known by its number and its name, such as `2 once(best)`: a worker that makes other calls, or the same ones in
another order, finds no reply under its key.
"""

from __future__ import annotations

from copy import deepcopy

from elastic.errors import Disagree
from runtime.allreduce.reduction.partial_sum import Json

SHARED_MAX = 4096
"""Values under a name, at most, of those that nobody asked to be told."""


class CallReplies:
    """The replies of one job. A reply is copied on its way in and out, as the script may change what it got."""

    def __init__(self) -> None:
        self.of_epoch: dict[str, Json] = {}
        """Key -> reply of each call of this epoch before its steps."""
        self.early: dict[str, list[Json]] = {}
        """Key -> [the last such step, its reply] of each call between the hand-out of a step and its first pass."""
        self.shared: dict[str, Json] = {}
        """Name -> value, for the whole job."""
        self.calls = 0
        """Number of calls in this epoch."""

    def begin_epoch(self) -> None:
        """The calls of an epoch are counted anew."""
        self.calls = 0

    def end_epoch(self) -> None:
        """Forget the replies of the epoch."""
        self.of_epoch.clear()
        self.early.clear()

    def next_key(self, label: str, early_calls: int | None) -> str:
        """Count a call. early_calls: of an early one, how many have come before it in this step. Returns its key."""
        key = f"{self.calls if early_calls is None else early_calls} {label}"
        self.calls += 1
        return key

    def keep(self, key: str, value: Json) -> None:
        """Note the reply to a call before the steps of this epoch."""
        self.of_epoch[key] = deepcopy(value)

    def told(self, key: str, epoch: int) -> Json:
        """The others' reply to a call before the steps of this epoch. Raises Disagree if they made no such call."""
        if key not in self.of_epoch:
            raise Disagree(
                f"this newcomer called {key!r} (n-th call, name) before the steps of epoch {epoch}, the others "
                f"{sorted(self.of_epoch)}. Make such calls depend on the epoch and job.state only."
            )
        return deepcopy(self.of_epoch[key])

    def keep_early(self, key: str, step: int, value: Json) -> None:
        """Note the reply to an early call."""
        self.early[key] = [step, deepcopy(value)]

    def forget_early(self, step: int) -> None:
        """The step is handed out once more, and what is called then is called anew."""
        self.early = {key: said for key, said in self.early.items() if said[0] != step}

    def remember(self, name: str, value: Json) -> None:
        """Note a small value for the whole job, if there are not too many."""
        if name in self.shared or len(self.shared) < SHARED_MAX:
            self.shared[name] = value

"""Training loops of one script that come one after the other, as several fit() of a framework: what each has left.

Each loop is an epoch of the job. A worker that joins in a later loop, or goes on from a checkpoint of one, runs its
script from the top, so it comes to loops that the job has behind it. Such a loop is not trained: its objects get what
they had at its end, and the script goes on from there, as it did in the others. So all members keep the end of each
loop in their memory, and checkpoints have it: as many bytes as what the loop has trained, with its optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elastic.errors import ConfigError
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state.available_memory import available_bytes
from runtime.recovery.state.script_state import Values
from runtime.recovery.state.training_state import Carrier

NAME = "earlier loops"
"""Of what the loops have left, among the registered objects."""
DIGESTS = "digests of earlier loops"
"""Of what digests of the job have instead."""


class LoopEnd(NamedTuple):
    """A copy of what a loop has trained, as Carrier.capture returns it."""

    header: dict[str, Json]
    blobs: list[torch.Tensor]
    digest: str


class EarlierLoops:
    """Registered in all loops but the first. `ends` is replaced, and never changed: other threads copy it."""

    def __init__(self, device: torch.device) -> None:
        """device: this worker's."""
        self._device = device
        self.number = -1
        """Of the loop in which the script is, or that it has left last."""
        self.entry = 0
        """The loop in which this worker came to the job, or in which the job goes on."""
        self.ends: tuple[LoopEnd, ...] = ()
        self._lacks = ""
        """How much memory lacks to keep what the last loop has left; "": it is kept."""
        self._found: tuple[dict[str, Json], Sequence[torch.Tensor]] | None = None
        """The checkpoint from which the job goes on, until the script is in its loop."""

    @property
    def passing(self) -> bool:
        """Whether the script is in a loop that the job has behind it, or behind such a loop."""
        return 0 <= self.number < self.entry

    def objects(self) -> dict[str, object]:
        """What is to be registered besides what the loop trains."""
        return {NAME: self, DIGESTS: _Digests(self)} if self.number > 0 else {}

    def state_dict(self) -> dict[str, Any]:
        ends = [{"header": json.dumps(header), "blobs": blobs, "digest": digest} for header, blobs, digest in self.ends]
        return {"ends": ends}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ends = tuple(LoopEnd(json.loads(end["header"]), end["blobs"], end["digest"]) for end in state["ends"])

    def keep(self, objects: Mapping[str, object], undigested: Collection[str], workers: int = 1) -> None:
        """The loop is over. objects: what it has trained. undigested: names of those that may differ between runs.
        workers: how many of the job's are on this machine; all of them keep it, at about the same time."""
        carrier = self._carrier(objects)
        carrier.leave_undigested(*undigested)
        _, tensors = carrier.describe()
        nbytes, available = sum(tensor.nbytes for _, tensor in tensors), available_bytes()
        if nbytes * workers > available:  # no error yet, as most scripts have no further loop
            self._lacks = f"{nbytes:,} bytes for each of its {workers} workers, and {available:,} are left"
            return
        self._lacks = ""
        header, blobs = carrier.capture()
        copied = [blob.clone() for blob in blobs]
        self.ends = (*self.ends, LoopEnd(header, copied, carrier.digest((header, copied))))

    def check_kept(self) -> None:
        """Another loop begins. Raises ConfigError if what the one before has left is not kept: there was no memory for
        it, or an error came behind its steps. A worker that comes later could not go on."""
        if self._lacks:
            raise ConfigError(
                f"a further training loop begins, and this machine lacks the memory for what the one before has left, "
                f"{self._lacks}: give it more memory, or make the loop a job of its own"
            )
        if len(self.ends) <= self.number:
            raise ConfigError("a training loop begins behind one that has ended with an error: begin none then")

    def recall(self, objects: Mapping[str, object]) -> None:
        """The script has come to a loop that is over: give its objects what they had at its end. Raises ConfigError if
        the script has made other objects."""
        end = self.ends[self.number]
        self._carrier(objects).load(end.header, end.blobs)

    def told(self, entry: int, header: dict[str, Json], blobs: Sequence[torch.Tensor], *, resumed: bool) -> None:
        """What a member, or the checkpoint from which the job goes on, has of the loops before `entry`. resumed: it is
        a copy of the whole state, to be loaded in that loop. Raises ConfigError."""
        self.load_state_dict(Carrier(Values()).state_of(NAME, header, blobs))
        if len(self.ends) < entry:
            raise ConfigError(f"a copy of the state has {len(self.ends)} training loops, and is of loop {entry}")
        self.entry, self._found = entry, (header, blobs) if resumed else None

    def load_found(self, carrier: Carrier) -> None:
        """The script has come to the loop of the checkpoint, and has registered what is trained there."""
        if self._found is not None:
            found, self._found = self._found, None
            carrier.load(*found)

    def check_over(self) -> None:
        """The script has ended. Raises ConfigError if that is before the loop in which the job is."""
        if self.passing:
            raise ConfigError(
                f"the script ended behind its training loop {self.number}, counted from 0, and the job is in loop "
                f"{self.entry}: start it with the script and the arguments of its beginning, or anew with --fresh"
            )

    def _carrier(self, objects: Mapping[str, object]) -> Carrier:
        """Copies these objects alone."""
        carrier = Carrier(Values(), self._device)
        carrier.register(None, **objects)
        return carrier


class _Digests:
    """What the digest of a job has of its earlier loops."""

    def __init__(self, loops: EarlierLoops) -> None:
        self._loops = loops

    def state_dict(self) -> dict[str, Any]:
        return {"digests": [end.digest for end in self._loops.ends]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The loops themselves are loaded."""

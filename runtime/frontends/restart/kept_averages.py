"""Copies of the weights that a script with its own loop has, as the averages of diffusers' EMAModel or the best weights
so far: what has the shapes of a model, see frames/model_copies.py.

Those that were there when the first loop began are kept from the step on in which they change first: before that, each
process has made them by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastic.errors import NotCarried, OtherState
from runtime.frontends.ddp.frames.model_copies import ModelCopies
from runtime.frontends.ddp.frames.places import ScriptFrames, ValuePlace
from runtime.frontends.ddp.frames.plain_values import fill
from runtime.frontends.frameworks.long_tensors import CallbackTensors, Told
from runtime.frontends.frameworks.plain_state import ANY_LENGTH, is_plain

BELOW_MAX = 64
"""Objects in a list or a dictionary of the script that are looked into: more are data."""


class KeptAverages:
    """A part of what elastic.keep has of such a script."""

    def __init__(self, frames: ScriptFrames, models: Iterable[nn.Module], registered: Iterable[Any]) -> None:
        """Find those that the script has when its first loop begins. registered: objects that are kept as such."""
        self._frames = frames
        self._copies = ModelCopies(frames, models, registered, below_max=BELOW_MAX)
        self._changed = CallbackTensors(behind=True)
        self._told: dict[str, Any] = {}
        self._there = {place: id(value) for place, value in frames.values() if value is not None}
        """What the script has then."""
        self._late: list[tuple[list[Any], Any]] = []
        """Values that the script has made in a loop and that have such a copy in them, each behind all its places:
        frame, function, name and path."""
        self.note()

    def note(self) -> None:
        """A step is done. Raises NotCarried for a copy in an object that was made in a loop: the next round has none to
        fill there before it comes to that place."""
        late: dict[int, tuple[list[Any], Any]] = {}
        for group in self._copies.refresh():
            name, path = group.place[:3], group.place.path
            depth = next((n for n, owner in enumerate(group.owners) if is_plain(owner, ANY_LENGTH)), None)
            # Names that come up in the loop are there again; attributes and entries only of what is there by then.
            if depth is None or not all(
                self._there.get(ValuePlace(*name, path[:n])) == id(group.owners[n]) for n in range(depth)
            ):
                raise NotCarried(
                    f"{group.place.spelling}, a copy of the weights, was made in the training loop, and could not be "
                    "filled in the next round: make it before the first loop, or keep its state_dict()"
                )
            late.setdefault(id(group.owners[depth]), ([[*name, list(path[:depth])]], group.owners[depth]))
        for place, value in self._frames.values() if late else ():
            at = [*place[:3], list(place.path)]
            if id(value) in late and at not in (places := late[id(value)][0]):
                places.append(at)
        self._late = list(late.values())
        (told,) = self._changed.note([("", _told(self._own()))], None)
        self._told = told["values"]

    def _own(self) -> dict[str, dict[str, torch.Tensor]]:
        """Name in the script -> text of the place of a tensor -> the tensor."""
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for place, tensor in self._copies.tensors.items():
            found[ValuePlace(*place[:3]).text][place.text] = tensor.detach()
        return dict(found)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._told, "late": self._late}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises OtherState if the script has not all of them."""
        self._copies.refresh()  # the single batches of loops that are over may have bound others
        own = {place.text: tensor for place, tensor in self._copies.tensors.items()}
        for text, tensor in ((text, tensor) for group in state["own"].values() for text, tensor in group.items()):
            if text not in own or own[text].shape != tensor.shape:
                raise OtherState(
                    f"{text}, an average of the weights, was kept, and the script has none of its shape now"
                )
            fill(own[text], tensor)
        self._changed.loaded([("", _told(state["own"]))])
        self._late = state["late"]

    def put_late(self) -> None:
        """The loop in which they were made goes on. A dictionary or list that is there is filled, as objects of the
        script may have it, too; but if other names stand for it here, they are no names of the value."""
        wanted: dict[ValuePlace, object] = {}
        held: dict[int, set[ValuePlace]] = defaultdict(set)
        here: dict[ValuePlace, Any] = {}
        done: set[int] = set()
        for place, value in self._frames.values():
            held[id(value)].add(place)
            here[place] = value
        for rows, there in self._late:
            places = [ValuePlace(frame, function, name, tuple(path)) for frame, function, name, path in rows]
            found: Any = here.get(places[0])
            is_its_own = held[id(found)] <= set(places) and id(found) not in done
            if is_its_own and isinstance(found, dict) and type(found) is type(there):
                found.clear()
                found.update(there)
            elif is_its_own and isinstance(found, list) and type(found) is type(there):
                found[:] = there
            else:
                found = there
            done.add(id(found))
            wanted |= {place: found for place in places if here.get(place) is not found}
        self._frames.write(wanted)


def _told(values: dict[str, Any]) -> Told:
    return {"values": values, "modules": {}, "objects": {}}

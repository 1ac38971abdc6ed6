"""What a script keeps itself, in its frames and in averages of its weights: undone after silent turns, given to
newcomers, and taken over from others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from runtime.frontends.ddp.frames.loop_shape import would_leave
from runtime.frontends.ddp.frames.model_copies import ModelCopies
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.ddp.frames.plain_values import FrameCounters, FrameValues
from runtime.frontends.ddp.frames.size_limits import Size, SizeWatch
from runtime.frontends.ddp.rank_source import Position
from runtime.frontends.ddp.script.objects import ScriptObjects
from runtime.frontends.ddp.script.turns import Turns


class KeptValues:
    """The values that one script keeps. Call `named` first: it makes `copies`, which most methods use."""

    copies: ModelCopies

    def __init__(self, frames: ScriptFrames, objects: ScriptObjects) -> None:
        self.position = Position()
        self._frames = frames
        self._objects = objects
        self._averages: dict[str, torch.Tensor] = {}
        """What a run that goes on has found in the script's own averages of the weights, until its first turn."""
        self._counters = FrameCounters()
        self._offered = FrameValues(frames)
        """Plain values as they were when the first batch of the pass in progress was handed out."""
        self._at_forward = FrameValues(frames)
        """Plain values as they were when a model saw that batch."""
        self._sizes = SizeWatch(frames)

    def named(self, loaded: Iterable[dict[Any, Any]]) -> dict[str, Any]:
        """All that is registered of the script, by name. loaded: what torch.load() has given it. Raises as
        ScriptObjects.named."""
        named = self._objects.named()
        modules = [thing for thing in (*self._objects.wrapped, *named.values()) if isinstance(thing, nn.Module)]
        self.copies = ModelCopies(self._frames, modules, loaded)
        if self.copies.found:
            named["averages"] = self.copies
        return {**named, "position": self.position}

    def loop_begins(self) -> None:
        """All is registered: what a run goes on from has been read."""
        self._objects.note_settings()
        if self.position.copied:
            self._averages = {name: tensor.clone() for name, tensor in self.copies.state_dict().items()}

    # A step, its passes, its turns

    def pass_begins(self) -> None:
        """The first batch of a pass is handed out."""
        self._offered = FrameValues.read(self._frames)
        self._objects.pass_begins()

    def step_offered(self) -> None:
        """The first batch of a step is handed out."""
        self.pass_begins()
        self._counters.step(self._offered)

    def withdraw(self) -> None:
        """That batch was none of the training."""
        self._offered.put_back(objects=False)

    def model_sees(self) -> None:
        """A model is about to see that batch."""
        self._at_forward = FrameValues.read(self._frames)

    def step(self, number: int, *, resumed: bool) -> None:
        """A step begins. resumed: it is the first one of a run that goes on. Raises as ModelCopies.step."""
        self.copies.step(number)
        self._objects.missed = self.copies.missed or []
        # A run that goes on has set its rates by the values of its beginning, and sets them once more by those that it
        # gets now. What it has set and averaged in the epochs that are over is in its checkpoint already.
        if resumed:
            self._objects.put_back_settings()
            self.copies.load_state_dict(self._averages)
        self._averages.clear()
        if not self.position.copied:
            self.position.values = self._counters.of(self._at_forward, self._offered)
            self.position.stale = self._objects.stale()

    def sizes(self) -> list[Size]:
        """A step begins: the sizes of what has changed since the step before, as SizeWatch.step."""
        return self._sizes.step(self.copies)

    def check_iterators(self) -> None:
        """Raises NotInPlace, as FrameValues.check_iterators, and for what a generator keeps or a `for` around the loop,
        as ScriptObjects.check_iterators."""
        self._offered.check_iterators()
        self._objects.check_iterators()

    def undo(self) -> None:
        """Undo what the turn that ends here has done."""
        self._offered.put_back(objects=True)
        self.copies.put_back()
        self._objects.put_back_settings()

    def settle(self, turns: Turns) -> None:
        """The script has set its rates for its first turn with the state of others, or of an earlier run."""
        if self.position.copied:
            self._take_over(FrameValues.read(self._frames), turns)

    def backward_ended(self, turns: Turns) -> None:
        """A turn has had its last backward(), in which the state of others may have come."""
        if self.position.copied:
            self._objects.note_settings()
            self._take_over(self._at_forward, turns)

    def keep_loop(self) -> None:
        """What the script counts behind a silent turn must not end its loop: the step is not over."""
        earlier = self._counters.earlier
        predicted = self._offered.predicted(self._at_forward, earlier)
        leaving = would_leave(self._frames.standing()[::-1], predicted, self._counters.parts)
        if leaving is not None:
            self._offered.become_earlier(earlier, leaving.names, certain=leaving.certain)

    def _take_over(self, values: FrameValues, turns: Turns) -> None:
        """The state of others, or of an earlier run, has come. values: of this script when it was where they were."""
        others = self.position.values
        self.position.copied = False
        for number, weight in enumerate(self._objects.weights()):
            if number in self.position.stale:
                turns.go_on_with(weight, torch.zeros_like(weight))
        self._counters.told(others)
        values.become(others)
        # The turns that follow in this pass begin with the values of others, too.
        for snapshot in (self._offered, self._at_forward):
            snapshot.rebase(others, values)
        self._counters.earlier = {}

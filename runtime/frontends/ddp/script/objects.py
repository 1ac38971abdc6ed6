"""What a script for N ranks has made: models, optimizers, schedulers and the like, and how they were at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.ddp import mistakes
from runtime.recovery.state.change_detection import version_of
from runtime.script_files import innermost_frame


class ScriptObjects:
    """All of one script, by kind ("model", "optimizer", ...), in the order in which they were made."""

    def __init__(self) -> None:
        self.by_kind: dict[str, list[Any]] = {}
        self.wrapped: list[nn.Module] = []
        """The DistributedDataParallel models, as the script holds them."""
        self.unsaved: set[str | None] = set()
        """Paths of the files that torch.save() was to write, and has not, and of what was made of them since; None
        stands for an open file."""
        self.missed: list[tuple[ReferenceType[torch.Tensor], str]] = []
        """As ModelCopies has it."""
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._trained: list[tuple[nn.Parameter, bool]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradient_versions: list[tuple[int, int] | None] | None = None
        self._weight_versions: list[int] = []
        self._iterators: WeakKeyDictionary[Iterator[Any], int] = WeakKeyDictionary()
        """Iterators over loaders that give each worker the same -> the pass in which the iteration began."""
        self._passes = 0
        self._went_on: tuple[str, str] | None = None
        """Where and of which class one of them was asked in the pass in progress that had begun before it."""

    def add(self, kind: str, thing: object) -> None:
        """The script has made something."""
        self.by_kind.setdefault(kind, []).append(thing)

    def has(self, kind: str, thing: object) -> bool:
        """Whether this very object is known."""
        return any(known is thing for known in self.by_kind.get(kind, ()))

    def check_not_missed(self, state: object) -> None:
        """Raise ConfigError if a dict that the script uses has a tensor that is in a copy which this worker has made
        while it passed by an epoch: the others have other values there, and nobody gives them to newcomers."""
        alive = [(tensor, name) for reference, name in self.missed if (tensor := reference()) is not None]
        missed = {tensor.data_ptr(): name for tensor, name in alive}
        for value in state.values() if missed and isinstance(state, Mapping) else ():
            self.check_not_missed(value)
            if isinstance(value, torch.Tensor) and value.data_ptr() in missed:
                raise mistakes.copied_too_early(missed[value.data_ptr()])

    def named(self) -> dict[str, Any]:
        """All under names of their own, for registration. Raises ConfigError without a model, NotInPlace without an
        optimizer."""
        if not self.by_kind.get("model"):
            raise ConfigError("the training loop began without a DistributedDataParallel model; wrap the model before")
        if not self.by_kind.get("optimizer"):
            raise mistakes.not_in_place(
                "A script without an optimizer of torch.optim", "Weights are changed by its step()."
            )
        return {
            kind if number == 0 else f"{kind}{number + 1}": thing
            for kind, things in self.by_kind.items()
            for number, thing in enumerate(things)
        }

    def weights(self) -> Iterator[nn.Parameter]:
        """The parameters of all models."""
        return (parameter for module in self.by_kind["model"] for parameter in module.parameters())

    def stale(self) -> list[int]:
        """Numbers of the weights that are frozen and have a gradient."""
        weights = enumerate(self.weights())
        return [number for number, weight in weights if not weight.requires_grad and weight.grad is not None]

    # Iterators over loaders that give each worker the same

    def iterates(self, batches: Iterator[Any]) -> None:
        """The script begins to iterate."""
        self._iterators[batches] = self._passes

    def asked(self, batches: object) -> None:
        """The script asks one of them for a batch. Also at its end it would go on in each turn."""
        if self._went_on is None and self._iterators.get(batches, self._passes) != self._passes:  # type: ignore[call-overload]
            self._went_on = innermost_frame(), type(batches).__name__

    def pass_begins(self) -> None:
        """The first batch of a pass is handed out."""
        self._passes += 1
        self._went_on = None

    def check_iterators(self) -> None:
        """Raises NotInPlace if one of them has gone on in this pass, wherever the script keeps it."""
        if self._went_on is not None:
            raise mistakes.loader_goes_on(*self._went_on)

    # Whether something has changed

    def note_gradients(self) -> None:
        """A backward() begins that is to leave the gradients of the models alone."""
        self._gradient_versions = self._versions_of_gradients()

    def gradients_changed(self) -> bool:
        """Whether that backward() has added to one of them; False if none has begun. Asked once for each."""
        noted, self._gradient_versions = self._gradient_versions, None
        return noted is not None and noted != self._versions_of_gradients()

    def _versions_of_gradients(self) -> list[tuple[int, int] | None]:
        gradients = (weight.grad for weight in self.weights())
        return [None if gradient is None else (id(gradient), version_of(gradient)) for gradient in gradients]

    def note_weights(self) -> None:
        """The result of a pass has come."""
        self._weight_versions = self._versions_of_weights()

    def weights_changed(self) -> bool:
        """Whether a weight of a model was changed in place since then."""
        return self._weight_versions != self._versions_of_weights()

    def _versions_of_weights(self) -> list[int]:
        return [version_of(weight) for weight in self.weights()]

    def versions_of_buffers(self) -> dict[str, int]:
        """What differs when a buffer of anything here was changed in place."""
        return {
            f"{kind} {number}: {name}": version_of(buffer)
            for kind, things in self.by_kind.items()
            for number, thing in enumerate(things)
            if isinstance(thing, nn.Module)
            for name, buffer in thing.named_buffers()
        }

    # How it was

    def note_settings(self) -> None:
        """Note what the script may set: in the parameter groups of optimizers, and which weights are trained."""
        groups = (group for optimizer in self.by_kind["optimizer"] for group in optimizer.param_groups)
        self._settings = [(group, {key: value for key, value in group.items() if key != "params"}) for group in groups]
        self._trained = [(weight, weight.requires_grad) for weight in self.weights()]

    def put_back_settings(self) -> None:
        """Set it as it was noted last."""
        for group, before in self._settings:
            group.update(before)
        for weight, trained in self._trained:
            weight.requires_grad_(trained)

    def keep_buffers(self) -> None:
        """Keep the values of the models' buffers."""
        buffers = (buffer for model in self.by_kind["model"] for buffer in model.buffers())
        self._buffers = [(buffer, buffer.clone()) for buffer in buffers]

    def undo_backward(self) -> None:
        """Drop the gradients of the models, and give their buffers the values that were kept."""
        for model in self.by_kind["model"]:
            model.zero_grad()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def end_undone(self) -> None:
        """What the script has done to the buffers since then, as between two epochs, is undone, too, and the values are
        kept no longer."""
        if self._buffers:
            self.undo_backward()
            self._buffers.clear()


def is_meter(value: object) -> bool:
    """Whether an object holds numbers and nothing else, as an AverageMeter does, whatever class it is of."""
    held = getattr(value, "__dict__", None)
    return bool(held) and type(held) is dict and all(type(number) in (int, float) for number in held.values())

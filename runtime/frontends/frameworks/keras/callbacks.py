"""Callbacks of Keras: in which workers each is called, and what is kept of it between steps.

All workers call all callbacks, as callbacks decide: when to stop, which learning rate, what to save. What only writes
belongs to the leader: the bar, TensorBoard, backups. Each worker has the text of a CSVLogger's file, so that the next
leader goes on with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

from runtime.frontends.frameworks.keras.saving import by_itself
from runtime.frontends.frameworks.plain_state import plain_attributes, set_attributes

LEADER_ONLY = frozenset({"BackupAndRestore", "ProgbarLogger", "RemoteMonitor", "TensorBoard"})
"""Callbacks of Keras that write, and decide nothing."""
BFLOAT16 = "bfloat16"
OF_PROCESS = frozenset({"params", "csv_file", "writer"})


class KeptText:
    """The file of a CSVLogger: each worker has its text, and the leader writes it."""

    closed = False

    def __init__(self, path: Path, text: str, leads: Callable[[], bool]) -> None:
        self._path, self.text = path, text
        self._leads = leads

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Replace the file, if this worker leads."""
        if self._leads():
            beside = self._path.with_name(self._path.name + ".tmp")
            beside.write_text(self.text)
            os.replace(beside, self._path)

    def close(self) -> None:
        """Nothing is open."""


class OwnCallback:
    """A callback of the script's or of Keras's, called where it has to be. Other names are the callback's own."""

    def __init__(
        self,
        callback: Any,
        leads: Callable[[], bool],
        behind: Callable[[], bool],
    ) -> None:
        """leads: whether this worker leads now. behind: whether it has still to get the state of others, or of an
        earlier run."""
        self.callback = callback
        self._leads = leads
        self._behind = behind
        kinds = {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("keras.")}
        self._writes = not kinds.isdisjoint(LEADER_ONLY)
        self._restores = "BackupAndRestore" in kinds
        self._csv = "CSVLogger" in kinds
        self._led = False
        """It writes only, and has begun in this worker."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.callback, name)
        if not name.startswith("on_") or not self._writes:
            return found
        return self._if_leading(found)

    def _if_leading(self, own: Callable[..., None]) -> Callable[..., None]:
        def event(*args: Any, **kwargs: Any) -> None:
            if self._led and self._leads():
                with by_itself():
                    own(*args, **kwargs)

        return event

    def on_train_begin(self, logs: Any = None) -> None:
        if self._csv:
            self._begin_csv()
        elif self._restores:
            if not self._behind():  # else its snapshot is older than the state that this worker gets
                self.callback.on_train_begin(logs)
        elif not self._writes:
            self.callback.on_train_begin(logs)

    def lead(self, epoch: int | None) -> None:
        """This worker is the leader from now on. epoch: in progress; None: none has begun."""
        if self._csv and isinstance(self.callback.csv_file, KeptText):
            self.callback.csv_file.flush()
        if self._writes and not self._led:
            self._led = True
            with by_itself():
                if not self._restores:
                    self.callback.on_train_begin()
                if epoch is not None:
                    self.callback.on_epoch_begin(epoch)

    def _begin_csv(self) -> None:
        callback, path = self.callback, Path(self.callback.filename)
        text = path.read_text() if callback.append and path.exists() else ""
        callback.csv_file = KeptText(path, text, self._leads)
        callback.append_header = not text
        callback.writer = callback.keys = None

    # What is kept

    def state_dict(self) -> dict[str, Any]:
        """Its plain attributes; the weights that EarlyStopping keeps, by reference, as nobody writes into them; and, by
        name, functions of Keras, such as the comparison that it chooses at the end of the first epoch."""
        if self._writes:
            return {}
        arrays = {
            name: [_tensor(array) for array in value]
            for name, value in vars(self.callback).items()
            if type(value) is list and value and all(map(_is_numbers, value))
        }
        functions = {
            name: [value.__module__, value.__name__]
            for name, value in vars(self.callback).items()
            if isinstance(value, FunctionType) and _of_keras(value.__module__, value.__name__) is value
        }
        text = self.callback.csv_file.text if self._csv and self.callback.csv_file else None
        plain = plain_attributes(self.callback, without=OF_PROCESS)
        return {"plain": plain, "arrays": arrays, "functions": functions, "text": text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        set_attributes(self.callback, state["plain"])
        for name, tensors in state["arrays"].items():
            setattr(self.callback, name, [_array(tensor) for tensor in tensors])
        for name, (module, function) in state["functions"].items():
            setattr(self.callback, name, _of_keras(module, function))
        if self._csv and isinstance(self.callback.csv_file, KeptText):
            self.callback.csv_file.text = state["text"]
            self.callback.append_header = not state["text"]


def _is_numbers(value: object) -> bool:
    """Whether it is an array of numbers that torch has too."""
    return isinstance(value, np.ndarray) and (value.dtype.kind in "biuf" or value.dtype.name == BFLOAT16)


def _tensor(array: Any) -> torch.Tensor:
    if array.dtype.name == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.dtype(BFLOAT16))  # of ml_dtypes, which Keras imports
    return tensor.numpy()


def _of_keras(module: str, name: str) -> Any:
    """The function of Keras with this name; None if there is none, or it is not Keras's."""
    return getattr(sys.modules.get(module), name, None) if module.startswith("keras.") else None


class RankCallbacks:
    """Methods that a CallbackList has otherwise; the class that `callback_list` makes has Keras's behind it."""

    callbacks: list[Any]
    leads: Callable[[], bool]
    passes_by: Callable[[str], bool]
    epoch: int | None = None
    """In progress."""

    def wrap(
        self, make: Callable[[Any], OwnCallback], leads: Callable[[], bool], passes: Callable[[str], bool]
    ) -> None:
        """make: makes an OwnCallback of a callback. passes: whether this worker leaves out the event with this name,
        which others have had."""
        self.leads, self.passes_by = leads, passes
        self.callbacks = [make(callback) for callback in self.callbacks]

    def lead(self) -> None:
        """This worker is the leader from now on."""
        for callback in self.callbacks:
            callback.lead(self.epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self._forward("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._forward("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._forward("on_train_batch_end", batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._forward("on_epoch_end", epoch, logs)

    def _forward(self, method: str, *args: Any) -> None:
        """As Keras does; what callbacks print comes once. Nothing is handed to other threads, as Keras does for
        callbacks that leave one out."""
        if self.passes_by(method):
            return
        number, logs = args
        said = {name: value.item() if hasattr(value, "item") else value for name, value in (logs or {}).items()}
        with self._printed_once():
            for callback in self.callbacks:
                getattr(callback, method)(number, said)

    @contextmanager
    def _printed_once(self) -> Iterator[None]:
        if self.leads():
            yield
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield


def callback_list(keras_list: Any, *args: Any, **kwargs: Any) -> Any:
    """A CallbackList with RankCallbacks' methods. keras_list: keras.callbacks.CallbackList."""
    kind = type("RankCallbackList", (RankCallbacks, keras_list), {"__module__": __name__})
    return kind(*args, **kwargs)

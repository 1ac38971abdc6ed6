"""Parts of the adapter for Keras in one process: which batches a step has, and what is kept of callbacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("h5py", reason="frameworks are installed by `make test-frameworks`")
os.environ["KERAS_BACKEND"] = "torch"

import keras  # type: ignore[import-not-found, unused-ignore]
from keras.src.backend.torch.trainer import TorchEpochIterator  # type: ignore[import-not-found, unused-ignore]

from elastic.errors import ConfigError
from runtime.frontends.frameworks.keras.batches import WholeBatches, check_validation, read_in_order
from runtime.frontends.frameworks.keras.callbacks import OwnCallback

X = np.arange(40, dtype="float32").reshape(40, 1)
BATCH = 4


class Shuffled(keras.utils.PyDataset):  # type: ignore[misc, unused-ignore]
    """Shuffles itself when an epoch ends."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._random, self._order = np.random.default_rng(0), np.arange(len(X) // BATCH)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        first = BATCH * self._order[number]
        return X[first : first + BATCH], X[first : first + BATCH]

    def on_epoch_end(self) -> None:
        self._random.shuffle(self._order)


def loader() -> Any:
    """With a generator of its own, which remembers earlier passes."""
    samples = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(X))
    own = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(samples, batch_size=BATCH, shuffle=True, generator=own)


def generated() -> Iterator[tuple[Any, Any]]:
    for number in count():
        yield np.full((2, 1), number, "float32"), np.full((2, 1), number, "float32")


def prepared(**data: Any) -> Any:
    """An iterator of Keras as fit() has it when the loop begins."""
    iterator = TorchEpochIterator(**data)
    for _ in iterator:
        break
    iterator.reset()
    return iterator


def source(iterator: Any, steps: int | None = None, first: int = 0) -> WholeBatches:
    read_in_order(iterator.data_adapter)
    return WholeBatches(iterator, 2, 7, steps, keras.tree, lambda: True, first)


def epoch_of(batches: WholeBatches, epoch: int) -> list[list[float]]:
    """The values of each batch."""
    found: list[list[float]] = []
    for step in count() if batches.limit is None else range(batches.limit):
        batch = batches.at(epoch, step)
        if batch is None:
            break
        found.append(batch[0].flatten().tolist())
    return found


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [None, 3, 4, 5, 10, 15])
def test_epochs_have_the_batches_that_keras_gives_them(steps: int | None) -> None:
    """Also where the data end in the middle of an epoch."""
    options = {"x": X, "y": X, "batch_size": BATCH, "shuffle": False, "steps_per_epoch": steps}
    own, batches = prepared(**options), source(prepared(**options), steps)
    for epoch in range(5):
        assert epoch_of(batches, epoch) == [data[0][0].flatten().tolist() for _, _, data in own]


def test_data_begin_with_the_first_epoch() -> None:
    batches = source(prepared(x=generated(), steps_per_epoch=3), 3, first=5)
    assert [batch[0] for epoch in (5, 6) for batch in epoch_of(batches, epoch)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["arrays", "loader", "dataset", "dataset with threads"])
def test_who_comes_later_has_the_batches_of_the_others(kind: str) -> None:
    def made() -> WholeBatches:
        match kind:
            case "arrays":
                data: dict[str, Any] = {"x": X, "y": X, "batch_size": BATCH, "shuffle": True}
            case "loader":
                data = {"x": loader()}
            case _:
                data = {"x": Shuffled(workers=2 if "threads" in kind else 1), "shuffle": True}
        return source(prepared(**data))

    member, newcomer = made(), made()
    epochs = [epoch_of(member, epoch) for epoch in range(3)]
    assert sorted(chain(*epochs[0])) == sorted(chain(*epochs[2])) and epochs[0] != epochs[2]
    newcomer.at(0, 0)  # a rank that is tried
    assert epoch_of(newcomer, 2) == epochs[2]
    member.close()
    newcomer.close()


def test_a_generator_is_no_validation_data() -> None:
    with pytest.raises(ConfigError, match="validation_data=generator"):
        check_validation(generated())
    for data in (None, (X, X), Shuffled(), loader()):
        check_validation(data)


def test_threads_of_a_dataset_end_with_the_last_pass() -> None:
    iterator = prepared(x=Shuffled(workers=2), shuffle=False)
    batches = source(iterator)
    assert len(epoch_of(batches, 0)) == 10
    assert iterator.data_adapter.enqueuer.is_running()
    batches.close()
    assert not iterator.data_adapter.enqueuer.is_running()


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_weights_of_any_dtype_are_kept_and_other_arrays_are_no_state() -> None:
    def own() -> Any:
        return OwnCallback(keras.callbacks.EarlyStopping(), lambda: True, lambda: False)

    one, other = own(), own()
    narrow = keras.ops.convert_to_numpy(keras.Variable(np.array([1.5, -2.0]), dtype="bfloat16"))
    one.callback.best_weights = [X, np.asarray(narrow)]
    one.callback.words = [np.array(["cat", "dog"]), np.array([None])]
    other.load_state_dict(one.state_dict())
    for kept, was in zip(other.callback.best_weights, one.callback.best_weights, strict=True):
        assert kept.dtype == was.dtype and kept.tobytes() == was.tobytes()
    assert not hasattr(other.callback, "words")

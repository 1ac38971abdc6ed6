"""job.loader: what a shard's batch consists of, and that it depends on its place only."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic.errors import ConfigError
from runtime.data.loader import Loader, to_device
from runtime.data.prefetcher import Wanted
from tests.unit.jobs import dataset, make_job


def loader(data: Any, batch_size: int = 6, **arguments: Any) -> Any:
    return make_job().loader(data, batch_size, **{"shards": 3, **arguments})


def batch(of: Loader, epoch: int, step: int, shard: int) -> Any:
    """In a world of one."""
    return of.batch(Wanted(epoch, step, 0, shard), tuple(range(of.shards)))


def test_len_is_the_number_of_steps_of_an_epoch() -> None:
    assert len(loader(range(20))) == 3
    assert len(loader(range(20), tail="pad")) == 4


def test_a_batch_holds_the_samples_of_its_shard() -> None:
    batches = loader(range(20))
    assert [batch(batches, 0, 1, shard).tolist() for shard in range(3)] == [[6, 7], [8, 9], [10, 11]]


def test_a_padded_tail_is_filled_from_the_start_of_the_order() -> None:
    batches = loader(range(20), tail="pad")
    assert [batch(batches, 0, 3, shard).tolist() for shard in range(3)] == [[18, 19], [0, 1], [2, 3]]


def test_the_order_depends_on_the_loaders_seed_if_it_has_one() -> None:
    def order(**arguments: Any) -> list[int]:
        batches = loader(range(60), 60, shuffle=True, **arguments)
        return [i for shard in range(3) for i in batch(batches, 0, 0, shard).tolist()]

    assert order() == order(seed=0) != order(seed=1)


def test_random_transforms_depend_on_the_place_and_not_on_what_ran_before() -> None:
    def noisy(sample: int) -> tuple[float, float, float]:
        return sample + float(torch.rand(())), float(np.random.rand()), random.random()

    batches = loader(range(20), transform=noisy)
    first = batch(batches, 0, 1, 2)
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    batch(batches, 0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, batch(batches, 0, 1, 2), strict=True))
    assert not torch.equal(first[1], batch(batches, 1, 1, 2)[1])


def test_collate_gets_the_transformed_samples() -> None:
    batches = loader(range(20), transform=lambda sample: sample * 10, collate=tuple)
    assert batch(batches, 0, 0, 1) == (20, 30)


def test_how_the_batch_is_split_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    loader(range(20), 6)
    loader(range(20), 7)
    assert capsys.readouterr().out.splitlines() == [
        "6 samples a step = 3 shards x 2",
        "7 samples a step = 3 shards x 2 or 3",
    ]


def test_weights_may_be_a_tensor_of_any_kind() -> None:
    def order(weights: Any) -> list[int]:
        batches = loader(range(20), weights=weights)
        return [i for step in range(3) for shard in range(3) for i in batch(batches, 0, step, shard).tolist()]

    plain = [i % 4 for i in range(20)]
    orders = [plain, torch.tensor(plain), torch.tensor(plain, dtype=torch.bfloat16), np.array(plain, np.float32)]
    assert len({tuple(order(weights)) for weights in orders}) == 1
    assert not {i for i in order(plain) if i % 4 == 0}


class Damaged:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise OSError("cannot read it")
        return torch.zeros(1 + index % 2)


def refuse(sample: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("no")


@pytest.mark.parametrize(
    ("shard", "step", "transform", "kind", "note"),
    [
        (1, 1, None, OSError, "dataset[9] raised, for shard 1 of step 1 in epoch 2"),
        (0, 0, refuse, ArithmeticError, "transform(dataset[0]) raised, for shard 0 of step 0 in epoch 2"),
        (2, 0, None, RuntimeError, "collate of 2 samples raised, for shard 2 of step 0 in epoch 2"),
    ],
)
def test_what_a_dataset_raises_says_which_sample_it_was(
    shard: int, step: int, transform: Any, kind: type[Exception], note: str
) -> None:
    with pytest.raises(kind) as raised:
        batch(loader(Damaged(), transform=transform), 2, step, shard)
    assert raised.value.__notes__ == [f"job.loader: {note}"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "arguments", "words"),
    [
        ([], {}, "the dataset is empty"),
        (Stream(), {}, r"map-style dataset, and Stream has no.*job\.stream\(open, shards=...\)"),
        (iter([1, 2]), {}, "no __getitem__ and no __len__"),
        (DataLoader(dataset()), {}, r"give it the dataset \(dataloader.dataset\)"),
        (range(20), {"shards": 0}, "shards=0"),
        (range(20), {"shards": -1}, "shards=-1"),
        (range(20), {"shards": 7}, "below shards=7"),
        (range(20), {"batch_size": 0}, "batch_size=0"),
        (range(20), {"batch_size": 6.0}, "batch_size=6.0"),
        (range(20), {"batch_size": 30}, "fewer than one step"),
        (range(20), {"tail": "keep"}, "tail='keep'"),
        (range(20), {"seed": -1}, "seed=-1"),
        (range(20), {"weights": torch.ones(19)}, "19 numbers and the dataset 20 samples"),
    ],
)
def test_what_cannot_be_loaded_is_refused(data: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loader(data, **arguments)


def test_a_loader_is_not_a_dataset() -> None:
    with pytest.raises(ConfigError, match="give it the dataset itself"):
        loader(loader(range(20)))


def test_tensors_at_any_depth_move_to_the_device_and_the_rest_stays() -> None:
    Pair = namedtuple("Pair", ["x", "name"])
    batch = {"a": [torch.zeros(1), "text"], "b": Pair(torch.zeros(2), b"bytes"), "c": (torch.zeros(3), 4)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"].x.device.type == moved["c"][0].device.type == "meta"
    assert (moved["a"][1], moved["b"].name, moved["c"][1]) == ("text", b"bytes", 4)
    assert type(moved["b"]) is Pair


class Output(OrderedDict[str, Any]):
    """As ModelOutput of transformers."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("there is no update()")


class Encoding(UserDict[str, Any]):
    """As BatchEncoding of transformers."""

    @property
    def ids(self) -> Any:
        return self["ids"]


def test_a_batch_that_is_a_mapping_keeps_its_kind() -> None:
    batch = Encoding(ids=torch.zeros(2), text="as it is")
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is Encoding and moved.ids.device.type == "meta" and moved["text"] == "as it is"
    assert batch.ids.device.type == "cpu"
    output = to_device(Output(x=torch.zeros(1)), torch.device("meta"))
    assert type(output) is Output and output["x"].device.type == "meta"
    assert to_device(defaultdict(list, x=torch.zeros(1)), torch.device("meta"))["missing"] == []


def test_a_packed_sequence_keeps_its_sizes_on_the_cpu() -> None:
    packed, name = to_device((pack_sequence([torch.ones(3), torch.ones(2)]), "name"), torch.device("meta"))
    assert packed.data.device.type == "meta" and packed.batch_sizes.tolist() == [2, 2, 1] and name == "name"


def test_a_dataset_without_tensors_is_as_good() -> None:
    assert batch(loader(TensorDataset(torch.arange(9)), 3), 0, 0, 1)[0].tolist() == [1]

"""Batches between processes: every value as it was, tensors with their strides, no descriptor left behind."""

from __future__ import annotations

import os
import weakref
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from runtime.data.shared_memory import ALIGNMENT, pack, unpack

Pair = namedtuple("Pair", "left right")


def sent(value: Any) -> Any:
    parcel = pack(value)
    try:
        return unpack(parcel)
    finally:
        os.close(parcel)


BASE = torch.arange(120, dtype=torch.float32)
TENSORS = {
    "plain": BASE,
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "transposed": BASE.view(10, 12).t(),
    "a part with gaps": BASE.view(10, 12)[2:7, 3:9:2],
    "expanded": torch.arange(3).expand(4, 3),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": BASE.bfloat16(),
    "bool": BASE > 7,
    "complex": torch.complex(BASE, -BASE),
    "conjugate": torch.complex(BASE, -BASE).conj(),
    "sparse": torch.eye(4).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # says torch 2.11
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_has_the_same_bits_and_strides(tensor: torch.Tensor) -> None:
    got = sent(tensor)
    assert got.dtype == tensor.dtype and got.shape == tensor.shape and got.layout == tensor.layout
    assert torch.equal(got.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided and not tensor.is_conj():
        assert got.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:Sparse")  # that these layouts are in beta
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_nothing_keeps_a_sparse_tensor_that_its_receiver_drops(layout: str) -> None:
    dense = torch.tensor([[0.0, 2.0], [4.0, 0.0]])
    blocks: Any = {"blocksize": (1, 1)} if layout[0] == "b" else {}
    tensor = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **blocks)
    got = sent(tensor)
    assert got.layout == tensor.layout and torch.equal(got.to_dense(), dense)
    assert layout != "coo" or got.is_coalesced()
    dropped = weakref.ref(got)
    del got
    assert dropped() is None


def test_entries_of_a_sparse_tensor_are_not_summed_on_the_way() -> None:
    values = torch.tensor([1.0, 2.0, 4.0])
    got = sent(torch.sparse_coo_tensor(torch.tensor([[0, 0, 1]]), values, (3,), check_invariants=True))
    assert got._values().tolist() == [1.0, 2.0, 4.0] and not got.is_coalesced()


def test_tensors_are_aligned_and_can_be_written_to() -> None:
    tensors = sent([torch.zeros(size) for size in (1, 3, 17)])
    for tensor in tensors:
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor += 1
    assert [float(tensor.sum()) for tensor in tensors] == [1, 3, 17]


def test_a_subclass_and_a_gradient_stay_what_they_are() -> None:
    parameter = sent(torch.nn.Parameter(torch.ones(2)))
    assert type(parameter) is torch.nn.Parameter and parameter.requires_grad


def test_other_values_are_as_they_were() -> None:
    value = {"name": "ä", "pair": Pair(1, (None, 2.5)), "array": np.arange(6.0).reshape(2, 3)[:, ::2], "bytes": b"xy"}
    got = sent(value)
    assert got["array"].tolist() == value["array"].tolist()  # type: ignore[attr-defined]
    assert {**got, "array": 0} == {**value, "array": 0}


def test_what_cannot_be_sent_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((AttributeError, TypeError)):
        pack(lambda: 0)
    kept = [sent(torch.ones(5)) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(float(tensor.sum()) == 5 for tensor in kept)

"""The reductions, and what ranks tell each other about their calls."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from runtime.frontends.horovod.arithmetic import (
    ReduceOp,
    adasum,
    chosen_op,
    fused,
    pieces,
    put_back,
    reduce_rows,
    scaled,
    split_sizes,
)
from runtime.frontends.horovod.call_matching import JOIN, agreed, heard, said
from runtime.frontends.horovod.collectives import differentiable
from runtime.frontends.horovod.compression import Compression
from runtime.frontends.horovod.current import entered
from runtime.frontends.horovod.interrupts import BadArgument, CallsDiffer
from runtime.frontends.horovod.world import Call, World

ROWS = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0]), torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])]


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (ReduceOp.AVERAGE, [1.5, 1.0]),
        (ReduceOp.SUM, [6.0, 4.0]),
        (ReduceOp.MIN, [0.0, -2.0]),
        (ReduceOp.MAX, [3.0, 5.0]),
        (ReduceOp.PRODUCT, [0.0, 0.0]),
    ],
)
def test_reductions(op: ReduceOp, wanted: list[float]) -> None:
    assert reduce_rows(ROWS, op).tolist() == wanted
    assert reduce_rows([row.half() for row in ROWS], op).dtype is torch.float16
    assert reduce_rows([row.long() for row in ROWS], op).tolist() == [int(value) for value in wanted]
    assert ROWS[0].tolist() == [1.0, -2.0], "what was given is as it was"


def test_adasum_is_the_sum_of_orthogonal_and_the_mean_of_equal_gradients() -> None:
    one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum([one, other]).tolist() == [2.0, 3.0]
    assert adasum([one, one]).tolist() == [2.0, 0.0]
    assert adasum([one, torch.zeros(2)]).tolist() == [2.0, 0.0]
    assert adasum([one, one, other, other]).tolist() == [2.0, 3.0]
    # By hand: a·b = 2, |a|² = 4, |b|² = 2: a (1 - 1/4) + b (1 - 1/2)
    assert adasum([one, torch.tensor([1.0, 1.0])]).tolist() == [2.0, 0.5]
    with pytest.raises(BadArgument, match="3"):
        adasum([one] * 3)
    with pytest.raises(BadArgument, match="floats"):
        adasum([torch.ones(2).long()])


def test_the_reduction_is_named_once() -> None:
    assert [chosen_op(None, None), chosen_op(True, None), chosen_op(False, None)] == [0, 0, ReduceOp.SUM]
    for wrong in ((True, ReduceOp.SUM), (None, 17)):
        with pytest.raises(BadArgument):
            chosen_op(*wrong)


def test_rows_are_dealt_to_all_ranks() -> None:
    assert pieces(7, 3) == [3, 2, 2] and pieces(1, 3) == [1, 0, 0]
    assert split_sizes(None, 6, 3) == [2, 2, 2] and split_sizes([1, 0, 5], 6, 3) == [1, 0, 5]
    for splits, rows in ((None, 7), ([1, 2], 3), ([1, 1, -1], 1), ([1, 1, 1], 4)):
        with pytest.raises(BadArgument):
            split_sizes(splits, rows, 3)


def test_factors_keep_the_dtype() -> None:
    assert scaled(torch.tensor([3, 5]), 0.5).tolist() == [1, 2]
    assert scaled(torch.tensor([3.0]).half(), 0.5).dtype is torch.float16


def test_many_tensors_travel_as_few() -> None:
    tensors = [torch.ones(2, 2), torch.ones(3).double(), torch.tensor(5.0)]
    vectors = fused(tensors)
    assert [vector.numel() for vector in vectors] == [5, 3]
    put_back([vector * 2 for vector in vectors], tensors)
    assert tensors[0].tolist() == [[2.0, 2.0], [2.0, 2.0]] and tensors[2].item() == 10.0
    assert tensors[1].dtype is torch.float64


def test_compression_rounds_floats_and_leaves_others() -> None:
    tensor = torch.tensor([1.0 + 2**-12])
    narrow, ctx = Compression.fp16.compress(tensor)
    assert narrow.dtype is torch.float16
    assert Compression.fp16.decompress(narrow, ctx).tolist() == [1.0]
    assert Compression.none.compress(tensor)[0] is tensor
    integers = torch.tensor([3])
    assert Compression.fp16.decompress(*Compression.fp16.compress(integers)).dtype is torch.int64


SUM = Call("allreduce", "a", ReduceOp.SUM, tensors=(("float32", (2, 3)),))


def test_a_call_is_said_and_heard() -> None:
    assert heard(said(SUM)) == SUM and heard(said(JOIN)) == JOIN
    for message in (
        b"",
        b"\xff",
        b"{}",
        b"[1]",
        b'{"kind": "x", "tensors": 3}',
        b'{"evil": 1, "tensors": [], "op": null}',
    ):
        with pytest.raises(CallsDiffer, match="no collective"):
            heard(message)


def test_ranks_in_different_calls_are_told_who_is_where() -> None:
    assert agreed([SUM, SUM]) == SUM and agreed([SUM, JOIN]) == SUM and agreed([JOIN, JOIN]) == JOIN
    other = Call("allgather", tensors=(("float32", (-1, 3)),))
    with pytest.raises(CallsDiffer, match=r"rank 0: allreduce\(float32\[2, 3\], op=Sum\) 'a'; rank 1: allgather"):
        agreed([SUM, other])
    with pytest.raises(CallsDiffer, match=r"ranks \[1\] have called hvd.join"):
        agreed([other, JOIN])


def test_the_text_of_a_call_of_many_tensors_is_short() -> None:
    many = Call("grouped_allreduce", tensors=(("float32", (2,)),) * 300)
    assert len(many.text) < 60 and "300 tensors" in many.text
    assert many.text != Call("grouped_allreduce", tensors=(("float32", (3,)),) * 300).text


def test_a_call_keeps_no_tensor_alive_behind_its_backward() -> None:
    """Without the garbage collector, which comes late where most of the memory is a GPU's."""
    double = differentiable(lambda given: [2 * given[0]], lambda gradients: [2 * gradients[0]])
    gc.disable()
    try:
        with entered(cast(World, SimpleNamespace())):
            tensor = torch.ones(2, requires_grad=True) * 3
            seen = weakref.ref(tensor)
            double([tensor])[0].sum().backward()
            del tensor
            assert seen() is None
    finally:
        gc.enable()

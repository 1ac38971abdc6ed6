"""Modes of modules in a pass, and how a buffer's kind is said."""

from __future__ import annotations

import torch
from torch import nn

from runtime.allreduce.reduction.buffers import Modes, described
from runtime.allreduce.reduction.partial_sum import Partial, fold_meta


def test_a_copy_that_is_loaded_outside_a_pass_fixes_no_modes() -> None:
    model = nn.Sequential(nn.Dropout())
    modes = Modes(model.modules)
    modes.loaded()
    model.eval()
    modes.restore()
    assert not model.training


def test_a_copy_that_is_loaded_in_a_pass_brings_the_modes_with_which_the_pass_begins() -> None:
    model = nn.Sequential(nn.Dropout())
    modes = Modes(model.modules)
    modes.begin()
    model.eval()
    modes.loaded()
    model.train()
    modes.restore()
    assert not model.training and not model[0].training


def test_a_kind_is_said_as_dtype_and_shape() -> None:
    assert described(torch.float32, torch.Size([8, 6])) == "float32 [8, 6]"


def test_scalars_of_both_sides_are_added_with_their_weights() -> None:
    left = Partial(0, 1, weight=1.0, scalars={"loss": ("mean", 2.0, 3.0), "left": ("sum", 1.0, 0.0)})
    right = Partial(1, 2, weight=2.0, scalars={"loss": ("mean", 5.0, 7.0), "right": ("sum", 4.0, 0.0)})
    assert fold_meta(left, right) == (
        0,
        3.0,
        {"loss": ("mean", 7.0, 10.0), "left": ("sum", 1.0, 0.0), "right": ("sum", 4.0, 0.0)},
        None,
        0,
    )

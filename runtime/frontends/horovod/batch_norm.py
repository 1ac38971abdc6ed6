"""hvd.SyncBatchNorm: batch normalisation by the statistics of all ranks, also on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from runtime.frontends.horovod.arithmetic import ReduceOp
from runtime.frontends.horovod.collectives import allreduce, differentiable
from runtime.frontends.horovod.current import here


class SyncBatchNorm(nn.BatchNorm1d):
    """Input of shape (N, C, ...). Its mean and variance in training are those of the batches of all ranks together.

    It calls a collective in forward(), which logical ranks refuse (MidShardCollective): their BatchNorm has merged
    running statistics.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        batch = self.training or not self.track_running_stats
        if not batch or here("SyncBatchNorm").standing.size == 1:
            return super().forward(input)
        channels = (1, -1, *[1] * (input.dim() - 2))
        others = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        count = input.numel() / input.shape[1]
        mean = wide.sum(others) / max(count, 1.0)
        squares = (wide - mean.view(channels)).square().sum(others)
        of_all, total = _of_all(torch.stack([mean, squares]), count)
        mean, variance = of_all[0], of_all[1]
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), total)
        found = (wide - mean.view(channels)) * (variance + self.eps).rsqrt().view(channels)
        if self.weight is not None:
            found = found * self.weight.view(channels) + self.bias.view(channels)
        return found.to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _of_all(own: torch.Tensor, count: float) -> tuple[torch.Tensor, float]:
    """own: mean of each channel of this rank's input, and sum of the squared distances to it; count: numbers in a
    channel. Returns mean and variance over all ranks, and the count of all.

    Each rank fills a row of its own in a sum, so that all know the means before they add distances to them: the
    difference of the mean square and the squared mean has no digits left where the mean is large.
    """
    of_all: list[torch.Tensor] = []
    own_mean, dtype = own[0].detach(), own.dtype

    def combine(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        standing = here("SyncBatchNorm").standing
        table = given[0].new_zeros(standing.size, given[0].numel() + 1)
        table[standing.rank, :-1], table[standing.rank, -1] = given[0].flatten(), count
        rows = allreduce(table, name="sync_batch_norm", op=ReduceOp.SUM).double()
        (means, squares), counts = rows[:, :-1].chunk(2, dim=1), rows[:, -1:]
        mean = (means * counts).sum(0) / counts.sum()
        variance = (squares + counts * (means - mean).square()).sum(0) / counts.sum()
        of_all[:] = [mean, counts.sum()]
        return [torch.stack([mean, variance]).to(dtype)]

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        of_mean, of_variance = allreduce(gradients[0], name="sync_batch_norm", op=ReduceOp.SUM).double()
        mean, total = of_all
        of_own_mean = (of_mean + 2 * (own_mean - mean) * of_variance) * count / total
        return [torch.stack([of_own_mean, of_variance / total]).to(dtype)]

    (found,) = differentiable(combine, back)([own])
    return found, float(of_all[1])

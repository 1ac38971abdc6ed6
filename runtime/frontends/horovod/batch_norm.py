"""hvd.SyncBatchNorm: batch normalisation by the statistics of all ranks, also on CPUs."""

from __future__ import annotations

import torch
from torch import nn

from runtime.frontends.horovod.arithmetic import ReduceOp
from runtime.frontends.horovod.collectives import allreduce
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
        count = input.new_full((1,), input.numel() / input.shape[1])
        sums = torch.cat([input.sum(others), (input * input).sum(others), count])
        total = allreduce(sums, name="sync_batch_norm", op=ReduceOp.SUM)
        of_all = total[-1]
        mean, square = (total[:-1] / of_all).chunk(2)
        variance = (square - mean * mean).clamp_min(0.0)
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), float(of_all.detach()))
        found = (input - mean.view(channels)) * (variance + self.eps).rsqrt().view(channels)
        if self.weight is None:
            return found
        return found * self.weight.view(channels) + self.bias.view(channels)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

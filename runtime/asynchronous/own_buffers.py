"""Buffers that training changes, such as the statistics of BatchNorm: within a phase each worker has its own.

At the end of a phase all take the mean over the workers that have trained in it, or for a buffer of the rule "first"
(`job.register(buffers=...)`) the whole buffer of one worker, and go on with that. So a checkpoint, an evaluation and a
newcomer have a buffer as some worker had it, or a mean, and never parts of several. Buffers of integers are among the
plain values of own_values.py.
"""

from __future__ import annotations

import torch

from runtime.guards import checks
from runtime.recovery.state.change_detection import StateMarks
from runtime.recovery.state.training_state import Carrier


class OwnBuffers:
    """Use: `begin` a phase; at its end `end`, `contribution`, and `take` the sums. For the thread of the script."""

    def __init__(self, carrier: Carrier) -> None:
        """carrier: frozen."""
        self._carrier = carrier
        self._floats = carrier.float_buffers()
        self._start: list[torch.Tensor] = []
        """When the phase began: float64, CPU, 1-D."""
        self._own: list[torch.Tensor] = []
        """At its end, those that count."""
        self._counts: list[bool] = []
        self._marks: StateMarks | None = None

    @property
    def elements(self) -> int:
        """Length of a contribution."""
        return len(self._floats) + sum(buffer.live.numel() for buffer in self._floats)

    def begin(self) -> None:
        self._start = self._read()
        self._marks = self._carrier.watch()

    def end(self, where: str, *, trained: bool) -> None:
        """Have the buffers with which the phase began, as all workers do. trained: whether this worker has made an
        inner step. where: in words. Raises BufferChanged if a buffer has changed that is not merged."""
        assert self._marks is not None
        if changed := [name for name in self._carrier.changed(self._marks) if name.startswith("buffer ")]:
            raise checks.state_changed(where, changed)
        own = self._read()
        # One with a NaN, as of a batch that was broken, would be that of all workers.
        self._counts = [trained and bool(one.isfinite().all()) for one in own]
        self._own = [
            one if counts else start for one, counts, start in zip(own, self._counts, self._start, strict=True)
        ]
        self._write(self._start)

    def contribution(self, *, first: bool) -> torch.Tensor:
        """What is summed over all workers: for each buffer how many count, then their values. float64, shape
        (elements,). first: whether this worker is the one whose buffers of the rule "first" are taken."""
        weights = [
            float(first if buffer.merge == "first" else counts)
            for buffer, counts in zip(self._floats, self._counts, strict=True)
        ]
        values = [one if weight else torch.zeros_like(one) for one, weight in zip(self._own, weights, strict=True)]
        return torch.cat([torch.tensor(weights, dtype=torch.float64), *values])

    def take(self, sums: torch.Tensor) -> bool:
        """sums: of all contributions. Returns False if they have to be summed once more, alike on all workers: the
        worker whose buffers are taken has died, and the next one has said the same or not yet."""
        weights, *values = sums.split([len(self._floats), *(one.numel() for one in self._start)])
        pairs = list(zip(self._floats, weights.tolist(), strict=True))
        if any(weight != 1 for buffer, weight in pairs if buffer.merge == "first"):
            return False
        self._write(
            [
                value / weight if weight else start
                for (_, weight), value, start in zip(pairs, values, self._start, strict=True)
            ]
        )
        return True

    def _read(self) -> list[torch.Tensor]:
        return [buffer.live.detach().reshape(-1).to("cpu", torch.float64, copy=True) for buffer in self._floats]

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._floats, values, strict=True):
            buffer.live.copy_(value.view(buffer.live.shape))

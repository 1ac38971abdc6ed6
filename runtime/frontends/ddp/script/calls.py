"""What a script calls for all ranks, counted, so that each worker knows which of the others' calls is its own."""

from __future__ import annotations

from collections import Counter

import torch

from runtime.frontends.ddp.rank_values import RankValue


class CollectiveCalls:
    """The calls for all ranks that one script makes in one worker."""

    def __init__(self) -> None:
        self._number = 0
        self.brought: dict[int, dict[int, torch.Tensor]] = {}
        """What turns of the pass in progress have brought to their n-th collective: n -> rank -> value."""
        self.results: dict[int, tuple[str, list[RankValue]]] = {}
        """What the n-th collective of the last real turn gave: n -> (call, value)."""
        self._occasions = Counter[str]()
        """How often each call for all ranks has come since the last training batch."""

    def next_number(self) -> int:
        """The number of the collective that the script calls now. The count begins with 0 in each turn, and also at the
        script's beginning, for the collectives before its loop."""
        self._number += 1
        return self._number - 1

    def batch_handed_out(self) -> None:
        """The script has its next training batch."""
        self._number = 0
        self._occasions.clear()

    def occasion(self, place: str) -> str:
        """A name for a call at this place, which a worker that comes there later gives it too."""
        self._occasions[place] += 1
        return f"{place} {self._occasions[place]}"

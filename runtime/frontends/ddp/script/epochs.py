"""Which of the job's epochs a script is in, whatever number it gives that epoch itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

from elastic.errors import JoinMissed
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.rank_source import RankSource


class ScriptEpochs:
    """The epochs of one script in one worker."""

    def __init__(self) -> None:
        self.now = -1
        """The epoch of the job that this worker is in, or passes by."""
        self.entry = 0
        """The epoch in which this worker came to the job."""
        self._began_with: int | None = None
        """The number that the script had given its sampler when the job began; None: not known."""
        self._begun: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()
        """What counts the epochs of a training loop, its sampler or its loader -> its epoch, and how often a loop has
        begun with that before the last one."""

    @property
    def passed_by(self) -> bool:
        """Whether the job has been through this epoch before this worker came."""
        return self.now < self.entry

    def again(self, counts: object, epoch: int) -> int:
        """A training loop begins: how often one has begun before in the same epoch of its sampler or loader, which
        counts its epochs. All workers go through the same loops, also those that they pass by."""
        before, count = self._begun.get(counts, (epoch, -1))
        count = count + 1 if before == epoch else 0
        self._begun[counts] = epoch, count
        return count

    def told(self, counts: object, epoch: int, again: int) -> None:
        """Others say what `again` has given for the loop that has begun: this worker has not seen how those were left
        that it has passed by."""
        self._begun[counts] = epoch, again

    def begin(self, source: RankSource, there: Mapping[str, Any] | None, *, joining: bool) -> None:
        """Begin with the job's first epoch, or, if the script has found a snapshot of its own, with the one whose
        number it has given its sampler. there: what others, or the run from which this one goes on, say of their data;
        None: this is the beginning of the job. Raises JoinMissed, and ConfigError for a snapshot that is ahead."""
        self._began_with = source.epoch if there is None else cast("int | None", there.get("began_with"))
        # A script that begins as the job has begun comes to all epochs, however it numbers them: it may go through its
        # data twice under one number.
        if there is None or there.get("sampler_epoch") is None or source.epoch == self._began_with:
            self.now = 0
            return
        number = self.entry - (cast(int, there["sampler_epoch"]) - source.epoch)
        if number > self.entry:
            if joining:
                raise JoinMissed(f"this newcomer begins with epoch {number}, and the job is in epoch {self.entry}")
            raise mistakes.snapshot_ahead(number, self.entry)
        self.now = max(0, number)

    def about(self, source: RankSource) -> dict[str, Any] | None:
        """As RankSource.about, for those who come later."""
        about = source.about()
        if about is not None and self._began_with is not None:
            about["began_with"] = self._began_with
        return about

"""When this worker takes part in a checkpoint, its content, and the start of a resumed run.

All members take a checkpoint at the same step boundary. "500 steps" is a function of the step's number, which all know.
If time decides, rank 0 looks at its clock when a step begins, and the reduction of that step carries its wish, so that
all learn of it at the same place; no operation is added.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from elastic.checkpoints.manifest import Manifest, Moment
from elastic.checkpoints.naming import OWN_FILES_PREFIX, PERIODIC, EntryName
from elastic.checkpoints.policy import Every, Unit, mtbf_s
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import CheckpointError
from elastic.records.temp_dirs import TempDirectory
from runtime.allreduce.reduction.partial_sum import Json
from runtime.data.random_state import randomness_kept
from runtime.recovery.checkpoint.content import Content, now
from runtime.recovery.checkpoint.saver import Saver, SaverTask
from runtime.recovery.checkpoint.source import ResumeSource
from runtime.recovery.checkpoint.stager import Stager
from runtime.recovery.state.script_state import without_tensors
from runtime.session import LoopPlace, Session

if TYPE_CHECKING:
    from runtime.recovery.state.training_state import Carrier

PAUSE_S = 60.0
"""Seconds for which a job that is about to wait below quorum waits for a checkpoint that is still being written."""
FINISH_S = 600.0
"""Seconds for which the end of the script waits for checkpoints that are still being written, and a save for the one
before it."""

CheckpointHook = Callable[[Path, int], None]
RestoreHook = Callable[[dict[str, Any]], None]


class Taking:
    """Used by the user's thread only. Raises ConfigError for a root or an interval that is not possible."""

    def __init__(self, session: Session, carrier: Carrier, settings: Settings) -> None:
        self._session = session
        self._carrier = carrier
        self._settings = settings
        self._every = Every.parse(settings.every)
        self._storage = storage_at(settings.root)
        self._saver = Saver(settings, self._storage, session.place, session.note, session.point)
        self._source = ResumeSource(session, settings, self._storage)
        self._stager = Stager()
        self._began_s = self._last_s = time.monotonic()
        self._wishing = False
        self._asked = False
        self._owed = False
        """Whether the last one that was due was left out."""
        self._resumed: int | None = None
        self.checkpoint_hooks: list[CheckpointHook] = []
        self.restore_hooks: list[RestoreHook] = []

    @property
    def root(self) -> str:
        """The directory of all series."""
        return self._storage.url

    # ------------------------------------------------------------------------------------- periodic

    @property
    def wishing(self) -> bool:
        """Whether this worker's part of a reduction has to carry the wish for a checkpoint."""
        return self._wishing or self._asked  # again, for newcomers that copy the state only now

    def wish(self) -> None:
        """Wish for a checkpoint, whatever the interval is."""
        self._wishing = self.takes_any

    @property
    def takes_any(self) -> bool:
        """Whether checkpoints are taken without a request of the script."""
        return self._every.unit is not Unit.OFF

    def ask(self) -> None:
        """A result has carried the wish: all members take a checkpoint before the next step."""
        self._asked = True
        self._wishing = False

    def before_step(self, moment: Callable[[], Moment], step: int) -> bool:
        """Take a checkpoint if it is due. A step is about to begin, so all members have the same state, and nothing
        changes it. Whether its state is on its way to the storage now."""
        place, taken = self._session.place(), False
        if self._asked or (self._every.at_step(step) and step != self._resumed):
            self._asked = False
            self._last_s = time.monotonic()
            name = EntryName(step, 0, place.generation, place.token)
            self._owed = self._saver.pending > 0
            if self._owed:
                self._session.note("checkpoint_skipped", step=step, because="the one before is still being written")
            else:
                self._take(PERIODIC, name, place, moment(), self._stager, time.monotonic())
                taken = True
        self._wishing = place.rank == 0 and self._wants(place)
        return taken

    def before_pause(self) -> None:
        """The next step will wait for newcomers, so this one may wait too: get its state written."""
        if self.takes_any:
            self._saver.await_written(PAUSE_S)
            self.ask()

    def _wants(self, place: LoopPlace) -> bool:
        if self._every.unit is Unit.OFF or self._saver.pending:
            return False
        if self._owed:
            return True
        standing, now_s = self._saver.standing, time.monotonic()
        abandoned = not standing.complete and standing.place is not None and standing.place.token != place.token
        observed_s = self._settings.observed_s + now_s - self._began_s
        wait_s = self._every.wait_s(standing.cost_s, mtbf_s(observed_s, self._settings.interruptions))
        if not standing.complete:
            wait_s *= 2  # others are slow, or cannot write; more checkpoints would not help them
        return abandoned or now_s - self._last_s >= wait_s

    # ------------------------------------------------------------------------------------- by the script

    def save(self, series: str, name: EntryName, place: LoopPlace, moment: Moment) -> None:
        """Take a checkpoint of this moment under the script's own name; all members of `place` call this.

        It uses its own memory for the whole state, because this worker may have to write the parts of others. So it
        waits here while this worker's part of the save before is not written. The others go on to what all do next, and
        wait there, so the plan of this save is agreed upon before. Where workers come or go it does not wait: a node
        that has to leave may not have the time, and a job that stops does not stop before.
        """
        begun_s = time.monotonic()
        if self._saver.full and place.rank < place.world:
            self._session.takes_time(f"in save({series!r}): the one before is still being written")
            if not self._saver.make_room(self._hurries, FINISH_S):
                late = f"the save before it was still being written after {FINISH_S:g} s"
                return self._saver.failed(series, name, CheckpointError(late))
        self._take(series, name, place, moment, Stager(), begun_s)

    def _hurries(self) -> bool:
        self._session.leave_if_over()
        return self._session.due

    def finish(self) -> None:
        """Wait for checkpoints that are being written."""
        self._saver.finish(FINISH_S)

    @property
    def failures(self) -> list[str]:
        """The script's saves that did not become checkpoints, as sentences."""
        return list(self._saver.standing.failures.values())

    # ------------------------------------------------------------------------------------------- taking

    def _take(
        self, series: str, name: EntryName, place: LoopPlace, moment: Moment, stager: Stager, begun_s: float
    ) -> None:
        """begun_s: when the loop began to stand still for it."""
        if place.rank >= place.world:
            return
        own_files = None
        if place.rank == 0 and self.checkpoint_hooks:
            try:
                own_files = TempDirectory(Path(tempfile.gettempdir()), OWN_FILES_PREFIX)
            except OSError as error:
                return self._saver.failed(series, name, error)
            self._fill(own_files, moment.step)
        content = Content.of(self._carrier)
        ranks = [place.rank] if series == PERIODIC else list(range(place.world))
        shares, copied = content.stage(stager, ranks, place.world)
        self._saver.put(
            SaverTask(
                series=series,
                name=name,
                place=place,
                moment=moment,
                header=content.header,
                shares=shares,
                copied=copied,
                taken=now(),
                own_files=own_files,
                has_own_files=bool(self.checkpoint_hooks),
                stall_s=time.monotonic() - begun_s,
            )
        )

    def _fill(self, own: TempDirectory, step: int) -> None:
        """Have the hooks leave their files there."""
        try:
            with randomness_kept():
                for hook in self.checkpoint_hooks:
                    hook(own.path, step)
        except BaseException:
            own.remove()
            raise

    # ---------------------------------------------------------------------------------------- resuming

    def resume(self) -> Manifest | None:
        """The checkpoint from which this run goes on; None: it starts from the beginning. Calls the on_restore hooks.

        Ends the process if the checkpoint does not exist any more.
        """
        if (manifest := self.found) is not None:
            moment = manifest.moment
            self.restored(moment.step, moment.epoch, manifest.header["state"])
        return manifest

    @property
    def found(self) -> Manifest | None:
        """The same checkpoint, without a call of the hooks."""
        return self._source.manifest

    def restored(self, step: int, epoch: int, state: dict[str, Json]) -> None:
        """Call the on_restore hooks: the script rebuilds its structure before tensors are copied."""
        for hook in self.restore_hooks:
            hook({"step": step, "epoch": epoch, "state": without_tensors(state)})

    def read(self, manifest: Manifest) -> list[torch.Tensor]:
        """The tensors of that checkpoint, which is about to be loaded. Ends the process if they cannot be read."""
        begun_s = time.monotonic()
        blobs = self._source.read(manifest)
        self._resumed = manifest.moment.step
        seconds = round(time.monotonic() - begun_s, 3)
        self._session.note("state_restored", entry=manifest.entry, step=manifest.moment.step, seconds=seconds)
        return blobs

"""Copies of the state between two steps: for checkpoints, for the memory of nodes, and those that save() asks for."""

from __future__ import annotations

from typing import Any

from elastic.checkpoints.manifest import Moment
from elastic.checkpoints.naming import EntryName
from runtime.allreduce.reduction.partial_sum import Json
from runtime.data.random_state import randomness_kept
from runtime.loop.call_replies import CallReplies
from runtime.loop.control_scalars import ControlScalars
from runtime.loop.hooks.world_hooks import WorldHooks
from runtime.loop.training.agreement import Agreement
from runtime.loop.training.newcomer import Newcomer
from runtime.recovery.checkpoint.coordinator import Taking
from runtime.recovery.checkpoint.memory_snapshots import Snapshots
from runtime.session import LoopPlace, Session


class Saves:
    """Used by the user's thread only."""

    def __init__(
        self,
        session: Session,
        agreement: Agreement,
        riders: ControlScalars,
        replies: CallReplies,
        newcomer: Newcomer,
        checkpoints: Taking,
        snapshots: Snapshots,
        changes: WorldHooks,
    ) -> None:
        self._session = session
        self._agreement = agreement
        self._riders = riders
        self._replies = replies
        self._newcomer = newcomer
        self._checkpoints = checkpoints
        self._snapshots = snapshots
        self._changes = changes
        session.before_leaving(self._before_leaving)

    def before_step(self, index: int, *, examined: bool) -> None:
        """What members do before a step: hooks about the world, and copies of the state that are due. examined: the
        state is wanted at once, and on the disk before the step."""
        checkpoints, changes = self._checkpoints, self._changes
        changes.before_step()
        if changes.take_pause():
            checkpoints.before_pause()
        if examined:
            checkpoints.ask()
        taken = checkpoints.before_step(self.moment, index)
        if examined:
            checkpoints.finish()
        self._snapshots.before_step(self.moment, index)
        may_part = changes.may_part(taken) or not checkpoints.takes_any
        if changes.take_wish() or (self._session.parting and not may_part):
            checkpoints.wish()
        self._session.may_part = may_part

    def _before_leaving(self) -> None:
        self._changes.has_left = True
        with randomness_kept():
            self._changes.tell_drain()
        self._checkpoints.finish()

    def moment(self) -> Moment:
        """The place in the script, for a checkpoint."""
        at, agreement = self._session.script.at, self._agreement
        return Moment(
            step=at.step,
            epoch=at.shared_epoch,
            epoch_start=at.epoch_start,
            seed=agreement.seed,
            shards=agreement.shards or 0,
            once=dict(self._replies.of_epoch),
            shared=dict(self._replies.shared),
            data=agreement.data,
            values=self._newcomer.epoch_values,
            reduction=str(self._session.reduction),
            compression=str(self._session.compression),
            outer=str(self._session.outer or "none"),
            stop=None if self._riders.stopped else self._riders.stopping,
        )

    def plan(self) -> Json:
        """What all members of a save() must know alike; one of them says it."""
        place = self._session.place()
        return {
            "step": self._session.script.at.step,
            "call": self._replies.calls,
            "generation": place.generation,
            "members": list(place.members),
            "token": place.token,
        }

    def save(self, series: str, plan: dict[str, Any]) -> None:
        """Write this worker's part of a save()."""
        members, me = tuple(plan["members"]), self._session.worker_id
        rank = members.index(me) if me in members else len(members)
        place = LoopPlace(plan["generation"], rank, members, plan["token"])
        name = EntryName(plan["step"], plan["call"], plan["generation"], plan["token"])
        self._checkpoints.save(series, name, place, self.moment())

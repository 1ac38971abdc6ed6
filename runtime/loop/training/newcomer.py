"""What newcomers are told here, and what this worker does while it is one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

from elastic.checkpoints.manifest import Moment
from elastic.errors import Disagree, JoinMissed
from elastic.protocol.loop_state import CalledEarly, LoadAgain, LoopEntered, LoopState, PassBegun, Standing
from runtime.allreduce.reduction.partial_sum import Json
from runtime.data.random_state import drawn_from
from runtime.guards.refusals import post
from runtime.loop.call_replies import CallReplies
from runtime.loop.training.registered import Registered
from runtime.session import Copy, JoinMeta, Session


class Newcomer:
    """Used by the user's thread only."""

    def __init__(self, session: Session, registered: Registered, replies: CallReplies) -> None:
        self._session = session
        self._registered = registered
        self._replies = replies
        self.data: dict[str, Json] | None = None
        """How the others, or an earlier run, have planned the samples of the epoch in progress."""
        self.epoch_values: dict[str, Json] = {}
        """job.state when this epoch was handed out."""
        self._later: dict[str, Any] | None = None
        """job.state in the step that this worker enters; until the steps of its epoch it is as at the epoch's start."""
        self._meta: JoinMeta | None = None
        self.place_read = False
        """Whether the script has read which step it is in."""
        self._drawn_from: object = None
        """The random generators when a newcomer's step was handed out."""
        self._copy: Copy | None = None
        """The state that was copied between two steps, until it is loaded for the second time."""

    @property
    def _at(self) -> LoopState:
        return self._session.script.at

    def told(self, meta: JoinMeta) -> LoopEntered:
        """A member has told this newcomer where the job stands."""
        replies = self._replies
        self._registered.values.update_from_json(meta.state, self._registered.carrier.place)
        replies.of_epoch, replies.shared, replies.early = dict(meta.once), dict(meta.shared), dict(meta.early)
        self.epoch_values, self.data = dict(meta.values), meta.data
        return LoopEntered(meta.epoch, meta.step, meta.epoch_start)

    def resumed(self, moment: Moment) -> LoopEntered:
        """The job goes on from a checkpoint."""
        self.epoch_values, self.data = dict(moment.values), moment.data
        self._replies.of_epoch = dict(moment.once)
        self._replies.shared = {**moment.shared, **self._replies.shared}
        return LoopEntered(moment.epoch, moment.step, moment.epoch_start, resumed=True)

    def publish(self, data: dict[str, Json] | None, stop: str | None) -> None:
        """A step is handed out: newcomers are told this. data: how the samples of its epoch are planned. stop: as in
        JoinMeta."""
        at, replies = self._at, self._replies
        self._meta = JoinMeta(
            at.shared_epoch,
            at.step,
            at.epoch_start,
            self._registered.values.to_json(packed=True),
            dict(replies.of_epoch),
            dict(replies.shared),
            data,
            dict(replies.early),
            self.epoch_values,
            stop,
        )
        self._session.publish(self._meta)

    def stopping(self, because: str) -> None:
        """The script has called stop(). A newcomer that copies the state may be the only one left to say it."""
        if self._meta is not None:
            self._meta = replace(self._meta, stop=because)
            self._session.publish(self._meta)

    # job.state of another moment

    def begin_epoch(self) -> None:
        """An epoch is handed out: until its steps, job.state is as at its start."""
        values = self._registered.values
        if self._at.elsewhere:
            self._later = values.as_dict()
            values.rewind(self.epoch_values, self._registered.carrier.place)
        else:
            self.epoch_values = values.to_json(packed=True)
        values.begin_early()

    def end_early(self) -> None:
        """The steps of this epoch begin, or none are left: end the early phase of job.state."""
        self._registered.values.end_early()
        if self._later is not None:
            self._registered.values.replace(self._later)
            self._later = None

    # What binds a newcomer to its step

    def handed_out(self) -> None:
        """A step is handed out: what the script does from now on may bind it."""
        self._drawn_from = None if self._at.standing is Standing.MEMBER else drawn_from()
        self.place_read = False
        self._registered.values.forget_reads()

    def begin_pass(self, step: int, number: int) -> None:
        """The script begins this pass. A newcomer's second copy replaces what its script has changed since the
        hand-out: the members had made the same changes. Raises NoGradient, UsageError."""
        read = drew = False
        if number == 0 and self._drawn_from is not None:
            read = self.place_read or self._registered.values.was_read
            drew = self._drawn_from != drawn_from()
        if isinstance(post(self._session.script, PassBegun(step, number, read, drew)), LoadAgain):
            assert self._copy is not None
            self._registered.carrier.load(self._copy.header, self._copy.blobs)
            self._copy = None

    def copy_anew(self) -> None:
        """Copy the state of the pass in progress, because this newcomer ran a step that it was not bound to; the copy's
        step is the next. Raises JoinMissed."""
        self._copy = copy = self._session.copy_anew()
        carrier = self._registered.carrier
        carrier.load(copy.header, copy.blobs)
        self._registered.values.rewind(copy.values, carrier.place)
        self._replies.early |= {key: [copy.op.step, value] for key, value in copy.early.items()}

    # Early calls

    def called_early(self, key: str, step: int, value: Json) -> None:
        """Note an early call, between the hand-out of a step and its first pass: newcomers may need its reply."""
        post(self._session.script, CalledEarly())
        self._replies.keep_early(key, step, value)
        assert self._meta is not None
        self._meta = replace(self._meta, early=dict(self._replies.early))
        self._session.publish(self._meta)

    def recall_early(self, key: str) -> Json:
        """The others' reply to an early call in the step whose state this newcomer has copied. Raises Disagree."""
        assert self._copy is not None
        step = self._at.step
        if key not in self._copy.early:
            raise Disagree(
                f"this newcomer called {key!r} (n-th call, name) before the inner loop of step {step}, the others "
                f"{sorted(self._copy.early)}. Make such calls depend on step.index and job.state only."
            )
        value = self._copy.early[key]
        self.called_early(key, step, value)
        return deepcopy(value)

    def ask_early(self, key: str) -> Json:
        """The others' reply to an early call in the step where they were when this newcomer asked. If that step is
        over, the reply to the same call in a later step will do, because this worker then copies again. Raises
        JoinMissed."""
        step = self._at.step

        def called_in(meta: JoinMeta) -> int:
            return cast(int, meta.early[key][0]) if key in meta.early else -1

        meta = self._session.meta(lambda meta: meta.step > step or called_in(meta) >= step)
        called = called_in(meta)
        if meta.epoch != self._at.shared_epoch or called < step:
            raise JoinMissed(f"step {step} was over before this newcomer had been told what {key!r} gave in it")
        value = meta.early[key][1]
        self.called_early(key, called, value)
        return deepcopy(value)

"""`elastic.Asynchronous`: H inner steps, then the difference goes to a store of parameters among the workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, get_args

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.protocol.local_phase import DROPPED, SCALED, STALENESS, STALENESS_MOST, UPDATES
from runtime.asynchronous.local_training import LocalTraining, Sums
from runtime.asynchronous.member_calls import MemberCalls
from runtime.asynchronous.ownership import cut
from runtime.asynchronous.phase_notes import PhaseSummary
from runtime.asynchronous.piece_copies import LostUpdates, PieceCopies
from runtime.asynchronous.store import MembersNow, ParameterStore, PieceUpdate, Pushed
from runtime.asynchronous.update_rules import DelayedNesterov, Late, PieceState, StalenessBound
from runtime.data.loader import check_number
from runtime.recovery.transfer.connection import CopyConnection
from runtime.session import Session

STALENESS_ROUNDS = 4
"""By default an update may be older than those of so many rounds."""
DROPPED_AGE_S = 1e18
"""The age with which a worker sends an update that every owner has to drop."""


class Asynchronous(LocalTraining):
    """Workers that never wait for each other: each makes H inner steps, sends the difference between the outer
    parameters, from which it began, and its own to a store, and goes on from the store's parameters of that moment
    (Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024), with delayed Nesterov momentum.

    The store is among the workers themselves: each piece of the parameters has a worker that owns it and another one
    that mirrors it. The result depends on the times of the run, so it is not exact.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        every: int,
        lr: float = 0.9,
        momentum: float = 0.5,
        max_staleness: int | None = None,
        max_age_s: float = 600.0,
        late: Late = "drop",
    ) -> None:
        """model: all of it that is trained. inner_optimizer: steps in the body of the inner loop. every: H. lr,
        momentum: of the outer steps; the momentum is renewed once in as many updates as the loader has shards. With the
        0.7 and 0.9 of DiLoCo, updates of stale parameters overshoot.

        max_staleness: how many other updates the parameters may have had since a worker took them; None: four times as
        many as the loader has shards. max_age_s: seconds since then. late: what becomes of an update beyond
        max_staleness, see StalenessBound. Raises ConfigError, NotCarried.
        """
        super().__init__(model, inner_optimizer, every)
        self._lr = check_number("lr", lr, "above 0", lambda one: 0 < one < inf)
        self._momentum = check_number("momentum", momentum, "from 0 to below 1", lambda one: 0 <= one < 1)
        if max_staleness is not None:
            check_number("max_staleness", max_staleness, "of updates, 0 or more, or None", lambda one: one >= 0)
        age_s = check_number("max_age_s", max_age_s, "of seconds above 0", lambda one: one > 0)
        if late not in get_args(Late):
            raise ConfigError(f'late={late!r} must be "drop" or "scale"')
        self._bound = (max_staleness, age_s, late)
        self._ranges = cut(self.flat.elements)
        self._momenta, self._pending = torch.zeros(self.flat.elements), torch.zeros(self.flat.elements)
        self._versions = [0] * len(self._ranges)
        """The version of each piece of the common parameters."""
        self._base = torch.zeros(0)
        """The outer parameters from which this worker has begun its unit."""
        self._bases = [0] * len(self._ranges)
        self._since_s = 0.0
        self._seen: dict[tuple[int, int], int] = {}
        self._fell_back: list[LostUpdates] = []
        self._sums: dict[str, float] = {}
        self._most = 0.0

    def state_dict(self) -> dict[str, Any]:
        tensors = {"momentum": self._momenta, "pending": self._pending}
        return {**super().state_dict(), **tensors, "versions": list(self._versions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["versions"]) != len(self._ranges):
            raise ConfigError(f"a store of {len(state['versions'])} pieces is none of this model")
        super().load_state_dict(state)
        self._momenta.copy_(state["momentum"])
        self._pending.copy_(state["pending"])
        self._versions = list(state["versions"])

    def prepare(self, session: Session, calls: MemberCalls | None, shards: int) -> None:
        updates, age_s, late = self._bound
        rule = DelayedNesterov(self._lr, self._momentum, shards)
        bound = StalenessBound(STALENESS_ROUNDS * shards if updates is None else updates, age_s, late)

        def members() -> MembersNow:
            place = session.place()
            return MembersNow(place.generation, place.members)

        def lost(pieces: Sequence[LostUpdates]) -> None:
            self._fell_back += pieces
            session.note("pieces_fell_back", pieces=[one.piece for one in pieces])

        self._session = session
        self._store = ParameterStore(
            session.worker_id, PieceCopies(session.worker_id, rule, bound), calls, members, lost
        )
        if calls is not None:
            self._store.follow_members()

    # A phase

    def begin_phase(self, phase: int, roster: Sequence[str], *, in_step: bool) -> None:
        start = self.start
        self._seen, self._fell_back, self._sums, self._most = {}, [], {}, 0.0
        self._store.begin(
            phase,
            roster,
            [
                PieceState(start[at], self._momenta[at], self._pending[at], version)
                for at, version in zip(map(_slice, self._ranges), self._versions, strict=True)
            ],
            in_step=in_step,
        )

    def put_back(self, own: torch.Tensor | None) -> None:
        if own is not None:
            self.flat.write(own)
        else:
            self._base, self._bases, self._since_s = self.start.clone(), list(self._versions), time.monotonic()

    def between_steps(self) -> None:
        """Nothing: the store changes while this worker trains, and its own parameters do not."""

    def exchange(self, number: int) -> None:
        own = self.flat.read()
        difference, age_s = self._base - own, time.monotonic() - self._since_s
        if not bool(difference.isfinite().all()):  # it would make the parameters of all workers so
            difference, age_s = torch.zeros_like(own), DROPPED_AGE_S
            self.begin_anew()
        differences = {piece: difference[_slice(at)] for piece, at in enumerate(self._ranges)}
        bases = dict(enumerate(self._bases))
        self._since_s = time.monotonic()
        update = PieceUpdate(number, bases, age_s, differences)
        pushed = self._store.push(update, self._session.leave_if_over)
        for piece, value in pushed.values.items():
            at = _slice(self._ranges[piece])
            own[at] = value
            self._bases[piece] = pushed.marks[piece][1]
        self.flat.write(own)
        self._base = self.flat.read()  # not what bfloat16 has rounded away: it would be part of the next difference
        self._count(update, pushed)

    def _count(self, update: PieceUpdate, pushed: Pushed) -> None:
        for piece, (lineage, version) in pushed.marks.items():
            self._seen[piece, lineage] = version
        counted = {piece: weight for piece, weight in pushed.weights.items() if weight is not None}
        if not counted:
            return
        share = 1 / len(self._ranges)
        stale = [
            max(0, pushed.marks[piece][1] - update.bases[piece] - (weight > 0)) for piece, weight in counted.items()
        ]
        self._most = max(self._most, max(stale))
        for name, value in (
            (UPDATES, len(counted) * share),
            (STALENESS, sum(stale) * share),
            (DROPPED, sum(weight == 0 for weight in counted.values()) * share),
            (SCALED, sum(0 < weight < 1 for weight in counted.values()) * share),
        ):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def end_phase(self, *, in_unit: bool) -> torch.Tensor | None:
        self._store.end_phase()
        return self.flat.read() if in_unit else None

    # Between two phases

    def contribution(self) -> dict[str, list[torch.Tensor]]:
        elements, count = self.flat.elements, len(self._ranges)
        vectors = [torch.zeros(elements) for _ in range(3)]
        present, versions = torch.zeros(count), torch.zeros(count, dtype=torch.float64)
        for piece, held in self._store.owned().items():
            at, state = _slice(self._ranges[piece]), held.state
            for vector, part in zip(vectors, (state.values, state.momentum, state.pending), strict=True):
                vector[at] = part
            present[piece], versions[piece] = 1, state.version
        return {"float32": [*vectors, present], "float64": [versions]}

    def take_sums(self, sums: Sums, workers: int) -> bool:
        elements, count = self.flat.elements, len(self._ranges)
        values, momenta, pending, present = sums["float32"].cpu().split([elements, elements, elements, count])
        if not bool((present == 1).all()):  # an owner has died, and its mirror has said the same or not yet
            return False
        self.flat.write(values)
        self._momenta.copy_(momenta)
        self._pending.copy_(pending)
        self._versions = [int(version) for version in sums["float64"].tolist()]
        return True

    def counts(self) -> dict[str, Any]:
        applied: dict[str, int] = {}
        for held in self._store.owned().values():
            for worker, number in held.applied.items():
                applied[worker] = max(number, applied.get(worker, 0))
        return {"applied": applied, "sums": self._sums, "most": {STALENESS_MOST: self._most}}

    def losses(self) -> dict[str, Any]:
        return {
            "seen": [[piece, lineage, version] for (piece, lineage), version in self._seen.items()],
            "fell_back": [list(one) for one in self._fell_back],
        }

    def settle(self, summary: PhaseSummary) -> dict[str, float]:
        self._store.pause()
        return super().settle(summary)

    def answer(self, connection: CopyConnection, request: Mapping[str, Any]) -> bool:
        return self._store.answer(connection, request)

    def close(self) -> None:
        self._store.close()


def _slice(at: range) -> slice:
    return slice(at.start, at.stop)

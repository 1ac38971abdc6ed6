"""`elastic.Gossip`: H inner steps, then the mean with one other worker; there is no centre.

    {"want": "gossip_mix", "phase", "worker", "number"} + the caller's parameters
        -> {"mixed": true} + those of the worker that is asked, before; {"later": why}

Averaging is asynchronous and decentralised (AD-PSGD, Lian et al. 2018): who is asked does not stop. It answers with its
parameters of the last moment between two of its inner steps, and moves by half of the difference at the next such
moment. So the sum over both stays what it was.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elastic.protocol.local_phase import CONSENSUS, DISTANCE, DROPPED, SKIPPED, UPDATES
from runtime.allreduce.reduction.partial_sum import Json
from runtime.asynchronous.gossip_schedule import partner
from runtime.asynchronous.local_training import LocalTraining, Sums
from runtime.asynchronous.member_calls import MemberCalls, received
from runtime.asynchronous.phase_notes import PhaseSummary
from runtime.asynchronous.update_rules import SlowMomentum
from runtime.data.loader import check_number, check_seed
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.session import Session

ANSWER_S = 5.0
"""Seconds for which a partner is waited for; it answers at once, unless it is frozen or the network is slow."""


def finite(vector: torch.Tensor) -> bool:
    return bool(vector.isfinite().all())


class Mixture:
    """The parameters of one worker, which others may ask for while it trains. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: torch.Tensor | None = None
        """What others see; None: nothing, between two phases."""
        self._owed: torch.Tensor | None = None
        """By how much the parameters will move between two inner steps."""

    def show(self, own: torch.Tensor) -> torch.Tensor:
        """Between two inner steps. own: the parameters, changed in place by what is owed. Returns them."""
        with self._lock:
            self._settle(own)
            self._shown = own.clone()
        return own

    def hide(self, own: torch.Tensor) -> torch.Tensor:
        """As `show`, and nobody sees them from now on."""
        with self._lock:
            self._settle(own)
            self._shown = None
        return own

    def _settle(self, own: torch.Tensor) -> None:
        if self._owed is not None:
            own += self._owed
            self._owed = None

    def asked(self, theirs: torch.Tensor) -> torch.Tensor | None:
        """Another worker averages with this one. Returns what it sees; None: nothing, as there is none, or one of them
        is not finite."""
        with self._lock:
            if self._shown is None or not finite(theirs) or not finite(self._shown):
                return None
            seen = self._shown.clone()
            self._move((theirs - seen) / 2)
            return seen

    def answered(self, sent: torch.Tensor, theirs: torch.Tensor) -> None:
        """This worker has averaged with another one. sent: what that has seen."""
        with self._lock:
            self._move((theirs - sent) / 2)

    def _move(self, by: torch.Tensor) -> None:
        assert self._shown is not None
        self._shown += by
        self._owed = by if self._owed is None else self._owed + by


class Gossip(LocalTraining):
    """Workers that never wait for each other and have no centre: after H inner steps a worker averages its parameters
    with those of one other worker, by a seeded schedule of pairs. A partner that is gone is left out.

    Between two phases, in checkpoints and at the end the model has the mean of all workers' parameters; each goes on
    with its own. The result depends on the times of the run, so it is not exact.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        every: int,
        momentum: float = 0.5,
        seed: int = 0,
    ) -> None:
        """model: all of it that is trained. inner_optimizer: steps in the body of the inner loop. every: H. momentum:
        of a worker over its units, 0 to below 1; see SlowMomentum. It is each worker's own, as is the inner optimizer's
        state. seed: of the schedule. Raises ConfigError, NotCarried."""
        super().__init__(model, inner_optimizer, every)
        check_seed(seed)
        check_number("momentum", momentum, "from 0 (none) to less than 1", lambda one: 0.0 <= one < 1.0)
        self._slow = SlowMomentum(momentum)
        self._seed = seed
        self._mixture = Mixture()
        self._own: torch.Tensor | None = None
        """Its parameters at the end of the phase; None: it has been in none, or they are not finite."""
        self._phase = -1
        self._exchanges = 0
        """How many exchanges this worker has begun in the job: the number of the next one in the schedule."""
        self._heard: dict[str, int] = {}
        self._sums: dict[str, float] = {}
        self._consensus = 0.0

    def prepare(self, session: Session, calls: MemberCalls | None, shards: int) -> None:
        self._session, self._calls = session, calls

    def begin_phase(self, phase: int, roster: Sequence[str], *, in_step: bool) -> None:
        self._phase, self._heard, self._sums = phase, {}, {}

    def put_back(self, own: torch.Tensor | None) -> None:
        if own is not None:
            self.flat.write(own)
            self._slow.pulled(own.clone())
        else:
            self._slow.begin(self.start.clone())
        self._mixture.show(self.flat.read())

    def between_steps(self) -> None:
        own = self.flat.read()
        self._slow.trained(own.clone())
        self._go_to(own)

    def _go_to(self, own: torch.Tensor) -> None:
        """Set the parameters to these, moved by what exchanges that others began have yet to move them."""
        self.flat.write(self._mixture.show(own))
        self._slow.pulled(own)

    def exchange(self, number: int) -> None:
        if not finite(self.flat.read()):
            self.begin_anew()
            self.flat.write(self._mixture.show(self.start.clone()))
            self._slow.begin(self.flat.read())
            self._count({SKIPPED: 1.0, UPDATES: 1.0, DROPPED: 1.0})
            return
        members = self._session.place().members
        other = partner(self._seed, self._exchanges, self._session.worker_id, members)
        self._exchanges += 1
        theirs = self._ask(other, number, members) if other is not None else None
        self._count({SKIPPED: float(theirs is None), UPDATES: 1.0})
        self.between_steps()
        if len(members) > 1:
            self._go_to(self.flat.read() + self._slow.step())
        else:  # one worker alone trains as without gossip, and collects no momentum
            self._slow.begin(self.flat.read())

    def _ask(self, other: str, number: int, members: Sequence[str]) -> torch.Tensor | None:
        """The parameters of the other worker; None: it is gone, or its phase is over."""
        assert self._calls is not None
        self._calls.keep(members)
        sent = self.flat.read()
        me = self._session.worker_id
        try:
            about: dict[str, Json] = {"want": "gossip_mix", "phase": self._phase, "worker": me, "number": number}
            answer, tensors = self._calls.ask("gossip", other, about, [sent], ANSWER_S)
        except CopyFailed as error:
            self._session.note("gossip_skipped", of=other, because=str(error))
            return None
        if "mixed" not in answer or len(tensors) != 1 or tensors[0].numel() != sent.numel():
            return None
        self._mixture.answered(sent, tensors[0])
        self._count({DISTANCE: float(torch.linalg.vector_norm(sent - tensors[0]))})
        return tensors[0]

    def _count(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def end_phase(self, *, in_unit: bool) -> torch.Tensor | None:
        own = self._mixture.hide(self.flat.read())
        self._own = own if finite(own) else None
        if self._own is None:  # this worker goes on with the mean of the others
            self.begin_anew()
        return self._own

    def contribution(self) -> dict[str, list[torch.Tensor]]:
        moved = self._own - self.start if self._own is not None else torch.zeros(self.flat.elements)
        counts = torch.tensor([self._own is not None], dtype=torch.float64)
        return {"float32": [moved], "float64": [moved.double().square().sum().view(1), counts]}

    def take_sums(self, sums: Sums, workers: int) -> bool:
        squares, counted = sums["float64"].tolist()
        mean = sums["float32"].cpu() / max(1.0, counted)
        squares = squares / max(1.0, counted) - float(mean.double().square().sum())
        self._consensus = max(squares, 0.0) ** 0.5
        self.flat.write(self.start + mean)
        return True

    def counts(self) -> dict[str, Any]:
        return {"applied": dict(self._heard), "sums": dict(self._sums), "most": {}}

    def settle(self, summary: PhaseSummary) -> dict[str, float]:
        metrics = {**super().settle(summary), CONSENSUS: self._consensus}
        mixed = metrics.get(UPDATES, 0.0) - metrics.get(SKIPPED, 0.0)
        if DISTANCE in metrics:
            metrics[DISTANCE] /= max(1.0, mixed)
        return metrics

    def answer(self, connection: CopyConnection, request: Mapping[str, Any]) -> bool:
        match request:
            case {"want": "gossip_mix", "phase": int(phase), "worker": str(worker), "number": int(number)}:
                (theirs,) = received(connection, [self.flat.elements])
                mine = self._mixture.asked(theirs) if phase == self._phase else None
                if mine is None:
                    connection.send({"later": f"it is in phase {self._phase}, or between two"})
                else:
                    self._heard[worker] = max(number, self._heard.get(worker, 0))
                    connection.send({"mixed": True}, [mine.view(torch.uint8)])
                return True
        return False

    def close(self) -> None:
        self._mixture.hide(torch.zeros(self.flat.elements))

"""What all workers must have in common: the plan of the job, and the fingerprint of the moment."""

from __future__ import annotations

import json
from collections.abc import Callable

from elastic.checkpoints.manifest import Moment
from elastic.errors import ConfigError
from runtime.allreduce.reduction.partial_sum import Json
from runtime.guards import numerics_fingerprint
from runtime.loop.training.registered import Registered
from runtime.loop.training.step_scope import StepScope, shown
from runtime.session import Session


class Agreement:
    """Used by the user's thread only."""

    def __init__(self, session: Session, registered: Registered, scope: StepScope, seed: int) -> None:
        self._session = session
        self._registered = registered
        self._scope = scope
        self.seed = seed
        self.shards: int | None = None
        self.data: dict[str, Json] | None = None
        """How the samples of this epoch are planned; None: the script draws its own."""
        self.order: Callable[[int], dict[str, Json]] | None = None
        """What differs by epoch, of a framework all of whose epochs are in one loop of the job."""
        self.where: Callable[[], dict[str, str]] = dict
        """Further parts of the fingerprint that say where the script is."""
        self.alike_buffers = True
        """Whether all workers have the same buffers; else each has its own, as under Horovod."""
        self._resumed = False
        """Whether `shards` is that of an earlier run."""
        self._planned: tuple[int | None, int] | None = None

    def plan_steps(self, total: int | None, shards: int) -> None:
        """Journal how many steps the job has (None: a stream decides), and how many shards each step has."""
        if (total, shards) != self._planned:
            self._planned = total, shards
            self._session.note("steps_planned", total=total, shards=shards)

    def claim_shards(self, shards: int) -> None:
        """Set V, which is fixed for the job: every loop and loader must ask for the same. Raises ConfigError."""
        if self.shards not in (None, shards):
            if self._resumed:
                raise _begun_otherwise("shards", self.shards, shards)
            raise ConfigError(
                f"shards={shards} here and shards={self.shards} before; the number of shards is fixed for the whole "
                "job, because it decides the order of every sum"
            )
        self.shards = self._registered.shards = shards
        if self._registered.exponents is not None:
            self._registered.exponents.units = shards

    def plan(self, epoch: int) -> dict[str, Json] | None:
        """What the record of a step says of the data of its epoch."""
        if self.data is None or self.order is None:
            return self.data
        return {**self.data, **self.order(epoch)}

    def check_resumed(self, moment: Moment) -> None:
        """The job goes on from there. Raises ConfigError if the script has changed what decides the bits."""
        if moment.seed != self.seed:
            raise _begun_otherwise("seed", moment.seed, self.seed)
        session = self._session
        for option, old, new in (
            ("--reduction", moment.reduction or session.reduction, session.reduction),
            ("--compression", moment.compression, session.compression),
            ("--outer", moment.outer, str(session.outer or "none")),
        ):
            if old != new:
                raise ConfigError(
                    f"this job was begun with {option} {old}, and goes on with {new}, which has other bits; go on with "
                    "the old one, or start anew with --fresh"
                )
        if moment.shards:
            said, self.shards, self._resumed = self.shards, moment.shards, True
            self.claim_shards(moment.shards if said is None else said)

    def fingerprint(self) -> dict[str, str]:
        """What all workers must have in common now: readable parts, and hashes over some weights and buffers. {}: there
        are no others."""
        session, carrier = self._session, self._registered.carrier
        if session.alone:
            return {}
        step = session.script.at.step
        return {
            "data": json.dumps(self.data, sort_keys=True),
            "reduction": str(session.reduction),
            "compression": str(session.compression),
            **self.where(),
            **numerics_fingerprint.settings(self._registered.device),
            "learning rates": ", ".join(map(repr, carrier.learning_rates())),
            "job.state": shown(json.dumps(self._registered.values.to_json(), sort_keys=True)),
            "weights, rates and job.state": carrier.fingerprint(step),
            "buffers": carrier.buffer_fingerprint(step) if self.alike_buffers else "",
            **self._scope.logged(),
        }


def _begun_otherwise(name: str, old: int | None, new: int) -> ConfigError:
    return ConfigError(
        f"this job was begun with {name}={old}, and the script says {name}={new}; go on with the old one, or start "
        "anew with --fresh"
    )

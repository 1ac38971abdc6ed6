"""`elastic.DiLoCo` and `elastic.LocalSGD`: what a script says about replicas that train by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, get_args

import torch
from torch import nn

from elastic.config import Moments
from elastic.errors import ConfigError, UsageError
from elastic.protocol.outer_round import Quorum
from runtime.data.loader import check_number
from runtime.outer import fragments as cutting
from runtime.outer import traffic
from runtime.outer.replica_rows import ReplicaRows
from runtime.outer.schedule import RoundSchedule


class DiLoCo:
    """Replicas that make H inner steps each, and then one outer step together.

    After H inner steps a replica sends the difference between the outer parameters, with which it began, and its own.
    The mean of these differences is the gradient of the outer optimizer's step (DiLoCo, Douillard et al. 2023,
    algorithm 1). With several fragments, H / P inner steps are followed by the outer step of one fragment, and each
    replica keeps its own parameters (Streaming DiLoCo, Douillard et al. 2025, algorithm 2).
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        fragments: int | Sequence[nn.Module] = 1,
        delay: int = 0,
        alpha: float = 0.0,
        moments: Moments = "own",
    ) -> None:
        """model: all of it that is trained. inner_optimizer: steps in the body of the inner loop. outer_optimizer: of
        the same parameters; None: SGD with learning rate 0.7 and Nesterov momentum 0.9, as in the paper. The job makes
        its steps and registers it.

        every: H. A replica is a shard of the loader, on whichever worker. fragments: modules of the model, each of its
        parameters in one of them, or a number. delay: inner steps between the moment at which a difference is taken and
        the outer step that uses it (tau); meanwhile it is sent. alpha: how much of its own parameters a replica keeps
        at a synchronisation, 0 to 1: alpha times its own and 1 - alpha times the outer ones. moments: "own": each
        replica keeps the state of its inner optimizer; "mean": each begins a round with the mean of the replicas'
        states, which costs fewer bytes; "reset": it begins anew in each round, and is sent nowhere.

        Raises ConfigError for arguments that do not go together.
        """
        self.alpha = check_number(
            "alpha", alpha, "from 0 (outer parameters only) to 1 (none of them)", lambda one: 0.0 <= one <= 1.0
        )
        if moments not in get_args(Moments):
            raise ConfigError(f'moments={moments!r} must be "own", "mean" or "reset"')
        self.model, self.inner_optimizer = model, inner_optimizer
        self.replicas = 0
        """How many there are, from the loop's begin on."""
        self.moments = moments
        self.parameters = cutting.trained(model)
        self.outer_optimizer = outer_optimizer or torch.optim.SGD(self.parameters, lr=0.7, momentum=0.9, nesterov=True)
        known = set(map(id, self.parameters))
        for what, one in (("inner_optimizer", inner_optimizer), ("outer_optimizer", self.outer_optimizer)):
            if not known.issuperset(id(parameter) for group in one.param_groups for parameter in group["params"]):
                raise ConfigError(f"{what} holds a parameter that is no trained one of the model given to DiLoCo")
        if inner_optimizer is self.outer_optimizer:
            raise ConfigError("inner_optimizer and outer_optimizer are the same object; make one for each")
        self.fragments = cutting.cut(self.parameters, fragments)
        self.schedule = RoundSchedule(every, len(self.fragments), delay)
        if moments == "mean" and self.diverges:
            raise ConfigError('moments="mean" is for replicas that begin a round alike: one fragment, and alpha=0')
        self.quorum: Quorum | None = None
        """None: a round waits for all replicas, and its result does not depend on who computes them."""
        self._rows: ReplicaRows | None = None

    def with_quorum(self, min_replicas: int, grace_s: float = 0.0) -> Self:
        """This object, for rounds that wait for no slow or dead worker. The result is not exact any more.

        A replica then is a worker. When min_replicas of them have made all inner steps of a round, and grace_s seconds
        later, the others stop after the inner step that they are in, and all differences are averaged, each by its
        samples. What a worker that dies has done in the round is lost; if fewer workers live than min_replicas, the
        survivors train the replicas of all shards. moments="own": each worker keeps its inner optimizer's state, and a
        newcomer, or a resumed job, begins without one. See outer_round.py.

        Raises ConfigError for other numbers, and for fragments or alpha, with which replicas have parameters of their
        own that a newcomer could not have.
        """
        if self.diverges:
            raise ConfigError("with_quorum() is for replicas that begin a round alike: one fragment, and alpha=0")
        if self._rows is not None:
            raise ConfigError("with_quorum() comes before the loop: make the DiLoCo with it, and register that")
        self.quorum = Quorum(min_replicas, grace_s)
        return self

    @property
    def keeps_moments(self) -> bool:
        """Whether each worker keeps the state of its inner optimizer, and sends it to nobody."""
        return self.quorum is not None and self.moments == "own"

    @property
    def diverges(self) -> bool:
        """Whether replicas have parameters of their own between two rounds."""
        return len(self.fragments) > 1 or self.alpha > 0

    @property
    def rows(self) -> ReplicaRows:
        """What belongs to each replica. Raises UsageError before the loop."""
        if self._rows is None:
            raise UsageError(
                "job.steps(outer=...) was given a DiLoCo that is not registered; job.register(outer=outer)"
            )
        return self._rows

    def describe(self, workers: int) -> str:
        """One line for the user: what a round is, and how many bytes it takes in a world of so many workers."""
        widths = {"float32": 4, "float64": 8}
        row = sum(widths[group] * elements for group, elements in self.rows.elements.items())
        fragment = max(sum(parameter.numel() for parameter in fragment) for fragment in self.fragments)
        summed = traffic.summed_bytes(4 * fragment, row, 1 if self.moments == "mean" else self.replicas)
        sent = traffic.sent_bytes(summed, self.replicas, workers)
        each = f", and a worker of {workers} sends up to {sent / 1e6:.2f} MB" if workers > 1 else ""
        if self.quorum is not None:
            return (
                f"a round = up to {self.replicas} replicas x {self.schedule.inner_steps} inner steps, over when "
                f"{self.quorum.min_replicas} have made them and {self.quorum.grace_s:g} s later; it sums "
                f"{summed / 1e6:.2f} MB{each}"
            )
        return (
            f"a round = {self.replicas} replicas x {self.schedule.inner_steps} inner steps; it sums "
            f"{summed / 1e6:.2f} MB{each}"
        )

    def begin(self, replicas: int) -> None:
        """The loop begins: each replica starts with the parameters and the inner optimizer's state of this moment. From
        here on the inner optimizer has a state in the inner loop only. Raises NotCarried; ConfigError for a quorum of
        more replicas than there are."""
        if self.quorum is not None and self.quorum.min_replicas > replicas:
            raise ConfigError(
                f"min_replicas={self.quorum.min_replicas} of {replicas} replicas: there is at most one for each shard; "
                "give the loader as many shards= as the job may have workers"
            )
        kept = None if self.moments == "reset" or self.keeps_moments else self.inner_optimizer
        self.replicas = replicas
        self._rows = ReplicaRows(
            replicas, self.parameters, kept, own_parameters=self.diverges, shared=self.moments == "mean"
        )
        self.inner_optimizer.state.clear()


def LocalSGD(
    model: nn.Module, inner_optimizer: torch.optim.Optimizer, *, every: int, moments: Moments = "own"
) -> DiLoCo:
    """Replicas whose parameters become their mean after every H inner steps (Stich, "Local SGD converges fast and
    communicates little", 2019): DiLoCo whose outer optimizer is SGD with learning rate 1. Arguments are those of
    DiLoCo. Raises ConfigError."""
    outer = torch.optim.SGD(cutting.trained(model), lr=1.0)
    return DiLoCo(model, inner_optimizer, outer, every=every, moments=moments)

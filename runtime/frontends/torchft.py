"""torchft's names for a script of logical ranks: what its example train_ddp.py uses, with what it means there.

A replica group is a logical rank (see frontends/ddp): `elastic run --ranks N` has N groups of one rank each. torchft
drops a step in which a group was lost; here the step is computed again by those that are left, so should_commit() is
true and no batch is missing. Names and arguments are those of torchft-nightly 2026.10.26.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel
from torch.utils.data import Dataset, distributed

from elastic.errors import ConfigError, NotCarried
from runtime.frontends.ddp.rank_script import RankScript

GROUP, GROUPS = "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"
"""Environment variables of torchft's examples: the number of this replica group, and how many there are."""

NOT_USED = frozenset(
    {
        *("timeout", "quorum_timeout", "connect_timeout", "heartbeat_interval", "max_retries", "quorum_retries"),
        *("store_addr", "store_port", "lighthouse_addr", "port", "hostname"),
        *("checkpoint_transport", "init_sync", "replica_id"),
    }
)
"""Arguments of torchft's Manager about how its groups find and reach each other. The job has ways of its own."""


def tell_script() -> None:
    """Set the environment variables of torchft's examples, in a script of logical ranks. Raises ConfigError if the
    script was started for another number of groups."""
    if (script := RankScript.current()) is None:
        return
    if (told := os.environ.get(GROUPS)) not in (None, str(script.ranks)):
        raise ConfigError(
            f"{GROUPS}={told}, and the job has {script.ranks} ranks: start it with --ranks {told}, or unset {GROUPS}"
        )
    os.environ.update({GROUP: str(script.home), GROUPS: str(script.ranks)})


def _script() -> RankScript:
    if (script := RankScript.current()) is None:
        raise ConfigError(
            "elastic.torchft trains under `elastic run --ranks N`, where N is the number of replica groups; a script "
            "for torchft's own lighthouse imports torchft"
        )
    return script


class Unused:
    """A process group or a transport of torchft's. The job has its own."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Arguments are not looked at."""


class Manager:
    """Counts the steps of the job. To be made before the training loop."""

    def __init__(
        self,
        pg: object,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        **others: object,
    ) -> None:
        """pg, load_state_dict, state_dict, and those of NOT_USED are not used: models and optimizers are copied to
        workers that come later without them. Raises ConfigError for what would train otherwise here than with torchft.
        """
        script = _script()
        # A rank of a group of one may be said.
        alone = {"rank": 0, "world_size": 1}
        refused = {
            name for name, value in others.items() if name not in NOT_USED and value not in (None, alone.get(name))
        }
        if refused:
            raise ConfigError(
                f"elastic.torchft.Manager({', '.join(sorted(refused))}=): leave it out, it is not known here"
            )
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._script = script
        self._step = self._batches = 0
        script.made("manager", self)
        if min_replica_size > 1:
            script.job.print(
                f"elastic: Manager(min_replica_size={min_replica_size}) is not used: say with --min-workers of elastic "
                "run with how many workers training goes on"
            )

    # The state, which newcomers copy and checkpoints have

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "batches_committed": self._batches}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._step, self._batches = state_dict["step"], state_dict["batches_committed"]

    # A step

    def start_quorum(self, *args: object, **kwargs: object) -> None:
        """Do nothing: who computes a step is decided by the job."""

    def should_commit(self, timeout: object = None) -> bool:
        """True: the gradients are those of all groups, whoever was lost. Counts the step in its last turn."""
        if not self._script.holds_back(self, "should_commit"):
            self._step += 1
            self._batches += self._script.ranks
        return True

    def allreduce(self, tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Raise NotCarried. The value of a rank that is lost in the step would be missing in the sum; a gradient has
        all of them, as a pass is computed again."""
        raise NotCarried(
            "elastic.torchft: Manager.allreduce() is not here. Gradients of DistributedDataParallel are the mean of "
            "all groups when optimizer.step() begins: leave the call out. For a number to be shown, write "
            "torch.distributed.all_reduce(), in whose result a group that dies in this step is missing"
        )

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: the job ends with the script."""

    # What a script asks

    def current_step(self) -> int:
        """How many steps are over; the same in all turns of a step, until its optimizer has stepped."""
        return self._step

    def batches_committed(self) -> int:
        """How many batches of all groups were trained."""
        return self._batches

    def num_participants(self) -> int:
        """How many replica groups a step has: all, in each step."""
        return self._script.ranks

    def is_participating(self) -> bool:
        """True: a worker that still copies the state is not asked."""
        return True


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's own, whose gradients are reduced over all logical ranks."""

    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        """kwargs: of torch's class."""
        super().__init__(module, **kwargs)


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer that steps when its manager says so. zero_grad() begins a step, and step() ends it."""

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        # Not super().__init__(): the state, the groups and the hooks are those of the optimizer inside.
        self.manager = manager
        self.optim = optim
        self.defaults = optim.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError(
                "elastic.torchft.Optimizer.step(closure): call backward() in the loop, and step() behind it"
            )
        if self.manager.should_commit():
            self.optim.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def __repr__(self) -> str:
        return f"Optimizer({self.optim!r})"


class DistributedSampler(distributed.DistributedSampler[Any]):
    """The samples of a replica group of one rank."""

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int | None = None,
        num_replica_groups: int | None = None,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        """replica_rank: number of the group; `replica_group_id` before torchft 0.2. num_replica_groups: of the job.
        kwargs: of torch's class. Raises ConfigError for groups of several ranks, and for another number of groups."""
        ranks = _script().ranks
        rank = kwargs.pop("replica_group_id", replica_rank)
        if (group_rank or 0, 1 if num_replicas is None else num_replicas) != (0, 1):
            raise ConfigError(
                f"DistributedSampler(group_rank={group_rank}, num_replicas={num_replicas}): a replica group has one "
                "rank here. Start a script whose groups have several with --restart"
            )
        if num_replica_groups not in (None, ranks):
            raise ConfigError(
                f"DistributedSampler(num_replica_groups={num_replica_groups}), and the job has {ranks} ranks: take the "
                f"number from ${GROUPS}, or start the script with --ranks {num_replica_groups}"
            )
        self.global_rank, self.global_world_size = int(rank or 0), ranks
        super().__init__(dataset, num_replicas=ranks, rank=self.global_rank, **kwargs)

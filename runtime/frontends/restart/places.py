"""Which processes of the script each worker of a round has, and what each of them finds in its environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.protocol.worker_id import node_of


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one process of the script stands in its round. local_rank, local_world: among the processes of its node.
    node, nodes: the number of its node, and how many have processes."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    nodes: int


def places(members: Sequence[str], ranks: int) -> dict[str, list[RankPlace]]:
    """The processes of each worker, in the order of their ranks.

    members: worker ids in rank order. ranks: how many processes there are; 0: each worker has one, with its own rank.
    Otherwise each has as many as another one, or one more, and those of a node have ranks in a row, as under torchrun.
    """
    nodes = list(dict.fromkeys(map(node_of, members)))
    order = sorted(members, key=lambda worker: nodes.index(node_of(worker))) if ranks else list(members)
    each, more = divmod(ranks or len(members), len(members))
    homes = [worker for number, worker in enumerate(order) for _ in range(each + (number < more))]
    of_nodes: dict[str, list[int]] = {}
    for rank, worker in enumerate(homes):
        of_nodes.setdefault(node_of(worker), []).append(rank)
    found: dict[str, list[RankPlace]] = {worker: [] for worker in members}
    for rank, worker in enumerate(homes):
        node = node_of(worker)
        beside = of_nodes[node]
        place = RankPlace(rank, len(homes), beside.index(rank), len(beside), nodes.index(node), len(of_nodes))
        found[worker].append(place)
    return found


def share(me: str, members: Sequence[str]) -> tuple[int, int]:
    """The place of a worker among those of its node, and their number. members: worker ids in rank order."""
    here = [worker for worker in members if node_of(worker) == node_of(me)]
    return here.index(me), len(here)


def environment(place: RankPlace, store: tuple[str, int], job: str, restarts: int, error_file: Path) -> dict[str, str]:
    """The variables that torchrun sets for a script (torch 2.13, LocalElasticAgent._start_workers).

    restarts: generations of the job before this one.
    """
    return {
        "RANK": str(place.rank),
        "ROLE_RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "GROUP_RANK": str(place.node),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(place.world),
        "ROLE_WORLD_SIZE": str(place.world),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts + 1),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }

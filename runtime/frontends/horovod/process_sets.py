"""ProcessSet: a part of the ranks, in worlds of torch.distributed; elsewhere the global set of all ranks only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from runtime.frontends.horovod.interrupts import BadArgument, NotInitialized
from runtime.frontends.horovod.world import RankStanding


class ProcessSet:
    """ranks: those of the set, ascending. It has an id once it was added, by add_process_set() or by
    init(process_sets=)."""

    process_set_id: int | None = None
    group: Any = None
    """The process group of torch.distributed; None: all ranks."""

    standing: Callable[[], RankStanding] | None = None
    """Returns the ranks and sizes of this process; None: the set was not added."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = sorted(int(rank) for rank in ranks)

    @property
    def ranks(self) -> list[int]:
        """Those of the global set are all, and an elastic job may have more or fewer later."""
        if self.process_set_id == 0:
            return list(range(self._known("ranks").size))
        return self._ranks

    def _known(self, what: str) -> RankStanding:
        if self.standing is None:
            raise NotInitialized(
                f"{self}.{what}: the process set was not added; call hvd.add_process_set() on all ranks"
            )
        return self.standing()

    def size(self) -> int:
        """How many ranks it has. Raises NotInitialized before it was added."""
        self._known("size()")
        return len(self.ranks)

    def included(self) -> bool:
        """Whether this rank is in it. Raises NotInitialized before it was added."""
        return self._known("included()").rank in self.ranks

    def rank(self) -> int:
        """The number of this rank in it. Raises BadArgument if it is not in it."""
        own = self._known("rank()").rank
        if own not in self.ranks:
            raise BadArgument(f"rank {own} is not in {self}")
        return self.ranks.index(own)

    def __deepcopy__(self, memo: object) -> ProcessSet:
        """What holds one, as an optimizer, may be copied; ranks are the same ones."""
        return self

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"


class ProcessSets:
    """All of one init(). all_ranks: the global set, whose id is 0."""

    def __init__(self, all_ranks: ProcessSet, standing: Callable[[], RankStanding]) -> None:
        all_ranks.standing, all_ranks.process_set_id = standing, 0
        self._standing = standing
        self._known = {0: all_ranks}
        self._next = 1

    def add(self, wanted: ProcessSet | Sequence[int], *, can_split: bool) -> ProcessSet:
        """All ranks call it with the same set. can_split: whether this world has groups of a part of the ranks. Raises
        BadArgument for a set that cannot be, and one that is there."""
        found = wanted if isinstance(wanted, ProcessSet) else ProcessSet(wanted)
        size = self._standing().size
        outside = [rank for rank in found.ranks if not 0 <= rank < size]
        if outside or not found.ranks or len(set(found.ranks)) < len(found.ranks):
            raise BadArgument(f"{found}: it takes different ranks, at least one of 0..{size - 1}")
        if any(known.ranks == found.ranks for known in self._known.values()):
            raise BadArgument(f"{found}: a set with these ranks is there already; use that one")
        if not can_split:
            raise BadArgument(
                f"{found}: a part of the ranks cannot reduce alone here, as a lost rank goes to another worker. Use "
                "hvd.global_process_set, or start the script with --restart"
            )
        found.group = dist.new_group(found.ranks)
        found.process_set_id, self._next = self._next, self._next + 1
        found.standing = self._standing
        self._known[found.process_set_id] = found
        return found

    def remove(self, which: ProcessSet) -> bool:
        """Whether it was there. All ranks call it. Raises BadArgument for the global set."""
        if which.process_set_id == 0:
            raise BadArgument("hvd.remove_process_set(): the global process set cannot be removed")
        if which.process_set_id is None or self._known.pop(which.process_set_id, None) is None:
            return False
        if which.group is not None and which.group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(which.group)
        which.process_set_id = which.group = which.standing = None
        return True

    def by_id(self) -> dict[int, list[int]]:
        """Id -> ranks."""
        return {number: list(found.ranks) for number, found in self._known.items()}

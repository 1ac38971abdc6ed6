"""A generation as what differs from one that its reader has already.

A list of thousands changes by one member at a time, and everybody has to be told. What all are told is of the size of
the change; what single members have to do (their shares of an interrupted step, whom they copy from) is told to the
agents of those members only. The digest of the whole record, tasks of all included, shows that the right list came out.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.errors import ElasticError
from elastic.protocol.messages import Generation, Laggard, Member, Share
from elastic.protocol.recovery_plan import paces_of

KEPT = 4
"""So many generations, of the highest numbers, an agent keeps for what may be told against them."""


class WrongBase(ElasticError):
    """Ask for the whole list; the one that is here is not the one that was meant."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A member that is new in the list, at its rank there."""

    rank: int
    member: Member


@dataclass(frozen=True, slots=True)
class Delta:
    """head: the generation without members, shares and laggards. digest: of the whole. gone: ranks in the base.
    same_paces: known paces go on with their members; else head has all of them."""

    term: int
    base_number: int
    base_digest: str
    digest: str
    head: Generation
    gone: tuple[int, ...]
    placed: tuple[Placed, ...]
    same_paces: bool


def difference(base: Generation, record: Generation, term: int) -> Delta:
    """Whatever the two are, `applied` makes the record of the base again, with the tasks of nobody."""
    rank_of = {member: rank for rank, member in enumerate(base.members)}
    kept: set[int] = set()
    placed = []
    last = -1
    for rank, member in enumerate(record.members):
        before = rank_of.get(member, -1)
        if before > last:  # those that changed places are taken out and put in again
            kept.add(before)
            last = before
        else:
            placed.append(Placed(rank, member))
    same_paces = record.plan.paces == paces_of(record.ids, base)
    paces = () if same_paces else record.plan.paces
    plan = replace(record.plan, shares=(), laggards=(), paces=paces, all_tasks=record.plan.tasks_digest)
    gone = tuple(rank for rank in range(len(base.members)) if rank not in kept)
    head = replace(record, members=(), plan=plan)
    return Delta(term, base.number, base.digest(), record.digest(), head, gone, tuple(placed), same_paces)


def applied(
    base: Generation, delta: Delta, shares: Iterable[Share] = (), laggards: Iterable[Laggard] = ()
) -> Generation:
    """The record, with these tasks. Raises WrongBase if it is not the one that was meant."""
    if (base.number, base.digest()) != (delta.base_number, delta.base_digest):
        raise WrongBase(f"generation {delta.head.number} is told against another generation {delta.base_number}")
    gone = set(delta.gone)
    members = [member for rank, member in enumerate(base.members) if rank not in gone]
    for placed in delta.placed:
        members.insert(placed.rank, placed.member)
    record = replace(delta.head, members=tuple(members))
    paces = paces_of(record.ids, base) if delta.same_paces else record.plan.paces
    record = replace(record, plan=replace(record.plan, paces=paces))
    if record.digest() != delta.digest or len(paces) not in (0, len(members)):
        raise WrongBase(f"generation {record.number} is not what its leader told of it")
    return replace(record, plan=replace(record.plan, shares=tuple(shares), laggards=tuple(laggards)))


class KeptGenerations:
    """The generations that an agent has been told of, the KEPT highest of them."""

    def __init__(self) -> None:
        self._records: dict[int, Generation] = {}

    @property
    def known(self) -> dict[int, str]:
        """Number -> digest."""
        return {number: record.digest() for number, record in self._records.items()}

    def keep(self, record: Generation) -> None:
        self._records[record.number] = record
        forget(self._records)

    def forget_all(self) -> None:
        self._records = {}

    def made(self, delta: Delta, shares: Iterable[Share], laggards: Iterable[Laggard]) -> Generation:
        """Raises WrongBase where the base is not here, or not as it should be."""
        if (base := self._records.get(delta.base_number)) is None:
            raise WrongBase(
                f"generation {delta.head.number} is told against {delta.base_number}, which is not known here"
            )
        return applied(base, delta, shares, laggards)


def forget(records: dict[int, Generation] | dict[int, str]) -> None:
    """All but the KEPT highest: the reader and the sender agree about what is left."""
    for number in sorted(records)[:-KEPT]:
        del records[number]

"""Who sums what, from the hosts of the members: first within each node, then between nodes.

A node is all members with one host. Flat tensors are cut into slices, equally many for each node, whatever its number
of members, so that each node's network interface carries equally much. A slice has an owner, who computes its sum, and
an aggregator on each node: it gathers the terms of its node's members, adds those that are siblings in the tree, sends
what is left to the owner, and passes the sum on to its node. With n nodes and one term a node, a node so sends
2 * (n - 1) / n bytes per byte, however many members it has. Where all members are on one node, or alone on theirs, this
is the exchange of every member with every other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from runtime.allreduce.reduction.schedule import Fold


@dataclass(frozen=True, slots=True)
class Slice:
    """Ranks. aggregators: by node; the owner is the aggregator of its own node."""

    owner: int
    aggregators: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """node_of: rank -> number of its node; nodes are numbered by their first rank. ranks: node -> its ranks. most: the
    number of slices of the member that aggregates most."""

    node_of: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    slices: tuple[Slice, ...]
    most: int

    def source(self, cut: Slice, rank: int) -> int:
        """Who sends the slice's sum to this rank, which is not the owner."""
        aggregator = cut.aggregators[self.node_of[rank]]
        return cut.owner if rank == aggregator else aggregator

    def recipients(self, cut: Slice, rank: int) -> tuple[int, ...]:
        """To whom this rank sends the slice's sum when it has it."""
        node = self.node_of[rank]
        if cut.aggregators[node] != rank:
            return ()
        near = tuple(other for other in self.ranks[node] if other != rank)
        if cut.owner != rank:
            return near
        return near + tuple(other for other in cut.aggregators if other != rank)


@lru_cache(maxsize=64)
def topology(hosts: tuple[str, ...]) -> Topology:
    """hosts: of the members, in rank order."""
    numbers: dict[str, int] = {}
    node_of = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
    ranks = tuple(tuple(r for r, node in enumerate(node_of) if node == number) for number in range(len(numbers)))
    columns = max(map(len, ranks))
    slices = []
    for members in ranks:
        for column in range(columns):
            aggregators = tuple(others[column % len(others)] for others in ranks)
            slices.append(Slice(members[column % len(members)], aggregators))
    aggregated = Counter(rank for cut in slices for rank in cut.aggregators)
    return Topology(node_of, ranks, tuple(slices), max(aggregated.values()))


@dataclass(frozen=True, slots=True)
class NodeFolds:
    """What is added within one node. terms: positions, among all terms, of those of its members. folds: over these.
    leave: positions, among these and their folds, of the values that leave the node."""

    terms: tuple[int, ...]
    folds: tuple[Fold, ...]
    leave: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """The folds of a reduction, by where they are computed."""

    nodes: tuple[NodeFolds, ...]
    _folds: tuple[Fold, ...]
    _places: tuple[int, ...]
    """For each term and fold, the number of the node that computes it; -1: several nodes."""

    def at_owner(self, node: int) -> tuple[Fold, ...]:
        """The folds of an owner on this node: over the terms of its node, then what leaves each other node, in order of
        nodes; the last fold is the sum."""
        own = self.nodes[node]
        position = {term: number for number, term in enumerate(own.terms)}
        for number, other in enumerate(self.nodes):
            if number != node:
                values = self._values(number)
                for leaving in other.leave:
                    position[values[leaving]] = len(position)
        terms, inputs = len(self._places) - len(self._folds), len(position)
        folds: list[Fold] = []
        for number, (left, right) in enumerate(self._folds, terms):
            if self._places[number] in (node, -1):
                position[number] = inputs + len(folds)
                folds.append((position[left], position[right]))
        return tuple(folds)

    def _values(self, node: int) -> list[int]:
        """The positions, among all terms and folds, of the node's terms and folds."""
        terms = len(self._places) - len(self._folds)
        within = [number for number in range(terms, len(self._places)) if self._places[number] == node]
        return [*self.nodes[node].terms, *within]


def divide(folds: Sequence[Fold], nodes: Sequence[int], adds: Sequence[bool]) -> Division:
    """Divide the folds over terms whose members are on these nodes. adds: for each node, whether its aggregators add
    before they send; a member that is alone on its node sends its terms as they are."""
    places = list(nodes)
    for left, right in folds:
        place = places[left] if places[left] == places[right] else -1
        places.append(place if place >= 0 and adds[place] else -1)
    leaving: set[int] = {len(places) - 1} if places else set()
    for number, (left, right) in enumerate(folds, len(nodes)):
        if places[number] == -1:
            leaving |= {left, right}
    found = []
    for node in range(len(adds)):
        values = [number for number, place in enumerate(places) if place == node]
        position = {value: at for at, value in enumerate(values)}
        found.append(
            NodeFolds(
                tuple(value for value in values if value < len(nodes)),
                tuple(
                    (position[left], position[right])
                    for number, (left, right) in enumerate(folds, len(nodes))
                    if places[number] == node
                ),
                tuple(position[value] for value in values if value in leaving),
            )
        )
    return Division(tuple(found), tuple(folds), tuple(places))

"""A seeded schedule of pairs: it says which two of the living members average their parameters, without a centre.

The n-th exchange of a worker follows the n-th matching of the members: a random order, drawn from (seed, n), of which
neighbours are pairs. Workers come to their n-th exchange at different times, so each of a pair calls the other when it
is there itself. Whoever knows the same members knows the same pairs, and no worker has to be asked.

Over many matchings each pair occurs equally often, so the graph of the exchanges is connected, as AD-PSGD wants it
(Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", 2018).
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random


def matching(seed: int, number: int, members: Collection[str]) -> list[tuple[str, str]]:
    """The pairs of a matching. Of an odd number of members one has no partner."""
    drawn = sorted(members)
    Random(f"gossip {seed} {number}").shuffle(drawn)
    return list(zip(drawn[::2], drawn[1::2], strict=False))


def partner(seed: int, number: int, me: str, members: Collection[str]) -> str | None:
    """With whom this worker makes its exchange with that number. None: with nobody.

    members: those that live. If a partner has died, the matching of the others is another one, so who is left finds
    another partner the next time that it asks.
    """
    for first, second in matching(seed, number, members):
        if me == first:
            return second
        if me == second:
            return first
    return None

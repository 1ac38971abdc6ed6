"""The invariants: pure functions of a history, each of which says true, false with a counterexample, unknown, or
not applicable. Numbers are stable.

    history.py      what a run has left behind, as values
    verdict.py      what a checker says
    generations.py  I1 to I4: who is a member, by whose word
    ledgers.py      I5 to I10: every step once, the same bits
    recovery.py     I11 to I13, I15, I16: found in time, back in time
    durability.py   I14: a needed checkpoint is whole
    rounds.py       I17 to I20: of a job in rounds, in place of those that speak of steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chaos_tests.checkers import durability, generations, ledgers, recovery, rounds
from chaos_tests.checkers.history import History
from chaos_tests.checkers.verdict import CheckerVerdict, Truth, unknown

__all__ = ["INVARIANTS", "ROUNDS_INVARIANTS", "CheckerVerdict", "Invariant", "Judgement", "Truth", "judge"]


@dataclass(frozen=True, slots=True)
class Invariant:
    """number: as in "I7". name: for people."""

    number: str
    name: str
    check: Callable[[History], CheckerVerdict]


@dataclass(frozen=True, slots=True)
class Judgement:
    invariant: Invariant
    verdict: CheckerVerdict


INVARIANTS = (
    Invariant("I1", "one owner of a generation", generations.one_owner),
    Invariant("I2", "members agree on the world", generations.agreement),
    Invariant("I3", "ranks follow seniority", generations.ranks),
    Invariant("I4", "fencing", generations.fencing),
    Invariant("I5", "every step once, in order", ledgers.total_order),
    Invariant("I6", "replicas are equal", ledgers.replicas),
    Invariant("I7", "generations continue each other", ledgers.continuity),
    Invariant("I8", "every sample exactly once", ledgers.exactly_once),
    Invariant("I9", "batch and learning rate", ledgers.global_batch),
    Invariant("I10", "the same bits as the quiet run", ledgers.same_maths),
    Invariant("I11", "losses are detected in time", recovery.detection),
    Invariant("I12", "steps go on", recovery.liveness),
    Invariant("I13", "survivors keep their process", recovery.survivors),
    Invariant("I14", "checkpoints are whole", durability.durability),
    Invariant("I15", "nothing is left behind", recovery.cleanliness),
    Invariant("I16", "faults were injected and seen", recovery.really_injected),
)

OF_STEPS = frozenset({"I5", "I6", "I7", "I8", "I9", "I10", "I12", "I14"})
"""A job in rounds has no ledger, no digest and no checkpoints of ours."""

ROUNDS_INVARIANTS = (
    *(invariant for invariant in INVARIANTS if invariant.number not in OF_STEPS),
    Invariant("I17", "a round is its generation", rounds.worlds),
    Invariant("I18", "one script of a worker at a time", rounds.one_script),
    Invariant("I19", "rounds go on", rounds.liveness),
    Invariant("I20", "what is kept is not lost", rounds.kept),
)


def judge(history: History, invariants: tuple[Invariant, ...] = ()) -> tuple[Judgement, ...]:
    """What every checker says. One that fails says unknown, never true. invariants: (): those of such a job."""
    invariants = invariants or (ROUNDS_INVARIANTS if history.rounds else INVARIANTS)
    return tuple(Judgement(invariant, _ask(invariant, history)) for invariant in invariants)


def _ask(invariant: Invariant, history: History) -> CheckerVerdict:
    try:
        return invariant.check(history)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        return unknown(f"the checker cannot read this history: {type(error).__name__}: {error}")

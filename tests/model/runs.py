"""Which models are searched, with which sizes, and what each search has to show."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    model: str
    switches: str
    found: str = ""
    """The claim that has to be violated; empty: none may be, and the search is exhaustive."""
    ltl: str = ""
    """The formula to search for cycles that violate it, under weak fairness; empty: assertions are checked."""


CLAIMS = (
    Run("fence", ""),
    Run("step", "CRASHES=2 SILENT=1 LEADERS=1 QUIESCES=1"),
    Run("step", "JOIN CRASHES=2 LEADERS=1 QUIESCES=1"),
    Run("step", "JOIN CRASHES=1 SILENT=2 LEADERS=1 QUIESCES=1"),
    Run("changes", "MEMBERS=5 CRASHES=2"),
    Run("changes", "MEMBERS=5 CRASHES=1 LEADERS=1"),
    Run("changes", "MEMBERS=5 CRASHES=1 QUIESCES=1 TAKEN_BACK=1"),
    Run("changes", "MEMBERS=5 LEADERS=1 TAKEN_BACK=1"),
    Run("changes", "MEMBERS=7"),
    Run("changes", "MEMBERS=7 CRASHES=1 RINGS_UP DRAINER=0"),
    Run("changes", "MEMBERS=5 NEVER_COPIED RINGS_UP", ltl="drained_leaves"),
    Run("changes", "MEMBERS=5 NEVER_COPIED RINGS_UP QUIESCES=1", ltl="drained_leaves"),
    Run("changes", "MEMBERS=5 NEVER_COPIED RINGS_UP LEADERS=1", ltl="drained_leaves"),
    Run("changes", "MEMBERS=5 LINGER RINGS_UP LEADERS=1", ltl="newcomer_joins"),
)

PLANTED = (
    Run("fence", "NO_TERM_COMPARED", found="term"),
    Run("fence", "NO_NUMBER_COMPARED", found="once"),
    Run("fence", "TELLS_UNREAD", found="same"),
    Run("step", "NO_PROOF JOIN SILENT=2 QUIESCES=1", found="fence"),
    Run("step", "STALE_REPORT CRASHES=1", found="plan"),
    Run("step", "APPLIED_ONLY QUIESCES=1", found="plan"),
    Run("step", "RUNNING_IS_MOVED CRASHES=1", found="sum"),
    Run("step", "OLD_ROOTS CRASHES=1", found="sum"),
    Run("step", "RESULT_FREED CRASHES=1", found="source"),
    Run("step", "ADOPTS_ABORTED CRASHES=1 LEADERS=1", found="stuck"),
    Run("changes", "MEMBERS=5 NO_KEEP_RULE LEADERS=1", found="newest"),
    Run("changes", "MEMBERS=5 NO_KEEP_RULE NO_NEWEST_CLAIM LEADERS=1", found="kept"),
    Run("changes", "MEMBERS=5 EARLY_IS_NEWEST LEADERS=1", found="kept"),
    Run("changes", "MEMBERS=5 UPDATES_HEADER", found="agree"),
    Run("changes", "MEMBERS=5 JOIN_UNHELD", found="stuck"),
    Run("changes", "MEMBERS=5 GIVES_UP", found="stuck"),
    Run("changes", "MEMBERS=5 LEAVE_AT_ONCE", found="stuck"),
    Run("changes", "MEMBERS=5 NEVER_COPIED RINGS_UP NO_EARLY", found="drained_leaves", ltl="drained_leaves"),
    Run(
        "changes", "MEMBERS=5 NEVER_COPIED RINGS_UP LEADERS=1 EARLY_ONCE", found="drained_leaves", ltl="drained_leaves"
    ),
    Run("changes", "MEMBERS=5 NEVER_COPIED RINGS_UP", found="newcomer_joins", ltl="newcomer_joins"),
)

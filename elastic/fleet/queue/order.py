"""The order of a fleet's jobs: each gets slots before those behind it, and may take the slots of those behind it.

Jobs within the quota of their owner come first, then jobs of higher priority, then those that were submitted earlier.
A job that was preempted keeps the age that it had. An owner's jobs use the quota in their own order, each with its
`min_workers`. Where there are no quotas, all jobs are alike in that; where there are some, an owner without one has 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastic.fleet.documents import FleetJob


def ordered(jobs: Iterable[FleetJob], quotas: Mapping[str, int]) -> list[FleetJob]:
    """The jobs, first those that come first."""
    ranked = sorted(jobs, key=lambda job: (-job.spec.priority, job.since))
    within = within_quota(ranked, quotas)
    return sorted(ranked, key=lambda job: job.name not in within)  # sorting keeps the order of equals


def within_quota(ranked: Sequence[FleetJob], quotas: Mapping[str, int]) -> frozenset[str]:
    """The names of the jobs whose `min_workers` are within the quotas of their owners. ranked: by priority and age. A
    job that is stopping needs no quota; one that does not fit into what is left of it leaves it to those behind."""
    left, within = dict(quotas), set()
    for job in ranked:
        least = job.spec.min_workers
        if not quotas:
            within.add(job.name)
        elif job.stop is None and left.get(job.account, 0) >= least:
            left[job.account] -= least
            within.add(job.name)
    return frozenset(within)


def beyond_quota(held: Mapping[str, int], quotas: Mapping[str, int]) -> dict[str, int]:
    """Owner -> how many slots it holds beyond its quota, if any. held: owner -> slots."""
    if not quotas:
        return {}
    over = {owner: slots - quotas.get(owner, 0) for owner, slots in held.items()}
    return {owner: slots for owner, slots in over.items() if slots > 0}

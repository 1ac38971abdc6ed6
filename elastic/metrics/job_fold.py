"""What a job's journals, ledger and status mean for its metrics, line after line. Reads no clock and no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from elastic.metrics.catalogue import (
    CHECKPOINT_KINDS,
    CHECKPOINT_OUTCOMES,
    JOB_STATES,
    OUTER_OUTCOMES,
    RECOVERY_KINDS,
    UPDATE_OUTCOMES,
)
from elastic.metrics.metric_registry import MetricRegistry
from elastic.metrics.time_spent import TimeSpent
from elastic.protocol import local_phase, outer_round
from elastic.records.events.table import ROWS
from elastic.records.journal import PHASES, Line, Recoveries
from elastic.records.ledger_tail import samples_of

EVENTS = tuple(row.name for row in ROWS if row.feeds)
"""All events that matter here; most journal lines are others."""

LEADERS_PHASES = ("abort", "decide", "build")


def show_status(registry: MetricRegistry, job: str, status: Mapping[str, Any] | None) -> None:
    """Show what `elastic status --json` says of a job; None: nobody leads it now."""
    state = str(status["state"]) if status is not None else "unknown"
    for other in JOB_STATES:
        registry.put("elastic_job_state", other == state, job, other)
    registry.take_back("elastic_job_awaited_rank", job)
    registry.put("elastic_leader", status is not None and state != "closed", job)
    if status is None:
        return
    registry.put("elastic_job_generation", status["generation"], job)
    registry.put("elastic_job_members", len(status["members"]), job)
    registry.put("elastic_job_spares", len(status.get("spares", ())), job)
    registry.put("elastic_job_stragglers", len(status.get("stragglers", ())), job)
    ranks = {member["worker_id"]: member["rank"] for member in status["members"]}
    for worker_id in ranks.keys() & status.get("held_up_by", {}).keys():
        registry.put("elastic_job_awaited_rank", 1, job, str(ranks[worker_id]))
    if "wanted" in status:
        registry.put("elastic_job_members_wanted", status["wanted"], job)


class JobFold:
    """Takes everything that is written about one job since this process began, by time, and puts it into the registry.

    leader_only: the journals are those of a replica alone. Times are monotonic seconds, those of `notes` wall-clock.
    """

    events = EVENTS

    def __init__(self, registry: MetricRegistry, job: str, *, leader_only: bool = False) -> None:
        self._registry = registry
        self._job = job
        self._recoveries = Recoveries(leader_only=leader_only)
        self._phases = LEADERS_PHASES if leader_only else PHASES
        self._generation = 0
        self._completed: dict[str, float] = {}
        """Kind -> wall-clock time of its newest complete checkpoint."""
        self._notices: dict[tuple[str, str], float] = {}
        """(who, source) -> wall-clock time at which this machine goes."""
        self._thin = 0
        """Parts of the state that one machine alone has in memory."""
        self._spent = TimeSpent()
        self._applied = 0
        self._stepped_s: float | None = None
        self._resumed = False

    def begin(self) -> None:
        """Show counters at 0, as Prometheus sees no increase in a counter that begins with another value."""
        for kind in RECOVERY_KINDS:
            self._registry.add("elastic_recoveries_total", 0, self._job, kind)
        if self._phases is LEADERS_PHASES:
            return
        for name in ("job_steps", "job_samples", "steps_redone", "workers_started", "workers_ended"):
            self._registry.add(f"elastic_{name}_total", 0, self._job)
        for kind, outcome in product(CHECKPOINT_KINDS, CHECKPOINT_OUTCOMES):
            self._registry.add("elastic_checkpoints_total", 0, self._job, kind, outcome)

    def see(self, line: Line) -> None:
        """Take a line of a journal."""
        match line:
            case {"event": "published", "generation": int(number), "kind": str(kind)}:
                if self._generation or kind != "form":
                    kind = "resume" if kind == "form" else kind
                    self._registry.add("elastic_recoveries_total", 1, self._job, kind)
                self._generation = number
            case {"event": "committed", "members": list(members)}:
                for rank in range(len(members)):
                    self._registry.add("elastic_job_hangs_total", 0, self._job, str(rank))
            case {"event": "member_lost", "hung": True, "rank": int(rank)}:
                self._registry.add("elastic_job_hangs_total", 1, self._job, str(rank))
            case {"event": "worker_started"}:
                self._registry.add("elastic_workers_started_total", 1, self._job)
            case {"event": "worker_exited"}:
                self._registry.add("elastic_workers_ended_total", 1, self._job)
            case {"event": "notice", "source": str(source), "who": str(who), "seconds_left": float() | int() as left_s}:
                self._notices[who, source] = line["t_wall"] + left_s
            case {"event": "notice_over", "source": str(source), "who": str(who)}:
                self._notices.pop((who, source), None)
            case {"event": "kept_found"}:
                self._show_thin(0)
            case {"event": "kept_thin", "parts": int(parts)}:
                self._show_thin(self._thin + parts)
            case {"event": str(event)} if event.startswith(("checkpoint_", "snapshot_")):
                self._see_checkpoint(line, *event.split("_", 1))
            case {"event": "refused", "at": str()}:
                show_refusal(self._registry, line)
        told = self._recoveries.see(line)
        self._spent.see(line, told)
        if told is not None:
            for phase in self._phases:
                self._registry.observe("elastic_recovery_seconds", told[f"{phase}_ms"] / 1e3, 1, self._job, phase)

    def _show_thin(self, parts: int) -> None:
        self._thin = parts
        self._registry.put("elastic_kept_thin_parts", parts, self._job)

    def _see_checkpoint(self, line: Line, kind: str, outcome: str) -> None:
        self._registry.add("elastic_checkpoints_total", 1, self._job, kind, outcome)
        if outcome == "complete":
            self._completed[kind] = line["t_wall"]
            self._registry.put("elastic_checkpoint_bytes", line.get("bytes", 0), self._job, kind)

    def resumed(self, redone: Sequence[int] | None) -> None:
        """The job goes on from a checkpoint. redone: first and last step that are done again, or None."""
        self._registry.add("elastic_recoveries_total", 1, self._job, "resume")
        if redone is not None:
            self._registry.add("elastic_steps_redone_total", redone[1] - redone[0] + 1, self._job)
        self._spent.run_begins(0 if redone is None else redone[1] - redone[0] + 1)
        self._recoveries.end()
        self._generation, self._resumed = 0, True

    def applied(self, lines: Iterable[Line], now_s: float) -> None:
        """Take the new lines of the ledger; a step of a resumed job that the ledger has already has none."""
        steps = list(lines)
        if not steps:
            return
        if self._stepped_s is not None and not self._resumed:
            took_s = (now_s - self._stepped_s) / len(steps)
            self._registry.observe("elastic_job_step_seconds", took_s, len(steps), self._job)
        self._stepped_s, self._resumed = now_s, False
        self._applied += len(steps)
        self._registry.add("elastic_job_steps_total", len(steps), self._job)
        self._registry.add("elastic_job_samples_total", sum(map(samples_of, steps)), self._job)
        self._registry.put("elastic_job_step", steps[-1]["step"], self._job)
        self._see_rounds([told for step in steps if (told := outer_round.told_of(step))])
        self._see_phases([told for step in steps if (told := local_phase.told_of(step))])

    def _see_rounds(self, rounds: Sequence[Mapping[str, float]]) -> None:
        """Take new steps that were rounds of replicas."""
        if not rounds:
            return
        self._registry.put("elastic_outer_drift", rounds[-1]["drift"], self._job)
        self._registry.add("elastic_outer_steps_total", len(rounds), self._job)
        self._registry.add("elastic_outer_summed_bytes_total", sum(told["summed_bytes"] for told in rounds), self._job)
        for told in rounds:
            for outcome in OUTER_OUTCOMES if "replicas" in told else ():
                count = told["replicas"] - told["late"] if outcome == "whole" else told[outcome]
                self._registry.add("elastic_outer_replicas_total", count, self._job, outcome)

    def _see_phases(self, phases: Sequence[Mapping[str, float]]) -> None:
        """Take new steps that were phases of training without waiting."""
        for told in phases:
            counts = (local_phase.applied_of(told), told.get("scaled", 0.0), told.get("dropped", 0.0))
            for outcome, count in zip(UPDATE_OUTCOMES, (*counts, told["lost_updates"]), strict=True):
                self._registry.add("elastic_async_updates_total", count, self._job, outcome)
            self._registry.add("elastic_async_pieces_fell_back_total", told.get("pieces_fell_back", 0.0), self._job)
            for of, name in (("mean", "staleness"), ("max", "staleness_max")):
                if name in told:
                    self._registry.put("elastic_async_staleness", told[name], self._job, of)
            if "consensus" in told:
                self._registry.put("elastic_async_consensus", told["consensus"], self._job)

    def tick(self, now_s: float, now_wall: float) -> None:
        """Show what changes by itself."""
        for kind, at in self._completed.items():
            self._registry.put("elastic_checkpoint_age_seconds", max(0.0, now_wall - at), self._job, kind)
        if self._notices:
            left_s = max(0.0, min(self._notices.values()) - now_wall)
            self._registry.put("elastic_notice_seconds_left", left_s, self._job)
        else:
            self._registry.take_back("elastic_notice_seconds_left", self._job)
        goodput = self._spent.document(now_wall, self._applied)["goodput"]
        if goodput is not None and self._phases is PHASES:
            self._registry.put("elastic_job_goodput_ratio", goodput, self._job)


def show_refusal(registry: MetricRegistry, line: Line) -> None:
    """Count a line `refused`. times: how many callers it stands for."""
    registry.add("elastic_refusals_total", int(line.get("times", 1)))

"""Every metric: its name, type, labels and meaning. docs/metrics.md shows the same table; a test compares both.

Labels are bounded: jobs that are over are forgotten, and no label names a worker, whose incarnations have no end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """buckets: the upper bounds of a histogram, in seconds."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


JOB = "elastic_job"
"""The label of a job's name. Not `job`, which Prometheus sets itself to the name of its scrape configuration."""

JOB_STATES = ("starting", "forming", "running", "quiescing", "rebuilding", "paused", "closing", "closed", "unknown")
"""unknown: nobody leads the job now; training goes on."""

RECOVERY_KINDS = ("loss", "planned", "resume")
CHECKPOINT_KINDS = ("checkpoint", "snapshot")
CHECKPOINT_OUTCOMES = ("complete", "failed", "skipped")
OUTER_OUTCOMES = ("whole", "late", "lost")
UPDATE_OUTCOMES = ("applied", "scaled", "dropped", "lost")

STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RECOVERY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
ETCD_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

CATALOGUE = (
    Metric("elastic_job_state", _GAUGE, (JOB, "state"), "1 for the state the job is in, 0 for all others"),
    Metric("elastic_job_generation", _GAUGE, (JOB,), "Number of the newest generation"),
    Metric("elastic_job_members", _GAUGE, (JOB,), "Workers that take part now"),
    Metric("elastic_job_members_wanted", _GAUGE, (JOB,), "Workers that the job is to have"),
    Metric("elastic_job_spares", _GAUGE, (JOB,), "Newcomers for which the world has no place yet"),
    Metric("elastic_job_stragglers", _GAUGE, (JOB,), "Members that are much slower than the others"),
    Metric(
        "elastic_job_awaited_rank",
        _GAUGE,
        (JOB, "rank"),
        "1 for each rank for which the others wait, and for all ranks if no member makes progress; else no value",
    ),
    Metric(
        "elastic_job_hangs_total",
        _COUNTER,
        (JOB, "rank"),
        "Members that were given up because they were stopped, silent or stuck, by the rank that they had",
    ),
    Metric("elastic_leader", _GAUGE, (JOB,), "1 where a leader of the job answers this process, or is this process"),
    Metric("elastic_job_step", _GAUGE, (JOB,), "Number of the newest applied step; also after a resume"),
    Metric("elastic_job_steps_total", _COUNTER, (JOB,), "Applied steps, each once"),
    Metric("elastic_job_samples_total", _COUNTER, (JOB,), "Samples that applied steps have used"),
    Metric(
        "elastic_job_step_seconds",
        _HISTOGRAM,
        (JOB,),
        "Time from one applied step to the next; for steps that end within one second their mean",
        STEP_BUCKETS,
    ),
    Metric("elastic_outer_steps_total", _COUNTER, (JOB,), "Outer steps of replicas that average seldom (outer=)"),
    Metric(
        "elastic_outer_drift",
        _GAUGE,
        (JOB,),
        "How far replicas were from their mean before the newest outer step, root of the mean square",
    ),
    Metric("elastic_outer_summed_bytes_total", _COUNTER, (JOB,), "Tensors that outer steps have summed"),
    Metric(
        "elastic_outer_replicas_total",
        _COUNTER,
        (JOB, "outcome"),
        "With a quorum: replicas that made all inner steps (whole), stopped early (late), or died (lost)",
    ),
    Metric(
        "elastic_async_updates_total",
        _COUNTER,
        (JOB, "outcome"),
        "Without waiting: updates that counted whole (applied), counted in part or not at all for their age (scaled, "
        "dropped), or went with workers (lost)",
    ),
    Metric(
        "elastic_async_staleness",
        _GAUGE,
        (JOB, "of"),
        "Updates of others while a worker made its own, in the newest phase: mean and max",
    ),
    Metric(
        "elastic_async_pieces_fell_back_total",
        _COUNTER,
        (JOB,),
        "Pieces of the parameters of which owner and mirror were lost together",
    ),
    Metric(
        "elastic_async_consensus",
        _GAUGE,
        (JOB,),
        "With gossip: how far workers were from their mean at the end of the newest phase, root of the mean square",
    ),
    Metric("elastic_steps_redone_total", _COUNTER, (JOB,), "Finished steps that a resume computes again"),
    Metric(
        "elastic_recoveries_total",
        _COUNTER,
        (JOB, "kind"),
        "New generations after the first: kind loss (members were lost), planned (a join, a drain or speed), resume "
        "(every copy of the state was lost)",
    ),
    Metric(
        "elastic_recovery_seconds",
        _HISTOGRAM,
        (JOB, "phase"),
        "Time of a loss: phases detect, abort, decide, build, sync and redo; a replica sees abort, decide and build",
        RECOVERY_BUCKETS,
    ),
    Metric(
        "elastic_job_goodput_ratio",
        _GAUGE,
        (JOB,),
        "Part of the time since the job first trained, without times between runs, that went neither into losses, "
        "pauses and resumes nor into steps done again",
    ),
    Metric(
        "elastic_checkpoints_total",
        _COUNTER,
        (JOB, "kind", "outcome"),
        "Checkpoints and snapshots: kind checkpoint or snapshot; outcome complete, failed or skipped",
    ),
    Metric("elastic_checkpoint_age_seconds", _GAUGE, (JOB, "kind"), "Time since the newest one was complete"),
    Metric("elastic_checkpoint_bytes", _GAUGE, (JOB, "kind"), "Size of the newest complete one"),
    Metric(
        "elastic_kept_thin_parts",
        _GAUGE,
        (JOB,),
        "With elastic.keep: parts of the state that one of several machines alone has in memory, in the newest round",
    ),
    Metric("elastic_workers_started_total", _COUNTER, (JOB,), "Processes of workers that were started"),
    Metric("elastic_workers_ended_total", _COUNTER, (JOB,), "Processes of workers that have ended, in any way"),
    Metric(
        "elastic_notice_seconds_left",
        _GAUGE,
        (JOB,),
        "Time until this machine is taken away; no value without a notice",
    ),
    Metric("elastic_refusals_total", _COUNTER, (), "Calls and connections that this process, or a job's, has refused"),
    Metric(
        "elastic_certificate_days_left",
        _GAUGE,
        ("certificate",),
        "Days until a certificate ends that this process shows, by its file",
    ),
    Metric("elastic_fleet_leader", _GAUGE, ("replica",), "1 on the replica that leads the fleet, 0 on the others"),
    Metric(
        "elastic_fleet_jobs",
        _GAUGE,
        ("state",),
        "Jobs by state: waits (the queue), placed, stopping, ended; leader only",
    ),
    Metric("elastic_fleet_nodes", _GAUGE, ("state",), "Nodes by state: up, leaving, away; leader only"),
    Metric("elastic_fleet_slots", _GAUGE, ("use",), "Slots of all nodes that are up, by use: taken, free; leader only"),
    Metric(
        "elastic_etcd_seconds",
        _HISTOGRAM,
        (),
        "Time in which etcd gave a replica all documents, every two seconds",
        ETCD_BUCKETS,
    ),
    Metric("elastic_metrics_failures_total", _COUNTER, (), "Reads that failed: the metrics may be old"),
)

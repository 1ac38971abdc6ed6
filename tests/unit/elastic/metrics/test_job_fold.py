"""What a job's lines mean for its metrics: events in, the text of a scrape out."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from elastic.metrics.job_fold import JobFold, show_status
from elastic.metrics.metric_registry import MetricRegistry

Line = dict[str, Any]


def shown(registry: MetricRegistry) -> dict[tuple[str, ...], float]:
    """(name, values of labels in the order of their names) -> value, but for buckets."""
    text, _ = registry.shown("")
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_bucket")]
    return {(s.name, *(s.labels[name] for name in sorted(s.labels))): s.value for s in samples}


def line(at_ms: int, event: str, worker: str = "", generation: int = 0, **fields: object) -> Line:
    base = {"t_mono_ns": at_ms * 1_000_000, "t_wall": 1000 + at_ms / 1e3, "generation": generation}
    return {**base, "worker_id": worker, "who": worker or "leader", "event": event, **fields}


LOSS = [
    line(0, "worker_exited", "b"),
    line(10, "member_lost", "b"),
    line(10, "quiesce_started", "", 1, because="b exited"),
    line(30, "quiesce_complete"),
    line(35, "committed", "", 2, kind="loss", members=["a"]),
    line(40, "published", "", 2, kind="loss"),
    line(60, "ring_up", "a", 2),
    line(61, "running", "", 2),
    line(62, "redo_started", "a", 2),
    line(160, "op_complete", "a", 2),
]


def members_of(count: int) -> list[Line]:
    """As a status has them."""
    return [{"worker_id": f"n.{rank}.0", "rank": rank} for rank in range(count)]


def folding() -> tuple[MetricRegistry, JobFold]:
    registry = MetricRegistry()
    return registry, JobFold(registry, "j")


def test_who_is_waited_for_is_told_by_rank_and_taken_back() -> None:
    registry = MetricRegistry()
    status = {"state": "running", "generation": 7, "members": members_of(3)}
    show_status(registry, "j", {**status, "held_up_by": {"n.2.0": "4 s in shard 5", "n.9.0": "gone"}})
    awaited = {key: value for key, value in shown(registry).items() if key[0] == "elastic_job_awaited_rank"}
    assert awaited == {("elastic_job_awaited_rank", "j", "2"): 1}
    show_status(registry, "j", status)
    assert not any(key[0] == "elastic_job_awaited_rank" for key in shown(registry))


def steps(first: int, end: int) -> list[Line]:
    return [{"step": step, "samples": [[0, 1], {"n": 3}]} for step in range(first, end)]


def test_a_loss_is_counted_with_its_phases_and_taken_from_the_goodput() -> None:
    registry, fold = folding()
    fold.see(line(0, "running", "", 1))
    fold.applied(steps(0, 1), 0.0)
    for found in LOSS:
        fold.see(found)
    fold.tick(1.6, 1001.6)
    seen = shown(registry)
    assert seen["elastic_recoveries_total", "j", "loss"] == 1
    assert seen["elastic_workers_ended_total", "j"] == 1
    spent = {key[2]: round(1e3 * value) for key, value in seen.items() if key[0] == "elastic_recovery_seconds_sum"}
    assert spent == {"detect": 10, "abort": 20, "decide": 10, "build": 20, "sync": 0, "redo": 100}
    assert round(seen["elastic_job_goodput_ratio", "j"], 6) == 0.9


def test_a_member_that_hung_is_counted_by_its_rank_and_one_that_died_is_none() -> None:
    registry = MetricRegistry()
    fold = JobFold(registry, "j", leader_only=True)
    fold.see(line(0, "committed", "", 1, kind="form", members=["a", "b", "c"]))
    fold.see(line(5, "member_lost", "b", rank=1, hung=True, because="no beat"))
    fold.see(line(6, "member_lost", "c", rank=2, hung=False, because="killed by SIGKILL"))
    counts = {key[2]: value for key, value in shown(registry).items() if key[0] == "elastic_job_hangs_total"}
    assert counts == {"0": 0, "1": 1, "2": 0}


def test_a_replica_sees_of_a_loss_what_leaders_write_and_no_other_phase() -> None:
    registry = MetricRegistry()
    fold = JobFold(registry, "j", leader_only=True)
    for found in LOSS:
        if found["who"] == "leader":
            fold.see(found)
    seen = shown(registry)
    spent = {key[2]: round(1e3 * value) for key, value in seen.items() if key[0] == "elastic_recovery_seconds_sum"}
    assert spent == {"abort": 20, "decide": 10, "build": 21}


def test_generations_are_counted_by_kind_and_the_first_one_is_none() -> None:
    registry, fold = folding()
    for number, kind in enumerate(("form", "planned", "planned", "loss", "form"), start=1):
        fold.see(line(number, "published", "", number, kind=kind))
    seen = shown(registry)
    assert {key[2]: value for key, value in seen.items() if key[0] == "elastic_recoveries_total"} == {
        "planned": 2, "loss": 1, "resume": 1
    }  # fmt: skip


def test_a_resume_counts_the_steps_done_again_once_and_its_gap_is_no_steps_time() -> None:
    registry, fold = folding()
    fold.see(line(0, "published", "", 1, kind="form"))
    fold.see(line(0, "running", "", 1))
    fold.see(line(2000, "state_lost", "", 1))
    fold.applied(steps(0, 10), 1.0)
    fold.applied(steps(10, 20), 2.0)
    fold.resumed([15, 19])
    fold.see(line(5000, "published", "", 1, kind="form"))  # the new run has an etcd of its own
    fold.see(line(7000, "running", "", 1))
    fold.applied(steps(20, 22), 12.0)
    fold.applied(steps(22, 23), 13.0)
    fold.tick(21.0, 1014.0)
    seen = shown(registry)
    assert seen["elastic_recoveries_total", "j", "resume"] == 1
    assert seen["elastic_steps_redone_total", "j"] == 5
    assert seen["elastic_job_steps_total", "j"] == 23
    assert seen["elastic_job_samples_total", "j"] == 5 * 23
    assert seen["elastic_job_step", "j"] == 22
    assert seen["elastic_job_step_seconds_count", "j"] == 11
    assert seen["elastic_job_step_seconds_sum", "j"] == 2.0
    # 2 s, 3 s in which nothing ran, 2 s until it trained again, and 7 s; 5 of the 28 steps were done again.
    assert round(seen["elastic_job_goodput_ratio", "j"], 6) == round((2 + 7) * 23 / 28 / 11, 6)


def test_a_pause_is_lost_and_a_replica_and_an_agent_alone_show_no_goodput() -> None:
    told = [line(0, "running", "", 1), line(1000, "state", "", 1, state="paused", because="1 of 2")]
    whole, replica, agent = MetricRegistry(), MetricRegistry(), MetricRegistry()
    for registry, lines, leader_only in ((whole, told, False), (replica, told, True), (agent, [], False)):
        fold = JobFold(registry, "j", leader_only=leader_only)
        for one in lines:
            fold.see(one)
        fold.applied(steps(0, 4), 0.5)
        fold.tick(4.0, 1004.0)
    assert shown(whole)["elastic_job_goodput_ratio", "j"] == 0.25
    assert not any(("elastic_job_goodput_ratio", "j") in shown(registry) for registry in (replica, agent))


def test_checkpoints_have_an_age_and_a_size_and_failures_make_no_age() -> None:
    registry, fold = folding()
    fold.see(line(0, "snapshot_failed", "a", because="no memory"))
    fold.see(line(0, "checkpoint_complete", "a", bytes=700, step=3))
    fold.tick(0.0, 1060.0)
    seen = shown(registry)
    assert seen["elastic_checkpoints_total", "j", "snapshot", "failed"] == 1
    assert seen["elastic_checkpoint_bytes", "j", "checkpoint"] == 700
    assert seen["elastic_checkpoint_age_seconds", "j", "checkpoint"] == 60
    assert ("elastic_checkpoint_age_seconds", "j", "snapshot") not in seen
    fold.tick(0.0, 900.0)  # the wall clock was set back
    assert shown(registry)["elastic_checkpoint_age_seconds", "j", "checkpoint"] == 0


def test_parts_that_one_machine_alone_has_are_counted_in_each_round_anew() -> None:
    registry, fold = folding()
    assert ("elastic_kept_thin_parts", "j") not in shown(registry), "most jobs keep nothing in this way"
    for event, fields, wanted in (
        ("kept_found", {"step": 4, "kept_in": "0.1"}, 0),
        ("kept_thin", {"step": 4, "parts": 2}, 2),
        ("kept_thin", {"step": 7, "parts": 1}, 3),
        ("kept_found", {"step": 9, "kept_in": "0.2"}, 0),
    ):
        fold.see(line(0, event, **fields))
        assert shown(registry)["elastic_kept_thin_parts", "j"] == wanted


def test_rounds_of_replicas_are_counted_and_other_steps_are_not() -> None:
    registry, fold = folding()
    fold.applied(steps(0, 2), 0.0)
    assert not any(key[0].startswith("elastic_outer") for key in shown(registry))
    plain = {"elastic.drift": 0.5, "elastic.summed_bytes": 100.0, "loss": 3.0}
    counts = {"elastic.replicas": 3.0, "elastic.late": 1.0, "elastic.lost": 2.0, "elastic.inner_steps": 7.0}
    fold.applied([{"step": 2, "samples": [], "scalars": plain}], 1.0)
    assert not any(key[0] == "elastic_outer_replicas_total" for key in shown(registry)), "there is no quorum"
    fold.applied(
        [{"step": step, "samples": [], "scalars": plain | counts | {"elastic.drift": 0.25}} for step in (3, 4)], 2
    )
    seen = shown(registry)
    assert (seen["elastic_outer_steps_total", "j"], seen["elastic_outer_summed_bytes_total", "j"]) == (3, 300)
    assert seen["elastic_outer_drift", "j"] == 0.25
    replicas = {key[2]: value for key, value in seen.items() if key[0] == "elastic_outer_replicas_total"}
    assert replicas == {"whole": 4, "late": 2, "lost": 4}


def test_phases_without_waiting_are_counted_by_what_became_of_their_updates() -> None:
    registry, fold = folding()
    store = {"elastic.updates": 8.0, "elastic.staleness": 1.5, "elastic.staleness_max": 4.0, "elastic.dropped": 2.0}
    told = store | {"elastic.scaled": 1.0, "elastic.lost_updates": 1.0, "elastic.pieces_fell_back": 3.0}
    fold.applied([{"step": 0, "samples": [], "scalars": told}], 0.0)
    fold.applied([{"step": 1, "samples": [], "scalars": store | {"elastic.lost_updates": 0.0}}], 1.0)
    seen = shown(registry)
    updates = {key[2]: value for key, value in seen.items() if key[0] == "elastic_async_updates_total"}
    assert updates == {"applied": 11, "scaled": 1, "dropped": 4, "lost": 1}
    staleness = {key[2]: value for key, value in seen.items() if key[0] == "elastic_async_staleness"}
    assert staleness == {"mean": 1.5, "max": 4.0}
    assert seen["elastic_async_pieces_fell_back_total", "j"] == 3
    assert not any(key[0] == "elastic_async_consensus" for key in seen), "there is no gossip"
    fold.applied([{"step": 2, "samples": [], "scalars": {"elastic.lost_updates": 0.0, "elastic.consensus": 0.5}}], 2.0)
    assert shown(registry)["elastic_async_consensus", "j"] == 0.5


def test_the_nearest_notice_counts_down_and_goes_with_its_end() -> None:
    registry, fold = folding()
    fold.see(line(0, "notice", source="aws", seconds_left=120.0))
    fold.see(line(0, "notice", source="SIGTERM", seconds_left=30))
    fold.see(line(0, "notice", source="advice", seconds_left=None))
    fold.tick(0.0, 1010.0)
    assert shown(registry)["elastic_notice_seconds_left", "j"] == 20
    fold.see(line(1, "notice_over", source="SIGTERM"))
    fold.tick(0.0, 1010.0)
    assert shown(registry)["elastic_notice_seconds_left", "j"] == 110
    fold.see(line(2, "notice_over", source="aws"))
    fold.tick(0.0, 1010.0)
    assert ("elastic_notice_seconds_left", "j") not in shown(registry)


def test_a_door_that_refused_many_is_counted_as_many_and_a_refused_worker_is_no_stranger() -> None:
    registry, fold = folding()
    fold.see(line(0, "refused", "a", at="ring", because="no token", times=40))
    fold.see(line(0, "refused", "b", because="its numerics differ"))
    assert shown(registry)["elastic_refusals_total",] == 40


def test_a_thousand_members_and_ten_thousand_incarnations_add_no_series() -> None:
    registry, fold = folding()

    def live(count: int) -> None:
        members = [{"worker_id": f"n{i}.0.{count}", "rank": i} for i in range(count)]
        show_status(registry, "j", {"state": "running", "generation": 7, "members": members, "wanted": count})
        for number in range(10 * count):
            fold.see(line(number, "worker_started", f"n.0.{number}"))
            fold.see(line(number, "worker_exited", f"n.0.{number}"))

    live(1)
    few = shown(registry).keys()
    live(1000)
    many = shown(registry)
    assert many.keys() == few
    assert many["elastic_job_members", "j"] == many["elastic_job_members_wanted", "j"] == 1000


def test_a_job_without_a_leader_keeps_its_numbers_and_says_that_its_state_is_unknown() -> None:
    registry = MetricRegistry()
    show_status(registry, "j", {"state": "running", "generation": 7, "members": members_of(3)})
    show_status(registry, "j", None)
    seen = shown(registry)
    assert seen["elastic_job_state", "j", "unknown"] == 1 and seen["elastic_job_state", "j", "running"] == 0
    assert seen["elastic_leader", "j"] == 0 and seen["elastic_job_members", "j"] == 3


def test_a_forgotten_job_leaves_no_series() -> None:
    registry = MetricRegistry()
    before = shown(registry).keys()
    fold = JobFold(registry, "j")
    fold.applied(steps(0, 2), 1.0)
    fold.applied(steps(2, 3), 2.0)
    for found in LOSS:
        fold.see(found)
    show_status(registry, "j", {"state": "running", "generation": 7, "members": []})
    registry.forget("j", counters=False)
    assert shown(registry)["elastic_job_steps_total", "j"] == 3 and ("elastic_job_step", "j") not in shown(registry)
    registry.forget("j")
    assert shown(registry).keys() == before

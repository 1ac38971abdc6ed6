"""What is shipped for Prometheus, against the real one: a job with a kill in it, and a fleet with certificates."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.live.fleet import Fleet
from tests.live.jobs import ROOT, TRAINER, Job
from tests.live.prometheus import ALERTS, Prometheus, binary, promtool

needs_prometheus = pytest.mark.skipif(
    binary("prometheus") is None or binary("promtool") is None, reason="no prometheus here: `make test-live`"
)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


OTHER_JOBS = ("elastic_outer_", "elastic_async_", "elastic_kept_")
"""What scripts in rounds and with other algorithms have: Prometheus takes the expressions, and finds nothing here."""


def expressions() -> list[str]:
    """Of the dashboard, as Grafana would send them for all jobs."""
    registry = json.loads((ROOT / "docs" / "metrics" / "grafana.json").read_text())
    found = [target["expr"] for panel in registry["panels"] for target in panel["targets"]]
    return [text.replace("$elastic_job", ".*").replace("$__rate_interval", "1m") for text in found]


def sealed(fleet: Fleet, name: str, port: int, server_name: str) -> dict[str, Any]:
    """As docs/metrics.md says it, of a process with certificates."""
    shown = fleet.home / "certs" / "ann"
    return {
        "job_name": name,
        "scheme": "https",
        "tls_config": {
            "ca_file": str(shown / "ca.pem"),
            "cert_file": str(shown / "operator.pem"),
            "key_file": str(shown / "operator.pem"),
            "server_name": server_name,
        },
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }


@pytest.mark.long
@needs_prometheus
def test_the_rules_are_rules() -> None:
    assert "SUCCESS: 17 rules found" in promtool("check", "rules", str(ALERTS))


@pytest.mark.long
@needs_prometheus
def test_each_expression_of_the_dashboard_finds_a_job_with_a_kill_and_a_fleet_with_certificates(tmp_path: Path) -> None:
    of_run, of_replica, of_agent, own = free_ports(4)
    (tmp_path / "fleet").mkdir()
    notices = tmp_path / "notice"
    options = ("--workers", "2", "--metrics", str(of_run), "--notices", f"file:{notices}")
    with Fleet(tmp_path / "fleet", replicas=1, certs=True) as fleet, Job(tmp_path, *options, str(TRAINER)) as job:
        job.shut("end")
        fleet.end("r0")
        fleet.replica("r0", "--metrics", str(of_replica))
        fleet.node("a", "--metrics", str(of_agent), "--slots", "1")
        scrapes = [
            {"job_name": "run", "static_configs": [{"targets": [f"127.0.0.1:{of_run}"]}]},
            sealed(fleet, "replica", of_replica, "rendezvous.elastic.internal"),
            sealed(fleet, "agent", of_agent, "node.elastic.internal"),
        ]
        with Prometheus(tmp_path, own, scrapes) as prometheus:
            job.until("all are scraped", lambda: len(prometheus.query("up == 1")) == 3)
            fleet.train("small", workers=1)
            _, second = job.await_world(2)
            job.until(
                "the first scrape of both", lambda: prometheus.value('elastic_job_members{elastic_job="trainer"}') == 2
            )
            job.send(second)
            loss = 'elastic_recoveries_total{kind="loss", elastic_job="trainer"}'
            job.until("the loss", lambda: prometheus.value(loss) == 1)
            assert (prometheus.value(f"increase({loss}[1m])") or 0) > 0
            job.until(
                "phases", lambda: prometheus.value('elastic_recovery_seconds_count{phase="redo",elastic_job="trainer"}')
            )
            job.await_world(2)
            notices.write_text("600\n")
            every = expressions()
            for text in every:
                prometheus.query(text)
            missing = [text for text in every if not any(kind in text for kind in OTHER_JOBS)]

            def none_is_missing() -> bool:
                missing[:] = [text for text in missing if not prometheus.query(text)]
                return not missing

            try:
                job.until("each expression", none_is_missing, 60.0)
            except AssertionError as error:
                raise AssertionError(f"{error}: {missing}") from error
            rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
            assert len(rules) == 17 and {rule["health"] for rule in rules} == {"ok"}

            def firing() -> set[str]:
                return {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}

            job.until("the alert of the notice", lambda: "ElasticMachineGoes" in firing())
            assert not firing() & {"ElasticMetricsOld", "ElasticJobDoesNotStep", "ElasticManyRefusals"}


@needs_prometheus
@pytest.mark.long
def test_a_planted_stall_fires_its_alert_which_clears_when_training_goes_on(tmp_path: Path) -> None:
    """The shipped rule with a window of seconds in place of minutes: nothing else about it is changed."""
    of_run, own = free_ports(2)
    rules = tmp_path / "rules.yml"
    rules.write_text(re.sub(r"(?<=for: )\d+m", "1s", ALERTS.read_text()).replace("[10m]", "[8s]"))
    with Job(tmp_path, "--workers", "2", "--metrics", str(of_run), str(TRAINER)) as job:
        job.shut("end")
        scrapes = [{"job_name": "run", "static_configs": [{"targets": [f"127.0.0.1:{of_run}"]}]}]
        with Prometheus(tmp_path, own, scrapes, rules) as prometheus:

            def fires() -> bool:
                firing = [alert for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"]
                return "ElasticJobDoesNotStep" in {alert["labels"]["alertname"] for alert in firing}

            _, second = job.await_world(2)
            job.until("steps are scraped", lambda: prometheus.value("sum(increase(elastic_job_steps_total[8s]))"))
            assert not fires()
            (job.gates / "shard.new").write_text(second)
            (job.gates / "shard.new").rename(job.gates / "shard")
            job.await_held("shard")
            job.until("its rank", lambda: prometheus.value('elastic_job_awaited_rank{rank="1"}') == 1)
            assert prometheus.query('elastic_job_awaited_rank{rank="0"}') == []
            job.until("the alert", fires)
            job.open("shard")
            job.until("its end", lambda: not fires() and not prometheus.query("elastic_job_awaited_rank"))
            job.open("end")
            assert job.wait() == 0


@pytest.mark.long
def test_a_resumed_command_begins_its_counts_at_0_and_goes_on_from_the_step(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def shown() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = re.findall(r"^(\w+(?:\{.*\})?) ([\d.e+-]+)$", answer.read().decode(), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def value(name: str) -> float:
        try:
            return shown().get(f'{name}{{elastic_job="trainer"}}', 0.0)
        except OSError:
            return 0.0  # it does not listen yet

    with Job(tmp_path, "--workers", "1", "--metrics", str(port), str(TRAINER)) as job:
        job.shut("end")
        job.until("20 steps", lambda: value("elastic_job_steps_total") >= 20)
        job.command.process.kill()
        job.command.process.wait()
        done = len(job.steps())
    with Job(tmp_path, "--workers", "1", "--metrics", str(port), str(TRAINER)) as job:
        job.until("new steps", lambda: value("elastic_job_steps_total") > 0)
        seen = shown()
        step = seen['elastic_job_step{elastic_job="trainer"}']
        assert seen['elastic_job_steps_total{elastic_job="trainer"}'] <= step + 1 - done < step
        assert seen['elastic_recoveries_total{elastic_job="trainer",kind="resume"}'] == 1
        (again,) = [json.loads(line) for line in (job.dir / "resumes.jsonl").read_text().splitlines()]
        redone = again["redone"][1] - again["redone"][0] + 1 if again["redone"] else 0
        assert seen['elastic_steps_redone_total{elastic_job="trainer"}'] == redone


def test_a_port_in_use_ends_the_command_before_anything_is_done(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as held,
        Job(tmp_path, "--metrics", str(held.getsockname()[1]), str(TRAINER)) as job,
    ):
        assert job.wait() == 2
        assert "Address already in use; give an address of this machine, and a port that is free" in " ".join(
            job.output.split()
        )
        assert not job.dir.exists()

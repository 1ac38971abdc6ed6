"""The manifest: what it grants and limits, and that readers of YAML see what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elastic import cli
from elastic.errors import ConfigError
from elastic.platforms.k8s.manifest import manifest, manifest_text
from elastic.platforms.k8s.pod_parts import Flavor, ManifestOptions
from elastic.platforms.k8s.yaml_text import documents_text

JOB = 'name = "train"\ncommand = ["python", "t.py"]\nworkers = 2\ncheckpoint_dir = "/mnt/runs"\n'
OPTIONS: dict[str, Any] = {
    "name": "train",
    "job": JOB,
    "image": "i:1",
    "nodes": (2, 8),
    "checkpoint_dir": "/mnt/runs",
    "claim": "runs",
}


def of(flavor: Flavor = Flavor.PLAIN, **others: Any) -> dict[str, dict[str, Any]]:
    """By kind; the YAML as its reader sees it."""
    text = manifest_text(ManifestOptions(**{**OPTIONS, "flavor": flavor, **others}))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod_of(kind: str, objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = objects[kind]["spec"]["template"]["spec"]
    return found


def test_a_pod_that_is_disrupted_or_has_left_is_no_failure_and_a_job_that_has_failed_is_given_up() -> None:
    spec = of()["Job"]["spec"]
    assert spec["parallelism"] == 8 and "completions" not in spec and spec["completionMode"] == "NonIndexed"
    assert spec["podReplacementPolicy"] == "Failed" and spec["template"]["spec"]["restartPolicy"] == "Never"
    disrupted, left, over, refused = spec["podFailurePolicy"]["rules"]
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (left["action"], left["onExitCodes"]["values"]) == ("Ignore", [6, 143])
    assert (over["action"], over["onExitCodes"]["values"]) == ("FailJob", [1, 2, 4, 5, 71])
    # A rule with the name of a container says nothing of an init container.
    (enter,) = spec["template"]["spec"]["initContainers"]
    assert refused == {
        "action": "FailJob",
        "onExitCodes": {"containerName": enter["name"], "operator": "In", "values": [2]},
    }


def test_an_agent_leaves_within_the_grace_of_its_pod() -> None:
    pod = pod_of("Job", of(grace_s=90))
    command = pod["containers"][0]["command"]
    assert pod["terminationGracePeriodSeconds"] == 90 and command[command.index("--grace") + 1] == "85"


@pytest.mark.parametrize("flavor", Flavor)
def test_the_key_of_the_authority_is_in_no_document_and_only_init_containers_see_it(flavor: Flavor) -> None:
    objects = of(flavor)
    assert "Secret" not in objects
    for pod in (pod_of("StatefulSet", objects), *([pod_of("Job", objects)] if flavor is Flavor.PLAIN else [])):
        assert all(mount["name"] != "ca" for one in pod["containers"] for mount in one["volumeMounts"])
        (init,) = pod["initContainers"]
        assert {"name": "ca", "mountPath": "/run/elastic/ca", "readOnly": True} in init["volumeMounts"]


def test_rights_are_to_read_single_pods_and_nodes() -> None:
    objects = of()
    for kind, what in (("Role", "pods"), ("ClusterRole", "nodes")):
        assert objects[kind]["rules"] == [{"apiGroups": [""], "resources": [what], "verbs": ["get", "watch"]}]
    assert pod_of("StatefulSet", objects)["automountServiceAccountToken"] is False
    for pod in (pod_of("StatefulSet", objects), pod_of("Job", objects)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_etcd_does_not_keep_its_history_until_it_is_full() -> None:
    command = pod_of("StatefulSet", of())["containers"][0]["command"]
    assert command[command.index("--auto-compaction-retention") + 1] == "1h" and "periodic" in command


def test_two_jobs_have_no_object_of_the_cluster_in_common() -> None:
    one, other = of(namespace="team", name="a-b"), of(namespace="team-a", name="b")
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        assert one[kind]["metadata"]["name"] != other[kind]["metadata"]["name"]
        assert one[kind]["metadata"]["name"] == "team:a-b-agent"
    assert one["ClusterRoleBinding"]["roleRef"]["name"] == one["ClusterRole"]["metadata"]["name"]


def test_a_checkpoint_directory_needs_a_claim_and_a_url_none() -> None:
    with pytest.raises(ConfigError, match="needs --claim"):
        of(claim="")
    with pytest.raises(ConfigError, match="needs --claim"):
        of(checkpoint_dir="s3://b/runs")
    volumes = pod_of("Job", of(claim="", checkpoint_dir="s3://b/runs"))["volumes"]
    assert not [one for one in volumes if "persistentVolumeClaim" in one]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"nodes": (0, 2)}, {"nodes": (3, 2)}, {"slots": 0}, {"replicas": 2}, {"grace_s": 5}, {"name": "x" * 41}),
        *({"name": "70b-sft"}, {"namespace": "Team_A"}, {"namespace": ""}),
        *(
            {"checkpoint_dir": path}
            for path in ("/", "/srv", "/srv/elastic", "/srv//elastic/", "/dev", "/run/elastic/own")
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ManifestOptions(**{**OPTIONS, **wrong})


def test_the_command_prints_it_and_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    words = ["k8s", "manifest", str(tmp_path / "job.toml"), "--image", "i:1", "--claim", "runs", "--resource", "cpu=4"]
    assert cli.main([*words, "--nodes", "2:8"]) == 0
    (job,) = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one["kind"] == "Job"]
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "4"}
    for nodes in ("many", "2:x", "4:2"):
        assert cli.main([*words, "--nodes", nodes]) == 2
    assert "--nodes" in capsys.readouterr().err
    assert (
        cli.main(
            [
                "k8s",
                "agent",
                "--rendezvous",
                "127.0.0.1:1",
                *["--own", "x", "--jobs-dir", "x", "--grace", "1"],
                *["--address", "127.0.0.1", "--slots", "1", "--metrics", "1"],
            ]
        )
        == 2
    )
    assert "$POD_NAME is not set" in capsys.readouterr().err


def printed(tmp_path: Path, *words: str) -> int:
    (tmp_path / "job.toml").write_text(JOB)
    file = str(tmp_path / "job.toml")
    return cli.main(["k8s", "manifest", file, "--image", "i:1", "--claim", "runs", "--nodes", "2:8", *words])


def test_a_pod_asks_for_gpus_by_the_name_that_their_vendor_gives_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"nvidia.com/gpu": "1", "memory": "1.5Gi", "cpu": "500m", "hugepages-2Mi": "1e9"}
    assert printed(tmp_path, *(word for pair in asked.items() for word in ("--resource", "=".join(pair)))) == 0
    (job,) = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one["kind"] == "Job"]
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {"limits": asked, "requests": asked}


@pytest.mark.parametrize("wrong", ["cpu", "cpu=", "cpu=many", "=4", "/gpu=1", "nvidia.com/=1", "cpu=4\n"])
def test_what_is_no_resource_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    assert printed(tmp_path, "--resource", wrong) == 2
    assert "nvidia.com/gpu=1" in capsys.readouterr().err
    assert printed(tmp_path, "--resource", "cpu=1", "--resource", "cpu=2") == 2


KEYS = st.text(max_size=20)
"""YAML takes 1024 characters as written."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_reader_of_yaml_sees_what_was_written(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(documents_text(documents))) == documents


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "NO",
        "1e3",
        "0x1f",
        "1:20",
        "2026-01-01",
        "~",
        "null",
        ".inf",
        ".5",
        "=",
        "a: b",
        "- a",
        "",
        "a\n",
        " a\nb\n",
        "#",
        "a\u2028b\n",
        "a\n\u2029\nb\n",
    ],
)
def test_a_text_stays_a_text(text: str) -> None:
    assert yaml.safe_load(documents_text([{"x": text, text or "k": [text, {"y": text}]}]))["x"] == text


def test_the_manifest_is_the_same_as_json_and_as_yaml() -> None:
    options = ManifestOptions(**OPTIONS)
    assert list(yaml.safe_load_all(manifest_text(options))) == manifest(options)

"""The manifests of `elastic k8s`, against the schemas of Kubernetes, and the models that Kubeflow publishes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import kubernetes_validate
import pytest

from elastic.platforms.k8s.pod_parts import Flavor
from elastic.platforms.k8s.trainer_status import status
from tests.live.jobs import ROOT
from tests.unit.elastic.platforms.k8s.test_manifest import of

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("flavor", Flavor)
@pytest.mark.parametrize("replicas", [1, 3])
def test_objects_of_kubernetes_are_valid_and_have_no_unknown_field(flavor: Flavor, replicas: int, version: str) -> None:
    built_in = [
        document
        for document in of(flavor, replicas=replicas, resources={"cpu": "4", "nvidia.com/gpu": "1"}).values()
        if document["kind"] not in ("JobSet", "TrainJob", "TrainingRuntime")
    ]
    for document in built_in:
        kubernetes_validate.validate(document, version, strict=True)
    if flavor is Flavor.PLAIN:
        assert [document["kind"] for document in built_in].count("Job") == 1


@pytest.mark.parametrize(
    ("flavor", "kind", "module", "model"),
    [
        (Flavor.JOBSET, "JobSet", "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
        (Flavor.TRAINJOB, "TrainJob", "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
        (Flavor.TRAINJOB, "TrainingRuntime", "trainer_v1alpha1_training_runtime", "TrainerV1alpha1TrainingRuntime"),
    ],
)
def test_objects_of_kubeflow_have_the_fields_that_its_own_models_have(
    flavor: Flavor, kind: str, module: str, model: str
) -> None:
    document = of(flavor)[kind]
    read = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), model).from_dict(document)
    assert sorted(paths(read.to_dict())) == sorted(paths(document)), (
        "a field that it does not know is not in what it keeps"
    )


def test_the_job_of_a_jobset_and_of_a_trainjob_is_valid_as_a_job() -> None:
    inner = [
        of(Flavor.JOBSET)["JobSet"]["spec"]["replicatedJobs"],
        of(Flavor.TRAINJOB)["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"],
    ]
    for ((job,),) in zip(inner, strict=True):
        document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def paths(value: object, at: str = "") -> set[str]:
    if isinstance(value, dict):
        return {path for key, item in value.items() for path in paths(item, f"{at}.{key}")}
    if isinstance(value, list):
        return {path for index, item in enumerate(value) for path in paths(item, f"{at}.{index}")}
    return {at}


def test_progress_is_what_kubeflow_trainer_takes() -> None:
    from kubeflow_trainer_api.models import trainer_v1alpha1_update_train_job_status_request as requests

    told = status({"step": 9, "scalars": {"loss": 0.5}}, 40, 2.0, datetime.now(UTC))
    read = requests.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(told)
    assert sorted(paths(read.to_dict())) == sorted(paths(told))


def test_the_recipe_of_the_image_has_nothing_to_object_to() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, ROOT / "docs" / "k8s" / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")

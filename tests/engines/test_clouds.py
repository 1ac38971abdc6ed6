"""The recipes of docs/clouds.md, by the linters and emulators of their kinds. No cloud is asked."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import jsonschema
import pytest
import yaml
from moto import mock_aws

from elastic.cli import parser
from elastic.process.option_file import OptionFile
from tests.live.jobs import ROOT

RECIPES = ROOT / "docs" / "clouds"
BIN = Path(sys.executable).parent
SCHEMA = (
    Path(sys.prefix) / "cloud-init/usr/lib/python3/dist-packages/cloudinit/config/schemas/schema-cloud-config-v1.json"
)


def passes(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_template_of_aws_has_nothing_to_object_to() -> None:
    passes(BIN / "cfn-lint", "--regions", "us-east-1", "--", RECIPES / "aws.yaml")


@pytest.mark.parametrize("script", ["gcp.sh", "azure.sh"])
def test_the_scripts_have_nothing_to_object_to(script: str) -> None:
    passes(BIN / "shellcheck", RECIPES / script)


@pytest.mark.skipif(not SCHEMA.exists(), reason="Debian's package cloud-init, of which `make test-engines` unpacks one")
def test_the_user_data_is_what_cloud_init_takes_and_its_options_are_an_agents(tmp_path: Path) -> None:
    text = (RECIPES / "agent.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    document = yaml.safe_load(text)
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    (file,) = document["write_files"]
    (tmp_path / "agent.toml").write_text(file["content"])
    words = ["agent", "--config", str(tmp_path / "agent.toml")]
    options = parser(words).parse_args(words)
    found = OptionFile(options.parser, options.config, options.words, ()).options()
    assert found["grace"] == 25 and found["notices"] == "auto" and len(found["rendezvous"].split(",")) == 3


@pytest.fixture
def stack() -> Iterator[dict[str, str]]:
    """Of the template, in an emulator: logical name -> physical."""
    with mock_aws():
        ec2 = boto3.client("ec2", "us-east-1")
        network = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
        subnets = ",".join(one["SubnetId"] for one in ec2.describe_subnets()["Subnets"][:2])
        given = {
            "Image": ec2.describe_images()["Images"][0]["ImageId"],
            "Network": network,
            "Subnets": subnets,
            "UserData": base64.b64encode((RECIPES / "agent.yaml").read_bytes()).decode(),
            "Most": "3",
        }
        formation = boto3.client("cloudformation", "us-east-1")
        formation.create_stack(
            StackName="train",
            TemplateBody=(RECIPES / "aws.yaml").read_text(),
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
            Capabilities=["CAPABILITY_IAM"],
        )
        told = formation.describe_stack_resources(StackName="train")["StackResources"]
        yield {one["LogicalResourceId"]: one.get("PhysicalResourceId", "") for one in told}


def test_the_group_of_aws_is_of_spot_instances_that_have_the_role(stack: dict[str, str]) -> None:
    scaling = boto3.client("autoscaling", "us-east-1")
    (group,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[stack["Group"]])["AutoScalingGroups"]
    assert group["DesiredCapacity"] == 3
    spread = group["MixedInstancesPolicy"]["InstancesDistribution"]
    assert spread["OnDemandPercentageAboveBaseCapacity"] == 0
    version: dict[str, Any] = boto3.client("ec2", "us-east-1").describe_launch_template_versions(
        LaunchTemplateId=stack["Template"]
    )["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert version["MetadataOptions"]["HttpTokens"] == "required"


def test_the_page_names_each_file_and_its_links_are_there() -> None:
    page = (ROOT / "docs" / "clouds.md").read_text()
    assert {*re.findall(r"\]\(clouds/([^)]+)\)", page)} == {path.name for path in RECIPES.iterdir()}

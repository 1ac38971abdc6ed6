"""The committed messages are what the .proto files say, in the words of the oldest supported generator."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
SUFFIXES = ("_pb2.py", "_pb2.pyi")


def stubs(root: Path) -> dict[str, str]:
    folder = root / "elastic" / "wire"
    return {path.name: path.read_text() for path in folder.glob("*") if path.name.endswith(SUFFIXES)}


@pytest.fixture(scope="module")
def protos() -> list[str]:
    return sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("elastic/wire/*.proto"))


def test_there_is_a_wire(protos: list[str]) -> None:
    assert protos, "proto/elastic/wire holds no .proto file"


def test_the_generator_is_the_one_make_installs() -> None:
    """Another one would write other messages, and those of newer ones refuse an older protobuf."""
    pinned = re.search(r"^PROTOC_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None and version("grpcio-tools") == pinned[1]


def test_stubs_are_regenerated_after_every_change_of_a_proto(protos: list[str], tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *outputs, *protos]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert stubs(ROOT) == stubs(tmp_path), "run `make proto` and commit elastic/wire"

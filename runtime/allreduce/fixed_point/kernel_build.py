"""Compiles kernel.c when the project is installed. pyproject.toml names this file to hatchling, which runs it alone.

Without a compiler the project is installed all the same, and torch does the kernel's work (conversion.py).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
"""No other freedom with floats than the errors that nobody looks at: the bits must be those of torch."""


class KernelBuild(BuildHookInterface[Any]):  # type: ignore[misc]  # it is installed while others are built
    """hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the source, also for an editable installation, and take the result into the wheel."""
        folder = Path(self.root) / "runtime" / "allreduce" / "fixed_point"
        if self.target_name == "wheel" and compile_kernel(folder / "kernel.c", folder):
            build_data["artifacts"].append("runtime/allreduce/fixed_point/kernel-*.so")
            build_data["pure_python"], build_data["infer_tag"] = False, True


def compile_kernel(source: Path, folder: Path) -> bool:
    """Compile into this folder, under the name of conversion.library(). Returns whether it succeeded."""
    target = folder / f"kernel-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.so"
    making = target.with_suffix(f".{os.getpid()}")
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, "-o", str(making), str(source), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"runtime/allreduce/fixed_point/kernel.c is not compiled, torch does its work: {error}")
        return False
    for old in folder.glob("kernel-*.so"):
        old.unlink()
    making.rename(target)
    return True

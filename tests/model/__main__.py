"""``make model``: search the models of docs/model for a violated claim, and for each planted fault.

Prints one line for each search. Exit 1 if a claim is violated, a search is not exhaustive, or a planted fault is not
found. ``python -m tests.model step`` runs the searches of one model only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.model.runs import CLAIMS, PLANTED, Run

MODELS = Path(__file__).parents[2] / "docs" / "model"
MEMORY_MB = 8000
LIMIT_S = 600.0
"""Generous, for a loaded machine; on an idle one each takes under five minutes."""
DEPTH = 2_000_000

LINE = "{:<14} {:<58} {:>11} {:>6} {:>6}  {}"


@dataclass(frozen=True, slots=True)
class Result:
    states: int
    depth: int
    complete: bool
    violated: str
    """The claim, or empty."""


def needs() -> str:
    """The spin to search with: what `make model` unpacked, else one on PATH. Raises SystemExit that says what is
    missing."""
    if shutil.which("gcc") is None:
        raise SystemExit(
            "the models are searched by a program in C: this needs a C compiler, gcc, which is not installed"
        )
    for candidate in (str(Path(sys.prefix) / "spin" / "usr" / "bin" / "spin"), shutil.which("spin")):
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise SystemExit("spin is not on PATH, and `make model` could not unpack it from Debian's package")


def search(spin: str, run: Run, where: Path) -> Result:
    """Raises CalledProcessError, its output printed, if the model cannot be translated or compiled."""
    model = Path(shutil.copy(MODELS / f"{run.model}.pml", where))
    defines = [f"-D{switch}" for switch in run.switches.split()] + (["-DLIVENESS"] if run.ltl else [])
    _call([spin, "-a", *defines, model.name], where)
    kind = ["-DNFAIR=4", "-DCOLLAPSE"] if run.ltl else ["-DSAFETY", "-DNOREDUCE"]
    _call(["gcc", "-O2", "-w", f"-DMEMLIM={MEMORY_MB}", *kind, "-o", "pan", "pan.c"], where)
    how = ["-a", "-f", "-N", run.ltl] if run.ltl else ["-E"]
    try:
        said = _call(["./pan", f"-m{DEPTH}", *how], where, limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Result(0, 0, False, "")
    summary = re.search(r"depth reached (\d+), errors: (\d+)", said)
    stored = re.search(r"([\d.e+]+) states, stored", said)
    if summary is None or stored is None:
        raise SystemExit(f"pan said something else:\n{said}")
    violated = "" if summary[2] == "0" else run.ltl or _violated(spin, model, defines, where)
    cut = "Search not completed" in said or "max search depth too small" in said or "out of memory" in said
    return Result(int(float(stored[1])), int(summary[1]), not cut, violated)


def _violated(spin: str, model: Path, defines: list[str], where: Path) -> str:
    """The name of the claim beside the assertion at the end of the trail."""
    trail = _call([spin, "-t", "-p", "-g", *defines, model.name], where, may_fail=True)  # it ends in the violation
    (where / "trail.txt").write_text(trail)
    at = re.findall(rf"{model.name}:(\d+), Error: assertion violated", trail)
    if not at:
        return "?"
    named = re.search(r"/\* \[(\w+)\]", model.read_text().splitlines()[int(at[-1]) - 1])
    return named[1] if named else f"line {at[-1]}"


def _call(command: list[str], where: Path, *, limit_s: float = 120.0, may_fail: bool = False) -> str:
    done = subprocess.run(
        command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
    )
    if done.returncode and not may_fail:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()
    return done.stdout


def judge(run: Run, result: Result) -> tuple[bool, str]:
    if result.violated != run.found:
        if not run.found:
            return False, f"VIOLATED: {result.violated}"
        return False, f"{result.violated or 'nothing'} FOUND, not {run.found}"
    if run.found:
        return True, f"found: {run.found}"
    return (True, "holds") if result.complete else (False, "NOT EXHAUSTIVE")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these, such as: step changes")
    wanted = parser.parse_args().models
    spin = needs()
    failed = 0
    for title, runs in (("claims", CLAIMS), ("planted faults", PLANTED)):
        chosen = [run for run in runs if not wanted or run.model in wanted]
        if chosen:
            print(LINE.format(title, "switches", "states", "depth", "s", "verdict"), flush=True)
        for run in chosen:
            failed += not _one(spin, run)
    print(f"{failed} of the searches failed" if failed else "all as expected")
    return bool(failed)


def _one(spin: str, run: Run) -> bool:
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        where = Path(folder)
        begun_s = time.monotonic()
        result = search(spin, run, where)
        good, verdict = judge(run, result)
        switches = f"{run.switches} {run.ltl}".strip() or "-"
        seconds = time.monotonic() - begun_s
        print(LINE.format(run.model, switches, result.states, result.depth, f"{seconds:.0f}", verdict), flush=True)
        if not good and (where / "trail.txt").exists():
            kept = Path(tempfile.mkdtemp(prefix="trail-")) / "trail.txt"
            shutil.copy(where / "trail.txt", kept)
            print(f"  how: {kept}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())

"""The modules of which mutants are made, and the tests that have to notice, the quick ones first."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]

TARGETS = {
    "elastic/protocol/membership": ("elastic/protocol/test_membership.py", "elastic/protocol"),
    "elastic/protocol/worker_state": ("elastic/protocol/test_worker_state.py", "elastic/protocol"),
    "elastic/protocol": ("elastic/protocol",),
    "elastic/protocol/messages": ("elastic/wire", "elastic/protocol"),
    "elastic/records/ledger.py": ("elastic/records/test_ledger.py", "elastic/agent"),
    "elastic/checkpoints": ("elastic/checkpoints", "elastic/cli", "runtime/recovery/checkpoint"),
    "runtime/allreduce/reduction": ("runtime/allreduce/reduction", "runtime/worker"),
    "runtime/allreduce/reduction/early_sums.py": (
        "runtime/loop/test_overlap.py",
        "runtime/allreduce/reduction",
        "runtime/worker",
    ),
    "runtime/allreduce/reduction/leaves": (
        "runtime/allreduce/reduction",
        "runtime/loop/test_compression.py",
        "runtime/loop/test_fixed.py",
        "runtime/worker",
        "runtime/loop/test_overlap.py",
    ),
    "runtime/allreduce/reduction/leaves/early_leaf.py": (
        "runtime/loop/test_overlap.py",
        "runtime/allreduce/reduction",
        "runtime/worker",
    ),
}
"""Module or package -> files and directories below tests/unit. Of a module the longest name that fits counts."""


def modules() -> list[Path]:
    """All of them, sorted."""
    places = [ROOT / name for name in TARGETS]
    found = {path for place in places for path in (place.rglob("*.py") if place.is_dir() else (place,))}
    return sorted(path for path in found if path.name != "__init__.py")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def target_of(path: Path) -> str:
    """The entry of TARGETS that counts for this module."""
    place = str(path.relative_to(ROOT))
    return max((name for name in TARGETS if place == name or place.startswith(f"{name}/")), key=len)


def tests_of(path: Path) -> list[str]:
    """Those that have to notice a change of this module, in the order in which they are run: its own first."""
    unit = ROOT / "tests" / "unit"
    own = unit / path.parent.relative_to(ROOT) / f"test_{path.stem}.py"
    tests = [*([own] if own.exists() else []), *(unit / test for test in TARGETS[target_of(path)])]
    return list(dict.fromkeys(str(test) for test in tests))

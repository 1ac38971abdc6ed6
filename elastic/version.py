"""The version of this program, which agents, replicas and daemons tell each other and write into journals; and the
versions of torch that it was tested with."""

from __future__ import annotations

import re

__version__ = "0.1.0"

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
"""Releases of torch, (major, minor), that the tests were run with; docs/gpus.md has what was run."""


def torch_releases() -> str:
    """For messages."""
    return "torch {}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)


def torch_is_newer(version: str) -> str:
    """What to tell of an installed torch that is newer than all that were tested; "" of another one.

    version: as torch says it, such as "2.15.0+cu132".
    """
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None or (int(release[1]), int(release[2])) <= NEWEST_TORCH:
        return ""
    return f"torch {version} is newer than all that elastic-ring {__version__} was tested with: {torch_releases()}"

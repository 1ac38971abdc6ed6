"""Which of a node's accelerators a job gets: as many as it has slots there, and none that another job has.

Workers of one job begin to count at 0 each, among those that CUDA_VISIBLE_DEVICES leaves; so it is set for each job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def of_node(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """What the daemon may use, as CUDA_VISIBLE_DEVICES names it; without that, every device of NVIDIA's driver."""
    if (given := environment.get(VARIABLE)) is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(str(number) for number in sorted(int(match[1]) for match in found if match is not None))


def choose(all_of_node: Iterable[str], taken: Iterable[str], slots: int) -> tuple[str, ...]:
    """For a job: the first that are free. Fewer if there are not so many; none on a node without any."""
    busy = set(taken)
    return tuple(device for device in all_of_node if device not in busy)[:slots]

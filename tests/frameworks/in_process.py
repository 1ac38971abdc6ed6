"""Frameworks that are adapted in the process of the tests, for jobs of one worker that has all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runtime.frontends.ddp.seams import Seams
from runtime.frontends.frameworks import accelerate as our_accelerate
from tests.unit.runtime.frontends.ddp import threads


def forget(accelerate: Any) -> None:
    """Whatever accelerate knows of its process."""
    accelerate.state.PartialState._reset_state()
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@contextmanager
def adapted(*installs: Callable[[Seams], None]) -> Iterator[None]:
    """accelerate, and what else is installed, are adapted inside."""
    accelerate: Any = sys.modules["accelerate"]
    seams = Seams()
    with threads.seams():
        our_accelerate.install(seams, accelerate)
        for install in installs:
            install(seams)
        try:
            yield
        finally:
            seams.restore()
            forget(accelerate)

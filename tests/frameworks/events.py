"""What TensorBoard shows of the event files below a directory."""

from __future__ import annotations

from pathlib import Path

Point = tuple[int, float]
"""(step, value)"""


def shown(home: Path) -> dict[str, list[Point]]:
    """The points of each "DIRECTORY: NAME", as TensorBoard shows them; the directory is below `home`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[Point]] = {}
    for directory in sorted({file.parent for file in home.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            points = [(event.step, event.value) for event in events.Scalars(name)]
            found[f"{directory.relative_to(home)}: {name}"] = points
    return found

"""A failing run with as few things that go wrong as it needs to fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.sim.directed import draw
from tests.sim.faults import TROUBLES, Scene
from tests.sim.replicas import with_quorum
from tests.sim.world import World


def kept(scene: Scene, what: Iterable[str]) -> Scene:
    """The scene with nothing going wrong but these: faults by their place in the list, and troubles by name."""
    names = set(what)
    unknown = names - set(parts(scene))
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: the scene has {', '.join(parts(scene)) or 'no faults'}")
    faults = tuple(fault for place, fault in enumerate(scene.faults) if str(place) in names)
    calm = {trouble: 0.0 for trouble in TROUBLES if trouble not in names}
    return replace(scene, faults=faults, **calm)  # type: ignore[arg-type]


def parts(scene: Scene) -> list[str]:
    """Everything that goes wrong in it, as `kept` takes it."""
    return [*map(str, range(len(scene.faults))), *(trouble for trouble in TROUBLES if getattr(scene, trouble))]


def failure(seed: int, scene: Scene) -> str:
    """Why the run fails, or empty."""
    try:
        World(seed, scene=scene).run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:1000]}"
    return ""


def fewest(seed: int, scene: Scene) -> tuple[list[str], str]:
    """Leave out one part after the other as long as the run still fails, for whatever reason. What is needed, and why
    it fails; no reason if it does not fail at all."""
    needed, because = parts(scene), failure(seed, scene)
    shrunk = bool(because)
    while shrunk:
        shrunk = False
        for part in list(needed):
            fewer = [other for other in needed if other != part]
            if then := failure(seed, kept(scene, fewer)):
                needed, because, shrunk = fewer, then, True
    return needed, because


def fewest_faults(seed: int, *, quorum: bool = False) -> Iterator[str]:
    """What to say of a failing seed."""
    scene = with_quorum(draw(seed), seed) if quorum else draw(seed)
    needed, because = fewest(seed, scene)
    if not because:
        yield f"seed {seed} does not fail"
        return
    yield f"seed {seed} ({scene.name}) still fails with {len(needed)} of {len(parts(scene))}:"
    for part in needed:
        yield f"  {part}: {scene.faults[int(part)]}" if part.isdigit() else f"  {part} = {getattr(scene, part)}"
    yield f"  {because}"
    keep = ",".join(needed) or "nothing"
    yield f"replay it: python -m tests.sim --seed {seed}{' --quorum' * quorum} --keep {keep} -v"

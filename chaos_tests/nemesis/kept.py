"""What scripts in rounds have kept in memory: a flipped bit, scripts that die while they write it, lost memories."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaos_tests.nemesis import nodes, scripts, signals, workers
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.scenario.schedule import Planned
from elastic.errors import CheckpointCorrupt
from elastic.protocol.worker_id import node_of
from elastic.records.job_directory import read_settings
from runtime.recovery.kept.place import directory_of, rounds_in
from runtime.recovery.kept.segment import HEADER_BYTES, Header, read_header, segments_in

NOTED_S = 15.0
"""Seconds until the end of a script is in the journal."""


def struck(scene: Scene, running: RunningFault, done: Mapping[str, Any]) -> None:
    """A script, or a worker that takes a mirror, has killed itself at a point of writing a segment. If its round ends
    at the same instant, its worker does not have to end with it."""
    assert running.armed is not None
    worker, pid = str(done["worker_id"]), int(done["pid"])
    is_worker = scene.world.pids[worker] == pid
    scene.victims.targeted.discard(worker)
    running.armed, running.injected = None, True
    running.awaits_event, running.awaits_pid = "worker_exited" if is_worker else "script_ended", pid
    running.until_s = time.monotonic() + NOTED_S
    scene.teller.injected(running.planned, scene.victims.pids([worker]), int(done["t_mono_ns"]), script=pid)
    who = worker if is_worker else f"a script of {worker}"
    scene.teller.told(running.planned, f"{who} gets SIGKILL at {running.planned.place}")


def flip(scene: Scene, planned: Planned) -> None:
    """Flip a bit of a newest segment on the machine of a member, and kill a script there. The others cannot write over
    the segment: a step needs all of them, and a script writes into its oldest segment."""
    (worker,) = workers.targets(scene, planned)
    dice, memory = scene.victims.dice(planned), _memory(scene, node_of(worker))
    path, header = dice.choice(_newest(memory))
    at, bit = dice.randrange(header.body + header.table), 1 << dice.randrange(8)
    begun_ns, script = time.monotonic_ns(), dice.choice(scene.world.scripts[worker])
    _flip(path, HEADER_BYTES + at, bit)
    signals.send([script], signal.SIGKILL)
    pids = scene.victims.pids([worker])
    scene.teller.injected(planned, pids, begun_ns, script=script, spoiled=f"{path.parent.name}/{path.name}")
    scene.running.append(RunningFault(planned, injected=True, awaits_event="kept_damaged"))
    scene.teller.told(planned, f"bit {bit} of byte {at} of step {header.step}, part {header.part} on {node_of(worker)}")


def lose_nodes(scene: Scene, planned: Planned, *, count: int) -> None:
    """A node, or with count 2 also the next one, which mirrors what it keeps: processes and memory. One node stays."""
    scripts.check(scene)
    job = scene.on_nodes()
    order = list(dict.fromkeys(map(node_of, scene.world.members)))
    first = order.index(nodes.some_node(scene, planned))
    chosen = [order[(first + number) % len(order)] for number in range(count)]
    if len(order) <= count:
        raise NotNow(f"{len(order)} nodes have members, and one has to stay")
    memories = {node: _memory(scene, node) for node in chosen}
    begun_ns, agents = time.monotonic_ns(), [pid for node in chosen for pid in nodes.agents_on(scene, node)]
    for node in chosen:
        job.cluster.end(node)

    def back() -> None:
        for node in chosen:
            job.cluster.node(node)

    text = f"SIGKILL to {' and '.join(chosen)}, and their memory is gone"
    nodes.note(scene, planned, begun_ns, chosen, agents, back, text)
    for memory in memories.values():
        shutil.rmtree(memory, ignore_errors=True)  # what kept it removes it, too


def _memory(scene: Scene, node: str) -> str:
    """The job's directory in the memory of a node. Raises NotNow."""
    place = scene.nodes.place(node) if scene.nodes is not None else scene.directory
    if not (memory := read_settings(place).memory):
        raise NotNow(f"the job has no directory in the memory of {node}")
    return memory


def _newest(memory: str) -> list[tuple[Path, Header]]:
    """The newest segment of each part of the newest round. Raises NotNow if a part has segments of fewer than two
    steps."""
    rounds = rounds_in(memory)
    found: dict[tuple[int, int], list[tuple[int, Path, Header]]] = {}
    for path in segments_in(directory_of(memory, rounds[-1])) if rounds else ():
        try:
            header = read_header(path)
        except CheckpointCorrupt:
            continue
        if header is not None:
            found.setdefault((header.group, header.part), []).append((header.step, path, header))
    if not found or any(len(every) < 2 for every in found.values()):
        raise NotNow("two steps of the round in progress are not kept yet")
    return [max(every)[1:] for _, every in sorted(found.items())]


def _flip(path: Path, at: int, bit: int) -> None:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        (byte,) = os.pread(file, 1, at)
        os.pwrite(file, bytes([byte ^ bit]), at)
    finally:
        os.close(file)

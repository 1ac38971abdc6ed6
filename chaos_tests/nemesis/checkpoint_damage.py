"""What is done to the newest checkpoint of a job while nobody writes one."""

from __future__ import annotations

import shutil
from pathlib import Path

from chaos_tests.cluster.cluster_job import NodesJob
from chaos_tests.nemesis.scene import NotNow, Scene
from chaos_tests.nemesis.signals import Impossible
from chaos_tests.scenario.faults import Damage
from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.naming import MANIFEST, PERIODIC
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.records.job_directory import read_settings


def spoil(scene: Scene, job: NodesJob, damage: Damage) -> str:
    """Damage the newest checkpoint, and empty the memory of all machines. Returns its name. Raises NotNow or
    Impossible."""
    settings = {node: read_settings(job.place(node)) for node in job.nodes}
    first = settings[job.nodes[0]]
    storage = storage_at(first.root)
    series = Series(storage)
    whole = [found for found in map(series.verify, series.all(first.job_id)) if not found.problem]
    if len(whole) < 2 or whole[1].name.step <= scene.world.began_step:
        raise NotNow("there are no two whole checkpoints newer than where the job began")
    newest, before = (found.manifest for found in whole[:2])
    assert newest is not None and before is not None
    try:
        _damage(Path(storage.url) / PERIODIC, newest, before, damage)
    except OSError as error:
        raise Impossible(f"{error.filename} cannot be changed: {error.strerror}") from error
    for memory in (one.memory for one in settings.values() if one.memory):
        shutil.rmtree(Path(memory) / PERIODIC, ignore_errors=True)
    return newest.entry


def _damage(home: Path, newest: Manifest, before: Manifest, damage: Damage) -> None:
    largest = max(newest.files, key=lambda file: file.size)
    path = home / newest.entry / largest.name
    match damage:
        case Damage.FLIPPED:
            with path.open("r+b") as opened:
                opened.seek(largest.size // 2)
                byte = opened.read(1)[0]
                opened.seek(largest.size // 2)
                opened.write(bytes([byte ^ 1]))
        case Damage.TRUNCATED:
            with path.open("r+b") as opened:
                opened.truncate(largest.size // 2)
        case Damage.SWAPPED:
            older = {file.name: file.sha256 for file in before.files}
            names = (file.name for file in newest.files if older.get(file.name, file.sha256) != file.sha256)
            if (name := next(names, None)) is None:
                raise NotNow("the two newest checkpoints have no file that differs")
            shutil.copyfile(home / before.entry / name, home / newest.entry / name)
        case Damage.UNLISTED:
            (home / newest.entry / MANIFEST).unlink()

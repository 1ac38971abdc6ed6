"""A worker, a newcomer or a later run whose data is not that of the others is told so before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, Disagree
from runtime.session import Session
from tests.unit.features import mlp, train
from tests.unit.jobs import Recorded, dataset, make_job
from tests.unit.worlds import World


def script(session: Session, samples: int = 50, **arguments: Any) -> str:
    job = make_job(session)
    data = job.loader(dataset(samples), 16, shards=4, **{"shuffle": True, **arguments})
    train(job, mlp(), data=data)
    digest = job.digest()
    job.close()
    return digest


def test_workers_with_datasets_of_other_lengths_disagree_before_the_first_step() -> None:
    world = World(3)
    world.run(lambda session: script(session, 49 if session.worker_id == "w1" else 50))
    assert {type(error) for error in world.errors.values()} == {Disagree}
    said = str(world.errors["w0"])
    assert '"samples": 49' in said and '"samples": 50' in said and "w1=" in said
    assert not any(session.records for session in world.sessions.values())


def test_a_newcomer_with_other_data_is_refused_and_the_members_go_on() -> None:
    world = World(2)
    world.run(
        lambda session: script(session, 40 if session.worker_id == "n0" else 50), newcomers=1, asked_at=1, admit_at=99
    )
    assert list(world.errors) == ["n0"]
    assert isinstance(world.errors["n0"], ConfigError)
    assert "samples: 40 here, 50 there" in str(world.errors["n0"])
    assert world.digests == dict.fromkeys(("w0", "w1"), script(Recorded()))


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The next job goes on in the middle of an epoch of 50 samples; the digest with which the first one ended."""

    def configure(**changes: Any) -> None:
        chosen = Settings(root=str(tmp_path), job="train", job_id="feed", every="3 steps", **changes)
        for name, value in chosen.to_environment().items():
            monkeypatch.setenv(name, value)

    configure()
    digest = script(Recorded())
    found = Series(storage_at(str(tmp_path))).all("feed")[-1]
    assert found.name.step == 3
    configure(resume=str(found.name))
    return digest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"samples": 51}, "samples: 51 here, 50 there"),
        ({"tail": "pad"}, "tail: pad here, drop there"),
        ({"shuffle": False}, "order: in order here, shuffled there; seed: None here, 0 there"),
        ({"seed": 1}, "seed: 1 here, 0 there"),
        ({"shuffle": False, "weights": [1] * 50}, "order: weighted here, shuffled there; weights: "),
    ],
)
def test_a_job_does_not_go_on_with_other_data(resumed: str, arguments: dict[str, Any], said: str) -> None:
    session = Recorded()
    with pytest.raises(ConfigError) as raised:
        script(session, **arguments)
    assert said in str(raised.value) and "start anew with --fresh" in str(raised.value)
    assert session.records == []


def test_it_goes_on_with_the_same(resumed: str) -> None:
    session = Recorded()
    assert script(session) == resumed
    assert session.records[0].step == 3

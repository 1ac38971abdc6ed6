"""What a worker does for its script at the beginning of a round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it, and its stubs lack it

from elastic.errors import NoMemory
from runtime.frontends.restart import kept_sources, supervisor
from runtime.frontends.restart.kept_sources import ROOM_BYTES, KeptSources
from runtime.frontends.restart.supervisor import Supervisor
from runtime.recovery.kept.choice import HeldSegment, RoundNumber, ThinPart


def made(home: Path, session: Any, address: str = "127.0.0.1") -> Supervisor:
    """The supervisor of worker a.0.0."""
    timing = SimpleNamespace(stopped_s=1.0)
    told = SimpleNamespace(address=address, job_dir=home, worker_id="a.0.0", timing=timing, certs=None)
    return Supervisor(session, cast(Any, None), cast(Any, told))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rank_0_has_a_store_at_the_address_of_its_node(address: str, tmp_path: Path) -> None:
    place = SimpleNamespace(generation=1, world=2, rank=0)
    session = SimpleNamespace(place=lambda: place, planned_since=lambda generation: False, record=None)
    worker = made(tmp_path, session, address)
    worker._follow_generation()
    found = worker._address()
    assert found is not None and found[0] == address
    TCPStore(*found, is_master=False).set("key", "value")


def test_a_part_for_which_there_is_no_memory_is_not_copied_and_the_round_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[dict[str, Any]] = []
    session = SimpleNamespace(
        worker_id="a.0.0", record=None, dial=lambda: None, note=lambda event, **fields: notes.append(fields)
    )

    def pull(*_: Any) -> None:
        raise NoMemory("900 MB are announced")

    monkeypatch.setattr(supervisor, "pull", pull)
    worker = made(tmp_path, session)
    held = HeldSegment(7, RoundNumber(0, 3), 0, 1, 2)
    worker._copy_thin((ThinPart(held, "b.0.0", ("a.0.0",)),))
    assert worker._at.copied and not worker._at.held
    assert [(note["source"], note["step"], note["because"]) for note in notes] == [("b.0.0", 7, "900 MB are announced")]


@pytest.mark.parametrize(
    ("members", "free", "wanted"),
    [
        (("a.0.0", "b.0.0"), ROOM_BYTES, True),
        (("a.0.0", "b.0.0"), ROOM_BYTES - 1, None),
        (("a.0.0", "a.1.0"), 0, True),
        (("a.0.0", "b.0.0"), None, False),
    ],
)
def test_a_machine_without_room_takes_no_part_where_scripts_have_to_be_told_of_others(
    members: tuple[str, ...], free: int | None, wanted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """free: bytes; None: the directory is gone."""

    def free_bytes(directory: str) -> int:
        if free is None:
            raise FileNotFoundError(directory)
        return free

    monkeypatch.setattr(kept_sources, "free_bytes", free_bytes)
    session = SimpleNamespace(worker_id="a.0.0")
    assert KeptSources(cast(Any, session), cast(Any, None), "/memory").has_room(members) == wanted
    assert not KeptSources(cast(Any, session), cast(Any, None), "").has_room(members)

"""What a worker does for its script at the beginning of a round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it, and its stubs lack it

from runtime.frontends.restart.supervisor import Supervisor


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_rank_0_has_a_store_at_the_address_of_its_node(address: str, tmp_path: Path) -> None:
    place = SimpleNamespace(generation=1, world=2, rank=0)
    timing = SimpleNamespace(stopped_s=1.0)
    told = SimpleNamespace(address=address, job_dir=tmp_path, worker_id="a.0.0", timing=timing)
    session = SimpleNamespace(place=lambda: place, planned_since=lambda generation: False, record=None)
    worker = Supervisor(cast(Any, session), cast(Any, None), cast(Any, told))
    worker._follow_generation()
    found = worker._address()
    assert found is not None and found[0] == address
    TCPStore(*found, is_master=False).set("key", "value")

"""NCCL where a GPU is: `make test-gpu`. Several members share one GPU, which is right for bits and wrong for times.

Nothing here has been run yet: no machine with a GPU was to be had when it was written.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from elastic.records import ledger
from runtime.reduction.partial_sum import Partial
from runtime.ring.nccl import make_group
from runtime.ring.process_group import meeting
from runtime.state.encoding import to_blobs
from tests.live.exchanges import kill_and_freeze
from tests.live.jobs import Job
from tests.unit.rings import rings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here: nothing of this was tried")

TRAINER = Path(__file__).parent / "trainer.py"
SITE = Path(__file__).parent / "site"
ELEMENTS = 16 << 20
ROUNDS = 20


def quiet(home: Path, ring: str) -> tuple[str, list[dict[str, object]]]:
    """The digest and the ledger of a run of one worker without faults."""
    with Job(home, "--workers", "1", "--ring", ring, "--quiet", str(TRAINER), name=f"quiet-{ring}") as job:
        assert job.wait() == 0
        return job.result["digest"], ledger.read(job.dir / "steps.jsonl")


def test_kills_freezes_and_joins_leave_the_bits_of_the_quiet_run(tmp_path: Path) -> None:
    digest, steps = quiet(tmp_path, "nccl")
    with Job(tmp_path, "--workers", "3", "--ring", "nccl", "--quiet", str(TRAINER), site=SITE) as job:
        job.pace(0.05)
        job.shut("end")
        kill_and_freeze(job)
        assert job.result["digest"] == digest
        assert ledger.compare(steps, job.steps()) is None


def test_sums_on_the_gpu_have_the_bits_of_sums_on_the_cpu(tmp_path: Path) -> None:
    assert quiet(tmp_path, "nccl") == quiet(tmp_path, "tcp")


def test_what_one_rank_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints; nothing is compared with anything."""
    from runtime.reduction.over_transport import exchange_over

    device = torch.device("cuda:0")
    groups = {"float32": ELEMENTS}
    root = Partial(0, 1, {"float32": torch.randn(ELEMENTS, device=device)})
    out = {"float32": torch.empty(ELEMENTS, device=device)}
    times_ms: dict[str, list[float]] = {"reduction": [], "copy to the CPU": []}
    with rings(1) as (ring,), meeting(make_group, "127.0.0.1", device)(1, ring.members, 0) as met:
        ring.transport = met.connect(met.offer)
        assert ring.transport is not None
        for op in range(ROUNDS):
            begun_s = time.perf_counter()
            _, result = exchange_over(
                ring,
                transport=ring.transport,
                op=op,
                header={},
                roots=[root],
                units=1,
                groups=groups,
                check=lambda headers: None,
                out=out,
            )
            reduced_s = time.perf_counter()
            (blob,) = to_blobs([result.flats["float32"]])
            times_ms["reduction"].append(1000 * (reduced_s - begun_s))
            times_ms["copy to the CPU"].append(1000 * (time.perf_counter() - reduced_s))
            assert blob.view(torch.float32).equal(root.flats["float32"].cpu())
    with capsys.disabled():
        for what, ms in times_ms.items():
            print(f"\n{what} of {ELEMENTS * 4 >> 20} MiB by one rank: median {statistics.median(ms):.2f} ms")

"""NCCL where a GPU is: `make test-gpu`. Several members share one GPU, which is right for bits and wrong for times."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from elastic.records import ledger
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.ring.nccl import make_group
from runtime.allreduce.ring.process_group import meeting
from runtime.recovery.state.host_bytes import HostBytes
from tests.live.exchanges import kill_and_freeze
from tests.live.jobs import Job
from tests.unit.rings import rings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here: nothing of this was tried")

SCRIPTS = Path(__file__).parent / "scripts"
TRAINER = SCRIPTS / "trainer.py"
SITE = Path(__file__).parent / "site"
ELEMENTS = 16 << 20
ROUNDS = 20

Result = tuple[str, list[dict[str, object]]]


def quiet(home: Path, *options: str) -> Result:
    """The digest and the ledger of a run of one worker without faults."""
    words = ("--workers", "1", *options, "--quiet", str(TRAINER))
    with Job(home, *words, name=f"quiet{''.join(options)}") as job:
        assert job.wait() == 0
        return job.result["digest"], ledger.read(job.dir / "steps.jsonl")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--overlap", "on"),
        ("--reduction", "fixed"),
        ("--reduction", "fixed", "--overlap", "on"),
        ("--compression", "bf16"),
        ("--compression", "int8"),
    ],
    ids=" ".join,
)
def test_kills_freezes_and_joins_leave_the_bits_of_the_quiet_run(options: tuple[str, ...], tmp_path: Path) -> None:
    digest, steps = quiet(tmp_path, "--ring", "nccl", *options)
    with Job(tmp_path, "--workers", "3", "--ring", "nccl", *options, "--quiet", str(TRAINER), site=SITE) as job:
        job.pace(0.05)
        job.shut("end")
        kill_and_freeze(job)
        assert {line["over"] for line in job.events("ring_up")} == {"nccl"}
        assert job.result["digest"] == digest
        assert ledger.compare(steps, job.steps()) is None
        assert not list(job.events("overlap_given_up"))


@pytest.mark.parametrize("reduction", ["exact", "fixed"])
def test_sums_on_the_gpu_have_the_bits_of_sums_on_the_cpu(reduction: str, tmp_path: Path) -> None:
    options = ("--reduction", reduction)
    assert quiet(tmp_path, "--ring", "nccl", *options) == quiet(tmp_path, "--ring", "tcp", *options)


def test_a_script_for_torchrun_survives_the_loss_of_rank_0(tmp_path: Path) -> None:
    words = ("--ranks", "4", str(SCRIPTS / "torchrun.py"), "4")
    with Job(tmp_path, "--workers", "1", *words, name="quiet") as job:
        assert job.wait() == 0, job.output
        wanted = json.loads((job.dir / "result.json").read_text())["digest"]
    with Job(tmp_path, "--workers", "3", *words, environment={"NAP": "0.15"}) as job:
        job.await_steps(3)
        job.send(str(job.status()["members"][0]["worker_id"]))
        assert job.wait() == 0, job.output
        assert json.loads((job.dir / "result.json").read_text())["digest"] == wanted


def test_what_one_rank_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints; nothing is compared with anything."""
    from runtime.allreduce.reduction.over_mesh import ReductionRequest
    from runtime.allreduce.reduction.over_transport import exchange_over

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
                ring, ReductionRequest(op=op, roots=[root], units=1, groups=groups), transport=ring.transport, out=out
            )
            reduced_s = time.perf_counter()
            (blob,) = HostBytes([result.flats["float32"]]).blobs()
            times_ms["reduction"].append(1000 * (reduced_s - begun_s))
            times_ms["copy to the CPU"].append(1000 * (time.perf_counter() - reduced_s))
            assert blob.view(torch.float32).equal(root.flats["float32"].cpu())
    with capsys.disabled():
        for what, ms in times_ms.items():
            print(f"\n{what} of {ELEMENTS * 4 >> 20} MiB by one rank: median {statistics.median(ms):.2f} ms")


def test_what_a_step_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the median step of scripts/gpt.py: alone, under DDP, and under `elastic run`; nothing is compared."""
    lines = {}
    for way in ("plain", "ddp"):
        words = [sys.executable, str(SCRIPTS / "gpt.py"), way]
        lines[way] = subprocess.run(words, capture_output=True, text=True, check=True, timeout=200).stdout
    for ring, options in (
        ("nccl", ()),
        ("nccl", ("--overlap", "on")),
        ("nccl", ("--reduction", "fixed")),
        ("nccl", ("--reduction", "fixed", "--overlap", "on")),
        ("tcp", ()),
    ):
        words = ["--workers", "1", "--ring", ring, *options]
        with Job(tmp_path, *words, str(SCRIPTS / "gpt.py"), "elastic", name="".join(words)) as job:
            assert job.wait() == 0, job.output
            lines[" ".join(words)] = job.output
    with capsys.disabled():
        for way, output in lines.items():
            print(f"\n{way}: {next(line for line in output.splitlines() if 'step ' in line)}", end="")

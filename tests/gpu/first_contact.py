"""The first minutes with a GPU: what NCCL and the driver do when a member dies, hangs, never comes, or ends.

    python -m tests.gpu.first_contact

Two members, on one GPU, and then on two if there are two. Each case prints when what happened, and whether that is
within its limit; if not, what is likely to be wrong. Every wait is bounded: a case takes 60 s at most. Without a GPU
nothing is tried. The exit code is 1 if a limit was missed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

BOUND_S = 60.0
CONNECT_S = 5.0
BYTES = 64 << 20
ROUNDS, BREAKS_AT = 40, 20
ABORT_AFTER_S = 1.0
"""What the ring takes, at most, to hear of a death that NCCL does not report."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What member 0 reports in a case, and the most seconds, or the value, of it. otherwise: what is wrong above it."""

    name: str
    most: float
    otherwise: str


_FREED = Limit(
    "freed_s",
    1.5,
    "an abort does not end NCCL's kernels (about 30 s: the wait for the device to come to rest has given up)",
)
_CLOSED = Limit(
    "closed_s", 1.0, "torch's watchdog sleeps before the group is freed (about 60 s); see nccl_environment.py"
)
_WORKS = Limit("broken", 0, "the device does not work any more after an abort")
_CODE = Limit("code", 0, "134: a thread was in torch's C++ code when the interpreter ended (runtime/script_end.py)")
CASES = {
    "kill": ("member 1 gets SIGKILL in an exchange", (_FREED, _CLOSED, _WORKS)),
    "stop": ("member 1 is frozen in an exchange", (_FREED, _CLOSED, _WORKS)),
    "init": (
        "member 1 never comes to the communicator",
        (
            Limit(
                "failed_s", CONNECT_S + 2, "torch waits for its own time (30 minutes): TORCH_NCCL_NONBLOCKING_TIMEOUT"
            ),
        ),
    ),
    "end": ("the script ends while its communicator is aborted", (_CODE,)),
}


def main() -> int:
    import torch

    version = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {version}")
    if not torch.cuda.is_available():
        driver = " Its driver may be older than that CUDA." if list(Path("/dev").glob("nvidia[0-9]*")) else ""
        print(f"torch sees no GPU: nothing was tried.{driver}")
        return 1 if driver else 0
    count = torch.cuda.device_count()
    print(f"{count} GPUs: {', '.join(torch.cuda.get_device_name(gpu) for gpu in range(count))}")
    layouts = [("on one GPU", (0, 0)), *([("each on a GPU of its own", (0, 1))] if count > 1 else [])]
    missed = [
        f"{case}, {layout}" for layout, gpus in layouts for case in CASES if not within_limits(case, layout, gpus)
    ]
    print(f"\nmissed: {'; '.join(missed)}" if missed else "\nall within their limits")
    return 1 if missed else 0


def within_limits(case: str, layout: str, gpus: tuple[int, int]) -> bool:
    text, limits = CASES[case]
    print(f"\n{case}: {text}, {layout}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        words = [sys.executable, "-m", "tests.gpu.first_contact", case, directory]
        other = subprocess.Popen([*words, "1", str(gpus[1])], env=environment(1, gpus))
        try:
            done = subprocess.run([*words, "0", str(gpus[0])], env=environment(0, gpus), check=False, timeout=BOUND_S)
            code: float = done.returncode
        except subprocess.TimeoutExpired:
            print(f"  member 0 was still there after {BOUND_S:g} s")
            code = float("inf")
        finally:
            other.kill()
            other.wait()
        report = Path(directory) / "report"
        seen: dict[str, float] = {**(json.loads(report.read_text()) if report.exists() else {}), "code": code}
    good = True
    for limit in limits:
        value = seen.get(limit.name, float("inf"))
        good &= value <= limit.most
        print(
            f"  {limit.name} {value:.2f}, at most {limit.most:g}", "" if value <= limit.most else f": {limit.otherwise}"
        )
    return good


def environment(rank: int, gpus: tuple[int, int]) -> dict[str, str]:
    """That of a worker; two members on one GPU are taken for two hosts, as NCCL refuses them on one."""
    from elastic.agent.worker.nccl_environment import nccl_variables

    given = {**os.environ, "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{CONNECT_S:g}", "NCCL_DEBUG": "WARN"}
    if gpus[0] == gpus[1]:
        given |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return {**given, **nccl_variables(given, 2)}


# ---------------------------------------------------------------------------------------------------------- one member


def member(case: str, directory: Path, rank: int, gpu: int) -> None:
    import torch

    from elastic.errors import BuildFailed
    from runtime.allreduce.ring import nccl
    from runtime.allreduce.ring.process_group import meeting

    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    torch.ones(1, device=device)
    begun_s = time.monotonic()

    def say(what: str) -> None:
        print(f"  {time.monotonic() - begun_s:6.2f} s  member {rank}: {what}", flush=True)

    offer = directory / "offer"
    with meeting(nccl.make_group, "127.0.0.1", device)(1, ["a", "b"], rank) as met:
        if rank == 0:
            offer.with_suffix(".new").write_text(met.offer)
            offer.with_suffix(".new").rename(offer)
        while not offer.exists():
            time.sleep(0.01)
        if case == "init" and rank == 1:
            threading.Event().wait(BOUND_S)
            return
        asked_s = time.monotonic()
        try:
            transport = met.connect(offer.read_text())
        except BuildFailed as error:
            say(f"BuildFailed: {str(error)[:90]}")
            report(directory, rank, {"failed_s": time.monotonic() - asked_s})
            return
    say("connected")
    if case == "end":
        transport.abort()  # type: ignore[union-attr]
        return
    report(directory, rank, break_exchange(case, rank, transport, device, say))


def break_exchange(case: str, rank: int, transport: Any, device: Any, say: Any) -> dict[str, float]:
    import torch

    from elastic.errors import DeviceHung, RingBroken

    mine = torch.ones(BYTES, dtype=torch.uint8, device=device)
    came = torch.empty_like(mine)
    aborted_s: list[float] = []

    def abort() -> None:
        aborted_s.append(time.monotonic())
        say("abort")
        transport.abort()

    try:
        for number in range(ROUNDS):
            if number == BREAKS_AT and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL if case == "kill" else signal.SIGSTOP)
            if number == BREAKS_AT:
                threading.Timer(ABORT_AFTER_S, abort).start()
            with transport.attempt():
                transport.exchange({1 - rank: mine}, {1 - rank: came})
    except (RingBroken, DeviceHung) as error:
        say(f"{type(error).__name__}: {str(error)[:90]}")
    # NCCL may have reported the death itself, before anybody aborted.
    freed_s = max(0.0, time.monotonic() - aborted_s[0]) if aborted_s else 0.0
    begun_s = time.monotonic()
    transport.close()
    closed_s = time.monotonic() - begun_s
    broken = torch.arange(4).to(device).add(0).shape != (4,) or torch.arange(4).to(device).cpu().tolist() != [
        0,
        1,
        2,
        3,
    ]
    torch.cuda.synchronize()
    return {"freed_s": freed_s, "closed_s": closed_s, "broken": float(broken)}


def report(directory: Path, rank: int, seen: dict[str, float]) -> None:
    if rank == 0:
        (directory / "report").write_text(json.dumps(seen))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    from runtime.script_end import run_to_end

    run_to_end(partial(member, sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))

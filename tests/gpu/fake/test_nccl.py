"""`--ring nccl` by one member of a world, on the fake device: what hangs, what fails, and what is left behind.

The other members are not there, and the fake NCCL does not miss them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.worker.nccl_environment import nccl_variables
from tests.gpu.fake.device import FakeDevice

WORKER = nccl_variables({}, 2)
"""What the agent of a job of two workers tells them."""
SOON_S = 30.0
"""What is over at once; the waits that torch has by itself take a minute or more."""


@contextmanager
def connected(generation: int = 1, sums: bool = False, world_size: int = 2) -> Iterator[Any]:
    """Rank 0 of a world."""
    import torch

    from runtime.allreduce.ring import nccl
    from runtime.allreduce.ring.process_group import meeting

    meet = meeting(nccl.make_group, "127.0.0.1", torch.device("cuda", 0), sums=sums)
    with meet(generation, [f"w{rank}" for rank in range(world_size)], 0) as met:
        transport = met.connect(met.offer)
    assert transport is not None
    try:
        yield transport
    finally:
        transport.close()


def outcome(tensors: int = 1, during: Any = None, then: Any = None) -> dict[str, Any]:
    """What becomes of an attempt with exchanges that hang. during: called between two of them. then: called behind."""
    import torch

    from elastic.errors import DeviceHung, RingBroken

    device = FakeDevice.of_this_process()
    seen: dict[str, Any] = {}
    with connected() as transport:
        mine = torch.empty(1000, dtype=torch.uint8, device="cuda")
        device.set("exchange_hangs")
        began_s = time.monotonic()
        try:
            with transport.attempt():
                for number in range(tensors):
                    if number and during is not None:
                        during()
                    transport.exchange({1: mine}, {1: torch.empty_like(mine)})
                if then is not None:
                    then(transport)
        except (RingBroken, DeviceHung) as error:
            seen |= {"error": type(error).__name__, "because": str(error), "aborted": device.count("aborts")}
        for fault in ("abort_in_vain", "cuda_fails"):  # of which torch never gets free
            device.set(fault, 0)
        seen["left_s"] = time.monotonic() - began_s
        began_s = time.monotonic()
        transport.close()
        seen["closed_s"] = time.monotonic() - began_s
    return {**seen, "used_after_free": device.count("used_after_free")}


# ------------------------------------------------------------------------------------------------------- without faults


def calls() -> dict[str, int]:
    import torch

    device = FakeDevice.of_this_process()
    with connected(sums=True) as transport:
        seen = {"sums of the greeting": device.count("sums")}
        mine = torch.empty(1000, dtype=torch.uint8, device="cuda")
        before = device.count("sends"), device.count("receives")
        with transport.attempt():
            transport.exchange({1: mine}, {1: torch.empty_like(mine)})
        seen |= {"sends": device.count("sends") - before[0], "receives": device.count("receives") - before[1]}
        with transport.attempt():
            transport.add_up([mine.to(torch.int32), mine.to(torch.int16)])
    return {**seen, **{name: device.count(name) for name in ("sums", "aborts", "used_after_free")}}


def test_each_exchange_calls_nccl_twice_a_member_and_each_tensor_of_a_sum_once(device: FakeDevice) -> None:
    wanted = {"sums of the greeting": 1, "sends": 2, "receives": 2, "sums": 3, "aborts": 1, "used_after_free": 0}
    assert device.call(calls, environment=WORKER) == wanted


def sums_of_a_greeting() -> int:
    with connected():
        return FakeDevice.of_this_process().count("sums")


def test_who_does_not_add_up_makes_no_connections_for_it(device: FakeDevice) -> None:
    assert device.call(sums_of_a_greeting, environment=WORKER) == 0


def generations(count: int) -> dict[str, list[int]]:
    import torch

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    seen: dict[str, list[int]] = {"stream": [], "reserved": []}
    left_by_two = left()
    for generation in range(1, count + 1):
        with connected(generation) as transport, transport.attempt():
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            seen["stream"].append(torch.cuda.current_stream().cuda_stream)
        seen["reserved"].append(torch.cuda.memory_reserved())
        left_by_two = left() if generation == 2 else left_by_two
    end_s = time.monotonic() + SOON_S
    while left() > left_by_two and time.monotonic() < end_s:  # a thread of the last one may be about to end
        time.sleep(0.01)
    return {**seen, "left": [*left()], "left_by_two": [*left_by_two]}


def test_generations_leave_no_memory_no_thread_and_no_file_behind(device: FakeDevice) -> None:
    seen = device.call(generations, 12, environment=WORKER)
    assert len(set(seen["stream"])) == 1
    assert len(set(seen["reserved"])) == 1
    assert seen["left"] <= seen["left_by_two"]


def contexts() -> list[int]:
    import torch

    from runtime.allreduce.ring import nccl
    from runtime.allreduce.ring.process_group import meeting

    torch.cuda.set_device(1)
    device = FakeDevice.of_this_process()

    def member() -> None:
        gpu = torch.device("cuda", 1)
        with meeting(nccl.make_group, "127.0.0.1", gpu)(1, ["w0", "w1"], 0) as met:
            transport = met.connect(met.offer)
        assert transport is not None
        with transport.attempt():
            mine = torch.empty(1000, dtype=torch.uint8, device=gpu)
            transport.exchange({1: mine}, {1: torch.empty_like(mine)})
        transport.close()

    thread = threading.Thread(target=member)
    thread.start()
    thread.join()
    return [device.touched(0), device.touched(1)]


def test_a_worker_takes_no_memory_on_the_gpu_of_another_one(device: FakeDevice) -> None:
    device.set("devices", 2)
    on_0, on_1 = device.call(contexts, environment=WORKER)
    assert on_0 == 0
    assert on_1 > 0


def ticks() -> dict[str, int]:
    """How often another thread runs while NCCL does not return."""
    device, counted, over = FakeDevice.of_this_process(), [0], threading.Event()

    def tick() -> None:
        while not over.wait(0.01):
            counted[0] += 1

    threading.Thread(target=tick, daemon=True).start()
    device.set("init_ms", 1000)
    with connected() as transport:
        made = counted[0]
        device.set("abort_ms", 1000)
        counted[0] = 0
        transport.close()
    over.set()
    return {"made": made, "aborted": counted[0]}


def test_other_threads_run_while_nccl_does_not_return(device: FakeDevice) -> None:
    seen = device.call(ticks, environment=WORKER)
    assert seen["made"] > 5 and seen["aborted"] > 5


def connects_beside_an_exchange() -> bool:
    """A generation that is planned connects while the one before still trains."""
    import torch

    from elastic.errors import RingBroken

    device = FakeDevice.of_this_process()
    with connected(1) as old:
        device.set("exchange_hangs", world=2)
        launched = len(device.notes("exchange"))

        def train() -> None:
            mine = torch.empty(1000, dtype=torch.uint8, device="cuda")
            with suppress(RingBroken), old.attempt():
                old.exchange({1: mine}, {1: torch.empty_like(mine)})

        thread = threading.Thread(target=train)
        thread.start()
        while len(device.notes("exchange")) == launched:
            time.sleep(0.01)
        with connected(2, world_size=3):
            still = thread.is_alive()
        old.abort()
        thread.join()
    return still


def test_a_planned_generation_connects_beside_an_exchange_of_the_one_before(device: FakeDevice) -> None:
    """On one stream two members could wait for each other: one has the exchange first there, and one the greeting."""
    assert device.call(connects_beside_an_exchange, environment=WORKER)


# ---------------------------------------------------------------------------------------------------------------- hangs


def hung_init() -> str:
    from elastic.errors import BuildFailed

    FakeDevice.of_this_process().set("init_hangs")
    try:
        with connected():
            return "connected"
    except BuildFailed as error:
        return str(error)


def test_a_communicator_that_does_not_become_ready_fails_the_build_within_the_seconds_of_the_job(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.agent.worker.nccl_environment.CONNECT_S", 1.0)
    said = device.call(hung_init, environment=nccl_variables({}, 2), deadline_s=2 * SOON_S)
    assert "NCCL timeout" in said


def aborted_exchange() -> dict[str, Any]:
    return outcome(then=lambda transport: threading.Timer(0.2, transport.abort).start())


def aborted_launch() -> dict[str, Any]:
    def abort_in_the_launch(transport: Any) -> None:
        import torch

        FakeDevice.of_this_process().set("launch_hangs")
        threading.Timer(0.2, transport.abort).start()
        mine = torch.empty(1000, dtype=torch.uint8, device="cuda")
        transport.exchange({1: mine}, {1: torch.empty_like(mine)})

    return outcome(then=abort_in_the_launch)


@pytest.mark.parametrize("case", [aborted_exchange, aborted_launch], ids=lambda case: case.__name__)
def test_an_abort_frees_who_waits_for_an_exchange(case: Any, device: FakeDevice) -> None:
    seen = device.call(case, environment=WORKER)
    assert seen["error"] == "RingBroken"
    assert seen["left_s"] < SOON_S and seen["closed_s"] < SOON_S


def raises_while_nccl_writes() -> dict[str, Any]:
    """The launch fails when its kernel is there already, on NCCL's own stream; the kernel ends by the abort alone."""
    device = FakeDevice.of_this_process()
    device.set("abort_ms", 1000)

    def fail() -> None:
        device.set("launch_hangs")
        device.set("comm_fails", REMOTE_ERROR)

    return outcome(2, during=fail)


def test_tensors_are_not_free_before_the_abort_has_ended(device: FakeDevice) -> None:
    seen = device.call(raises_while_nccl_writes, environment=WORKER)
    assert (seen["error"], seen["aborted"]) == ("RingBroken", 1)


# --------------------------------------------------------------------------------------------------------------- errors

REMOTE_ERROR = 6
"""ncclRemoteError: a peer is gone, says the network."""
LAUNCH_FAILURE = 719
"""cudaErrorLaunchFailure."""


def nccl_error() -> dict[str, Any]:
    """Seen by torch's watchdog, which looks every 0.1 s, long before somebody aborts."""

    def fail(transport: Any) -> None:
        FakeDevice.of_this_process().set("comm_fails", REMOTE_ERROR)
        time.sleep(1.0)
        transport.abort()

    return outcome(then=fail)


def nccl_error_in_a_call() -> dict[str, Any]:
    def fail() -> None:
        FakeDevice.of_this_process().set("comm_fails", REMOTE_ERROR)
        time.sleep(1.0)

    return outcome(2, during=fail)


@pytest.mark.parametrize("case", [nccl_error, nccl_error_in_a_call], ids=lambda case: case.__name__)
@pytest.mark.parametrize(
    "given",
    [{}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_PROPAGATE_ERROR": "1"}],
    ids=["", "debug"],
)
def test_after_an_error_of_nccl_the_worker_lives_and_closes_at_once(
    case: Any, given: dict[str, str], device: FakeDevice
) -> None:
    seen = device.call(case, environment={**given, **nccl_variables(given, 2)})
    assert seen["error"] == "RingBroken"
    assert seen["closed_s"] < SOON_S
    assert seen["used_after_free"] == 0


def debug_level_after_a_group() -> str:
    from torch._C._distributed_c10d import get_debug_level

    with connected():
        return str(get_debug_level().name)


def test_the_debug_level_of_the_script_is_left_as_it_was(device: FakeDevice) -> None:
    given = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert device.call(debug_level_after_a_group, environment={**given, **WORKER}) == "DETAIL"


def abort_in_vain() -> dict[str, Any]:
    from runtime.allreduce.ring import process_group

    process_group.DRAIN_S = 0.5
    FakeDevice.of_this_process().set("abort_in_vain")
    return outcome(then=lambda transport: transport.abort())


def cuda_error() -> dict[str, Any]:
    """As when a link between GPUs fails, or memory is freed that a kernel still reads."""

    def fail(transport: Any) -> None:
        FakeDevice.of_this_process().set("cuda_fails", LAUNCH_FAILURE)
        time.sleep(1.0)

    return outcome(then=fail)


@pytest.mark.parametrize(
    ("case", "because"),
    [(abort_in_vain, "still runs an exchange 0.5 s after"), (cuda_error, "unspecified launch failure")],
    ids=["abort_in_vain", "cuda_error"],
)
def test_a_device_that_hangs_or_fails_after_an_abort_is_named(case: Any, because: str, device: FakeDevice) -> None:
    seen = device.call(case, environment=WORKER)
    assert seen["error"] == "DeviceHung"
    assert because in seen["because"]


def hung_before(setting: str, value: int) -> str:
    from elastic.errors import DeviceHung
    from runtime.allreduce.ring import process_group

    process_group.DRAIN_S = 0.5
    device = FakeDevice.of_this_process()
    with connected(1):
        pass
    device.set(setting, value)
    try:
        with connected(2):
            return "connected"
    except DeviceHung as error:
        return str(error)
    finally:
        device.set(setting, 0)


@pytest.mark.parametrize(
    ("setting", "value", "because"),
    [("kernel_hangs", 1, "still runs"), ("cuda_fails", LAUNCH_FAILURE, "unspecified launch failure")],
)
def test_a_device_that_an_abort_has_hurt_does_not_enter_the_next_generation(
    setting: str, value: int, because: str, device: FakeDevice
) -> None:
    assert because in device.call(hung_before, setting, value, environment=WORKER)


# ---------------------------------------------------------------------------------------------------- what is relied on


def test_the_variables_are_those_that_torch_and_nccl_read(device: FakeDevice) -> None:
    """Renamed ones would be set for nothing."""
    import nvidia.nccl  # type: ignore[import-not-found, unused-ignore]
    import torch

    read = (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").read_bytes()
    read += (Path(next(iter(nvidia.nccl.__path__))) / "lib" / "libnccl.so.2").read_bytes()
    assert [name for name in WORKER if f"{name}\0".encode() not in read] == []


def test_no_variable_of_the_workers_is_reported_as_unknown_or_old(device: FakeDevice) -> None:
    done = device.run(sums_of_a_greeting, environment=WORKER, at_once=True)
    assert "deprecated" not in done.stderr and "TORCH_NCCL" not in done.stderr, done.stderr

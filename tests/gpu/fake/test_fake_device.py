"""The fake device itself: what the other tests here rely on."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.gpu.fake.device import FakeDevice


def streams_and_memory() -> dict[str, Any]:
    import torch

    device = FakeDevice.of_this_process()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        made = torch.ones(1000, device="cuda")
    event.record(stream)
    torch.cuda.current_stream().wait_event(event)
    pinned = torch.empty(1000, pin_memory=True)
    pinned.copy_(made, non_blocking=True)
    before = device.count("waits")
    made.cpu()
    return {
        "gpus": torch.cuda.device_count(),
        "stream": stream.cuda_stream,
        "pinned": [pinned.is_pinned(), torch.empty(1).is_pinned()],
        "waits": device.count("waits") - before,
        "idle": stream.query(),
        "touched": [device.touched(0), device.touched(1)],
    }


def test_streams_copies_and_waits_are_counted_and_noted(device: FakeDevice) -> None:
    device.set("devices", 2)
    seen = device.call(streams_and_memory)
    assert seen["gpus"] == 2
    assert seen["pinned"] == [True, False]
    assert seen["waits"] == 1
    assert seen["idle"]
    assert seen["touched"][0] > 0 and seen["touched"][1] == 0
    assert device.count("host_allocations") == 1
    assert device.count("launches") >= 1
    waited = [(note.stream, note.other) for note in device.notes("stream_wait")]
    assert (0, seen["stream"]) in waited
    assert [note.bytes for note in device.notes("copy")] == [4000, 4000]


def hanging_kernel() -> list[bool]:
    import torch

    device = FakeDevice.of_this_process()
    stream, other, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    made = torch.ones(4, device="cuda")
    device.set("kernel_hangs", pid=os.getpid())
    with torch.cuda.stream(stream):
        made.add_(1)
    device.set("kernel_hangs", pid=os.getpid() + 1)  # for another process
    released = stream.query()
    device.set("kernel_hangs")
    event.record(stream)
    found = [released, stream.query(), other.query(), event.query()]
    with torch.cuda.stream(stream):
        made.add_(1)
    event.record(stream)
    other.wait_event(event)
    found += [stream.query(), other.query(), event.query()]
    device.set("kernel_hangs", 0)
    torch.cuda.synchronize()
    return [*found, stream.query(), other.query(), event.query()]


def test_a_kernel_that_hangs_holds_up_its_stream_and_whoever_waits_for_it(device: FakeDevice) -> None:
    # A gate that was found open is open for good, though the setting is on again.
    assert device.call(hanging_kernel) == [True, True, True, True, False, False, False, True, True, True]


def failing_kernel() -> str:
    import torch

    made = torch.ones(4, device="cuda")
    FakeDevice.of_this_process().set("cuda_fails", 719)
    try:
        made.add_(1)
    except torch.AcceleratorError as error:
        return str(error)
    return "no error"


def test_a_cuda_error_comes_out_of_torch(device: FakeDevice) -> None:
    assert "unspecified launch failure" in device.call(failing_kernel)


def test_without_its_file_there_is_no_device(device: FakeDevice) -> None:
    assert device.call(count_gpus, environment={"FAKE_DEVICE": ""}) == 0


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def test_a_file_of_another_layout_is_refused(device: FakeDevice, tmp_path: Any) -> None:
    (tmp_path / "other").write_bytes(b"0" * 100)
    done = device.run(count_gpus, environment={"FAKE_DEVICE": str(tmp_path / "other")})
    assert done.returncode != 0
    assert "is no file of" in done.stderr


@pytest.mark.parametrize("members", [2, 3])
def test_communicators_meet_when_they_are_told_to(device: FakeDevice, members: int) -> None:
    device.set("meets")
    assert device.call(alone_and_together, members) == [False, True]


def alone_and_together(members: int) -> list[bool]:
    """Whether communicators of one process are ready before and after the last of them was made."""
    import ctypes

    library = ctypes.CDLL(os.environ["LD_PRELOAD"])

    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]

    made_id = Id()
    library.ncclGetUniqueId(ctypes.byref(made_id))
    comms = [ctypes.c_void_p() for _ in range(members)]
    result = ctypes.c_int()
    ready = []
    for rank, comm in enumerate(comms):
        library.ncclCommInitRankConfig(ctypes.byref(comm), members, made_id, rank, None)
        if rank >= members - 2:
            library.ncclCommGetAsyncError(comms[0], ctypes.byref(result))
            ready.append(result.value == 0)
    return ready

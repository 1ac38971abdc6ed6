"""Copies of a GPU's state and results: behind the script's stream, each byte once, with little pinned memory.

The memory of the fake device is the host's, so what is sent can be compared; its kernels do nothing.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from elastic.checkpoints.partition import Rows
from elastic.protocol.worker_state import Phase
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.data.random_state import seed_all
from runtime.recovery.checkpoint.stager import Stager
from runtime.recovery.state.script_state import Values
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.transfer.connection import CopyConnection
from runtime.recovery.transfer.multi_source import digest
from runtime.session import Op, OpKind, ScriptLoop
from runtime.worker.donor import CopyServer
from runtime.worker.operations import OperationLoop
from runtime.worker.state_owner import SharedWorkerState
from tests.gpu.fake.device import FakeDevice
from tests.unit.rings import GENEROUS_S

MIB = 1 << 20
CHUNK = 32 * MIB
STEP = Op(OpKind.PASS, 2)
TO_HOST = 2
"""cudaMemcpyDeviceToHost"""


class Donor:
    """A donor's side without its ring: a state of 42 MiB on the GPU, which a script trains on a stream of its own."""

    def __init__(self, gpu: int = 0) -> None:
        torch.cuda.set_device(gpu)
        self.device = FakeDevice.of_this_process()
        position = SimpleNamespace(
            donor=True, reduced=0, entered=1, kept=-1, phase=Phase.COLLECTING, record=None, copying=(), quiesced=False
        )
        self.shared: Any = SimpleNamespace(
            changed=threading.Condition(threading.RLock()), position=position, post=lambda event: position
        )
        self.shared.keep = lambda result, *rest, **kept: None
        journal: Any = SimpleNamespace(write=lambda event, **fields: None)
        self.server = CopyServer(cast(SharedWorkerState, self.shared), journal)
        self.server._may_copy = lambda newcomer: True  # type: ignore[method-assign]
        seed_all("state")
        self.model = nn.Sequential(nn.Linear(MIB, 10), nn.Linear(512, 1024), nn.BatchNorm1d(8)).cuda()
        self.carrier = self.server.carrier = Carrier(Values(), torch.device("cuda", gpu))
        self.carrier.register(model=self.model)
        self.carrier.freeze()
        self.bytes = sum(value.nbytes for value in self.model.state_dict().values())
        self.script = torch.cuda.Stream()
        self.before = 0

    def begin(self, patience_s: float) -> None:
        """A step begins, in which the script is on its stream."""
        with torch.cuda.stream(self.script):
            self.server.open_window(STEP, patience_s)
        self.before = len(self.device.notes())

    @contextmanager
    def asked(self) -> Iterator[CopyConnection]:
        """A connection to the donor, which serves it as a thread."""
        near, far = (CopyConnection(sock) for sock in socket.socketpair())
        thread = threading.Thread(target=self.server.serve, args=(far, "newcomer"), daemon=True)
        thread.start()
        try:
            yield near
        finally:
            near.close()
            thread.join(GENEROUS_S)
            assert not thread.is_alive()

    def found(self, blobs: list[torch.Tensor]) -> dict[str, Any]:
        """What was copied since the window opened, and whether that is the state."""
        notes = self.device.notes()[self.before :]
        copies = [note for note in notes if note.kind == "copy" and note.other == TO_HOST]
        streams = sorted({note.stream for note in copies})
        first = notes.index(copies[0])
        ordered = [note.stream for note in notes[:first] if (note.kind, note.other) == ("stream_wait", self.stream)]
        values = [value.cpu().contiguous().reshape(-1).view(torch.uint8) for value in self.model.state_dict().values()]
        return {
            "streams": len(streams),
            "behind the script": streams == sorted(set(ordered)),
            "beside it": not {0, self.stream} & set(streams),
            "bytes": sum(note.bytes for note in copies) - self.bytes,
            "waits": len([note for note in notes if note.kind == "wait"]),
            "same": len(values) == len(blobs) and all(map(torch.equal, values, blobs)),
        }

    @property
    def stream(self) -> int:
        return int(self.script.cuda_stream)


def received(connection: CopyConnection, header: Any) -> list[torch.Tensor]:
    """The blobs of the state, asked for in parts as a newcomer does."""
    sizes = [entry["nbytes"] for entry in header["tensors"]]
    blobs = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    part: list[list[int]] = []
    left = CHUNK

    def ask() -> None:
        connection.send({"part": cast(Any, part)})
        _, pieces = connection.receive(within_s=GENEROUS_S)
        for (number, start, end), piece in zip(part, pieces, strict=True):
            blobs[number][start:end] = piece

    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + left)
            part.append([number, start, end])
            start, left = end, left - (end - start)
            if not left:
                ask()
                part, left = [], CHUNK
    ask()
    return blobs


def helper(gpu: int = 0) -> dict[str, Any]:
    donor = Donor(gpu)
    donor.begin(GENEROUS_S)
    header, _ = donor.carrier.describe()
    with donor.asked() as connection:
        connection.send({"want": "part", "op": 0, "digest": digest(header)})
        assert connection.receive(within_s=GENEROUS_S)[0] == {"ready": 0}
        blobs = received(connection, header)
    return donor.found(blobs)


def directly() -> dict[str, Any]:
    donor = Donor()
    donor.begin(GENEROUS_S)
    return sent_by(donor)


def held() -> dict[str, Any]:
    donor, found = Donor(), list[dict[str, Any]]()
    donor.begin(0.001)  # too short to send 42 MiB in it
    thread = threading.Thread(target=lambda: found.append(sent_by(donor)), daemon=True)
    thread.start()
    while thread.is_alive():  # steps, of which each is as short
        donor.server.window.close()
        with torch.cuda.stream(donor.script):
            donor.server.open_window(STEP, 0.001)
        thread.join(0.05)
    return found[0]


def sent_by(donor: Donor) -> dict[str, Any]:
    with donor.asked() as connection:
        connection.send({"want": "state", "follow": False})
        answer, _ = connection.receive(within_s=GENEROUS_S)
        blobs = received(connection, answer["state"])
    return donor.found(blobs)


def initially() -> dict[str, Any]:
    donor = Donor()
    with torch.cuda.stream(donor.script):
        known = donor.carrier.digest()
        loop: Any = SimpleNamespace(_donor=donor.server, _shared=donor.shared, script=ScriptLoop(), _pace=None)
        loop._reporter = SimpleNamespace(begin=lambda op: None)
        loop.may_part, loop._leave_unless_leaving = False, lambda: None
        OperationLoop.begin(loop, Op(OpKind.SYNC, 1), {})
    donor.before = len(donor.device.notes())
    with donor.asked() as connection:
        connection.send({"want": "initial", "digest": known})
        _, blobs = connection.receive(within_s=GENEROUS_S)
    return donor.found(blobs)


def touched_beside() -> int:
    """How often the first GPU was touched, where the state is on the second one."""
    helper(1)
    return FakeDevice.of_this_process().touched(0)


def check(device: FakeDevice, way: Callable[[], dict[str, Any]]) -> None:
    seen = device.call(way)
    waits = seen.pop("waits")
    assert seen == {"streams": 1, "behind the script": True, "beside it": True, "bytes": 0, "same": True}
    assert waits <= 2, "one for each 32 MiB"


def test_a_newcomer_gets_the_state_behind_the_stream_of_the_script_and_each_byte_is_copied_once(
    device: FakeDevice,
) -> None:
    check(device, directly)


def test_so_does_a_member_that_sends_parts(device: FakeDevice) -> None:
    check(device, helper)


def test_a_copy_from_one_gpu_makes_no_context_on_another_one(device: FakeDevice) -> None:
    device.set("devices", 2)
    assert device.call(touched_beside) == 0


def test_so_does_a_copy_that_is_held(device: FakeDevice) -> None:
    check(device, held)


def test_so_does_the_initial_state(device: FakeDevice) -> None:
    check(device, initially)


def results() -> dict[str, Any]:
    """A newcomer follows while three results of 40 MiB come; the second one hangs in a kernel for a while."""
    donor = Donor()
    loop: Any = SimpleNamespace(_donor=donor.server, _shared=donor.shared)
    loop._task = SimpleNamespace(op=STEP, fingerprint={})
    loop._journal = SimpleNamespace(write=lambda event, **fields: None)
    loop._complete = lambda event, result: OperationLoop._complete(loop, event, result)
    position = donor.shared.position

    def completed(event: object) -> Any:
        position.reduced += 1
        return position

    donor.shared.post = completed
    donor.server._log.follow("newcomer", 0, 1 << 40)
    position.record = SimpleNamespace(number=1, member=lambda worker: worker)
    pinned = donor.device.count("host_allocated_bytes")
    given = []
    free = []
    for number in range(3):
        flat = torch.full((10 * MIB,), float(number)).cuda()
        given.append(flat)
        loop._asker = SimpleNamespace(result=lambda member, record, op, flat=flat: Partial(0, 1, {"float32": flat}))
        if number == 1:
            donor.device.set("kernel_hangs", pid=os.getpid())
            with torch.cuda.stream(donor.script):
                flat.add_(1)
        with torch.cuda.stream(donor.script):
            thread = threading.Thread(target=fetched, args=(loop, donor.script, number), daemon=True)
            thread.start()
        if number == 1:
            thread.join(0.5)
            free.append(thread.is_alive())  # it waits for the result
            free.append(donor.shared.changed.acquire(timeout=GENEROUS_S / 10))
            if free[-1]:
                donor.shared.changed.release()
            donor.device.set("kernel_hangs", 0)
        thread.join(GENEROUS_S)
        assert not thread.is_alive()
    entries = donor.server._log.since("newcomer", 0, 1 << 40)
    flats = [entry.result.flats["float32"] for entry in entries]
    return {
        "free": free,
        "pinned": donor.device.count("host_allocated_bytes") - pinned,
        "on the CPU": [not flat.is_cuda for flat in flats],
        "same": [torch.equal(flat, own.cpu()) for flat, own in zip(flats, given, strict=True)],
    }


def fetched(loop: Any, stream: torch.cuda.Stream, number: int) -> None:
    with torch.cuda.stream(stream):
        assert OperationLoop._fetch(loop, "b", number) is not None


def test_results_for_a_newcomer_are_copied_outside_the_lock_through_one_piece_of_pinned_memory(
    device: FakeDevice,
) -> None:
    assert device.call(results) == {"free": [True, True], "pinned": CHUNK, "on the CPU": [True] * 3, "same": [True] * 3}


def staged() -> dict[str, Any]:
    device = FakeDevice.of_this_process()
    values = [torch.arange(80 * MIB // 8).cuda(), torch.arange(300 * MIB // 4).int().cuda(), torch.ones(3)]
    stager, before = Stager(), device.count("host_allocated_bytes")
    named = [(f"{number}", value) for number, value in enumerate(values)]
    rows = [Rows(number, 0, len(value)) for number, value in enumerate(values)]
    for count in (1, 3, 3):
        waits = device.count("waits")
        found, copied = stager.stage(named, rows[:count])
        waits = device.count("waits") - waits
        copied()
    same = [
        torch.equal(torch.cat(list(rows.content)).view(rows.dtype), value.cpu())
        for rows, value in zip(found, values, strict=True)
    ]
    return {"pinned": (device.count("host_allocated_bytes") - before) // MIB, "waits": waits, "same": same}


def test_staging_380_mib_takes_no_more_pinned_memory_than_its_pieces(device: FakeDevice) -> None:
    assert device.call(staged) == {"pinned": 12 * 32, "waits": 0, "same": [True] * 3}

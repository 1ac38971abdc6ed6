"""elastic.keep of what is on a GPU: copied beside the script's stream, and neither the script nor its stream waits.

The memory of the fake device is the host's, so what is kept can be compared; its kernels do nothing.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import elastic
from runtime.recovery.kept import keep as keeping
from runtime.recovery.kept.choice import RoundNumber, newest_whole
from runtime.recovery.kept.keep import KeptScript
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import KeptPlace
from tests.gpu.fake.device import FakeDevice, Note
from tests.unit.rings import GENEROUS_S

TO_HOST = 2
"""cudaMemcpyDeviceToHost"""
WIDTH = 2048


class Script:
    """A round of a script whose model is on the GPU, with a stream of its own."""

    def __init__(self, memory: str, own: bool) -> None:
        """own: with --ranks, where a checksum of what all ranks have is kept, too."""
        self.device = FakeDevice.of_this_process()
        self.memory, self.stream = memory, torch.cuda.Stream()
        keeping.shortage = lambda body, directory: ""  # whatever else takes memory of this machine
        source = newest_whole(KeptHere(memory, cast(Any, None)).check(0, 1))
        self.began = 0 if source is None else source.step
        place = KeptPlace(memory, RoundNumber(0, self.began + 1), source, own=own)
        named = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        os.environ.update({name: str(value) for name, value in named.items()}, **place.to_environment())
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        with torch.no_grad():
            for number, value in enumerate(self.model.state_dict().values()):
                value.fill_(number + self.began)
        self.model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.kept: KeptScript
        self.before = 0

    def keep(self) -> None:
        """Up to a first step that is kept."""
        with torch.cuda.stream(self.stream):
            self.kept = elastic.keep(self.model, self.optimizer)
            self.optimizer.step()
            self.kept.done()
            self.kept.wait()

    def notes(self) -> list[Note]:
        """Since the first step."""
        return self.device.notes()[self.before :]

    def bytes(self) -> list[bytes]:
        """Of the model, as it is now."""
        return [value.cpu().numpy().tobytes() for value in self.model.state_dict().values()]


def beside(memory: str, own: bool) -> dict[str, Any]:
    """The second step is done while the GPU hangs; statistics change behind it, and the optimizer is to step."""
    script = Script(memory, own)
    script.keep()
    wanted = script.bytes()
    script.before = len(script.device.notes())
    found: dict[str, Any] = {}
    with torch.cuda.stream(script.stream):
        script.optimizer.step()
        script.device.set("kernel_hangs", pid=os.getpid())
        for parameter in script.model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(1)
        script.kept.done()  # a wait for the GPU would not end
        mean = script.model[1].running_mean
        assert isinstance(mean, torch.Tensor)
        mean.copy_(torch.full_like(mean, 9.0, device="cpu"), non_blocking=True)
    stepping = threading.Thread(target=step, args=(script,), daemon=True)
    stepping.start()
    stepping.join(0.5)
    found["the optimizer waits"] = stepping.is_alive()
    script.device.set("kernel_hangs", 0)
    stepping.join(GENEROUS_S)
    script.kept.wait()
    assert script.kept._copy is not None
    found["copies on the GPU are gone"] = not script.kept._copy._clones
    copies = {note.stream for note in script.notes() if note.kind == "copy" and note.other == TO_HOST}
    ordered = {note.stream for note in script.notes() if (note.kind, note.other) == ("stream_wait", stream_of(script))}
    found |= {"streams": len(copies), "beside the script": not copies & {0, stream_of(script)}}
    found["behind it"] = copies <= ordered
    return found | {"same": went_on(memory, own, wanted)}


def stream_of(script: Script) -> int:
    return int(script.stream.cuda_stream)


def step(script: Script) -> None:
    with torch.cuda.stream(script.stream):
        script.optimizer.step()


def went_on(memory: str, own: bool, wanted: list[bytes]) -> bool:
    """Whether a second round goes on from the second step with these bytes."""
    script = Script(memory, own)
    elastic.keep(script.model, script.optimizer)
    return script.began == 2 and script.bytes() == wanted


def check(device: FakeDevice, memory: Path, own: bool) -> None:
    found = device.call(beside, str(memory), own)
    said = ("the optimizer waits", "copies on the GPU are gone", "beside the script", "behind it", "same")
    assert found == {"streams": 1, **dict.fromkeys(said, True)}


def test_done_waits_for_no_gpu_and_the_copies_run_beside_the_script(device: FakeDevice, tmp_path: Path) -> None:
    check(device, tmp_path, own=False)


def test_nor_does_it_with_ranks_of_whose_tensors_a_sample_is_kept(device: FakeDevice, tmp_path: Path) -> None:
    check(device, tmp_path, own=True)


def unheard(memory: str) -> bool:
    """A step of which no optimizer tells, as of a CUDA graph, changes weights behind done(). Whether a second round
    goes on from what was there in done()."""
    script = Script(memory, own=False)
    script.keep()
    wanted = script.bytes()
    with torch.cuda.stream(script.stream):
        script.kept.done()
        for parameter in script.model.parameters():
            parameter.data.copy_(torch.full_like(parameter, 9.0, device="cpu"))
        script.kept.wait()
    return went_on(memory, False, wanted)


def test_behind_a_step_of_which_no_optimizer_tells_all_is_copied_in_done(device: FakeDevice, tmp_path: Path) -> None:
    assert device.call(unheard, str(tmp_path))


def without_memory(memory: str) -> bool:
    """The GPU has no memory for copies on it."""

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    script = Script(memory, own=False)
    script.keep()
    wanted = script.bytes()
    with torch.cuda.stream(script.stream), patch.object(torch.Tensor, "clone", clone):
        script.optimizer.step()
        script.kept.done()
        script.kept.wait()
    return went_on(memory, False, wanted)


def test_a_gpu_without_memory_for_copies_is_waited_for(device: FakeDevice, tmp_path: Path) -> None:
    assert device.call(without_memory, str(tmp_path))

"""The worker's side: points are put into the product's modules as they are imported, and each looks for an order.

An order is taken by renaming its file, so that one process alone carries it out. Nothing here may disturb a worker
that is not meant: what cannot be read is nobody's order.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from chaos_tests.failpoints.import_patch import patch_when_imported
from chaos_tests.scenario import failpoints
from chaos_tests.scenario.failpoints import ANYBODY, DONE, Act, FailpointOrder

FAR_TOO_MUCH_BYTES = 1 << 42
SCRIPT_LOOKS_S = 0.2
SLOW_S = 1.0
"""How long each fsync takes on a slow disk."""


class FailpointError(Exception):
    """What a script's own mistake looks like."""


class _Place:
    """Where this worker is in the job, as far as the points need to know. Written and read by the user's thread."""

    step: int | None = None
    in_pass = False
    carrier: Any = None
    """The registered objects."""


class _Disk:
    """What is the matter with this worker's disk. Written and read by the thread that saves."""

    act: Act | None = None
    until_s = 0.0


def install(directory: str) -> None:
    """Put the points into this process, and those forked from it."""
    look, in_pass = _look_in(directory), partial(_before, in_pass=True)
    for module, patch in (
        ("runtime.worker.operations", _in_walk),
        ("runtime.worker.exchange", _in_turn),
        ("runtime.loop.passes", _in_verified),
        ("runtime.worker.progress_report", partial(in_pass, "ProgressReporter.gathered", failpoints.IN_REDUCTION)),
        ("runtime.allreduce.reduction.slice_sums", partial(in_pass, "SliceSums._sum", failpoints.BETWEEN)),
        (
            "runtime.allreduce.reduction.early_sums",
            partial(_before, "EarlySums.offer", failpoints.EARLY_SENT, behind=True),
        ),
        ("runtime.allreduce.ring.ring_set", partial(_before, "Rings._mesh", failpoints.IN_REBUILD)),
        ("runtime.worker.donor", partial(_before, "send_parts", failpoints.COPY_SENT)),
        (
            "runtime.recovery.transfer.connection",
            partial(_before, "CopyConnection._receive_blob", failpoints.COPY_RECEIVED),
        ),
        ("runtime.recovery.checkpoint.saver", partial(_before, "put", failpoints.PART_WRITTEN)),
        ("runtime.recovery.checkpoint.saver", partial(_before, "Saver._publish", failpoints.BEFORE_MANIFEST)),
        ("elastic.checkpoints.storage", _in_storage),
        (
            "runtime.asynchronous.store",
            partial(_before, "ParameterStore._mirrored", failpoints.UPDATE_MIRRORED, behind=True),
        ),
        (
            "runtime.asynchronous.store",
            partial(_before, "ParameterStore._commit", failpoints.UPDATE_COMMITTED, behind=True),
        ),
        (
            "runtime.asynchronous.store",
            partial(_before, "ParameterStore.push", failpoints.UPDATE_ANSWERED, behind=True),
        ),
        ("runtime.asynchronous.gossip", partial(_before, "Mixture.asked", failpoints.PAIR_MIXED, behind=True)),
        ("runtime.frontends.restart.script_host", _in_scripts),
        ("runtime.frontends.restart.supervisor", partial(_before, "pull", failpoints.THIN_COPIED)),
        ("runtime.recovery.kept.segment", partial(_before, "SegmentFile.begin", failpoints.SEGMENT_BEGUN, behind=True)),
        ("runtime.recovery.kept.segment", partial(_before, "SegmentFile.finish", failpoints.SEGMENT_WRITTEN)),
        ("runtime.recovery.kept.segment", partial(_before, "SegmentFile.finish", failpoints.SEGMENT_KEPT, behind=True)),
        ("runtime.recovery.kept.remote", partial(_before, "_blob", failpoints.SEGMENT_SENT)),
    ):
        patch_when_imported(module, lambda module, patch=patch: patch(module, look))  # type: ignore[misc]


def _look_in(directory: str) -> Callable[[str], None]:
    pending = os.path.join(directory, "pending")

    def look(point: str) -> None:
        me = os.environ.get("ELASTIC_WORKER_ID", "")
        for name in os.listdir(pending):
            if not name.startswith((f"{me}-", f"{ANYBODY}-")):
                continue
            path = os.path.join(pending, name)
            try:
                with open(path, "rb") as file:
                    order = FailpointOrder.from_json(file.read())
                if order.point != point or order.step not in (None, _Place.step):
                    continue
                os.rename(path, os.path.join(directory, name))
            except (OSError, ValueError, TypeError, KeyError):  # somebody else was faster, or it was withdrawn
                continue
            _tell(directory, order, me)
            _act(order)

    return look


def _tell(directory: str, order: FailpointOrder, me: str) -> None:
    line = {"number": order.number, "worker_id": me, "pid": os.getpid(), "t_mono_ns": time.monotonic_ns()}
    file = os.open(os.path.join(directory, DONE), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.write(file, json.dumps(line).encode() + b"\n")
    os.close(file)


def _act(order: FailpointOrder) -> None:
    match order.act:
        case Act.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Act.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Act.HANG:
            threading.Event().wait()
        case Act.HANG_GIL:
            _wait_with_the_lock()
        case Act.RAISE:
            raise FailpointError("raised by the chaos harness")
        case Act.INTERRUPT:
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(FailpointError))
        case Act.NO_MEMORY:
            resource.setrlimit(resource.RLIMIT_AS, (FAR_TOO_MUCH_BYTES - 1, FAR_TOO_MUCH_BYTES - 1))
            bytearray(FAR_TOO_MUCH_BYTES)
        case Act.FLIP_GRADIENT | Act.FLIP_PARAMETER | Act.FLIP_MOMENT:
            _flip(order)
        case Act.DISK_FAILS | Act.DISK_SLOW:
            _Disk.act, _Disk.until_s = order.act, time.monotonic() + order.for_s


def _flip(order: FailpointOrder) -> None:
    """Behind torch's back, as hardware does it: no version is counted. Another tensor, element and bit for each order,
    in the last byte but one: sums of integers round the lowest bits of a gradient away."""
    parameters = [parameter for model in _Place.carrier.modules().values() for parameter in model.parameters()]
    found = [parameter.data for parameter in parameters]
    if order.act is Act.FLIP_GRADIENT:
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    elif order.act is Act.FLIP_MOMENT:
        states = [state for one in _Place.carrier.optimizers().values() for state in one.state.values()]
        moments = [value for state in states for value in state.values() if hasattr(value, "numel")]
        found = [moment for moment in moments if moment.numel() > 1] or found  # plain SGD has none
    tensor = found[order.number % len(found)]
    size = tensor.element_size()
    byte = ctypes.c_ubyte.from_address(tensor.data_ptr() + order.number % tensor.numel() * size + size - 2)
    byte.value ^= 1 << order.number % 8


def _wait_with_the_lock() -> None:
    """For ever: a second lock of a mutex, unlike a sleep, does not end with a signal, such as the one that asks for
    stacks."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


Look = Callable[[str], None]


def _before(path: str, point: str, module: Any, look: Look, *, in_pass: bool = False, behind: bool = False) -> None:
    """Let a function of the module look for orders at this point before it begins. path: its name, perhaps that of its
    class before it. in_pass: only while a pass is summed. behind: when it has ended."""
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, module)
    original = getattr(owner, name)

    def looking(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if behind else None
        if _Place.in_pass or not in_pass:
            look(point)
        return result if behind else original(*args, **kwargs)

    setattr(owner, name, looking)


def _in_walk(module: Any, look: Look) -> None:
    next_unit, unit_done = module.OperationLoop.next_unit, module.OperationLoop.unit_done

    def looking_next(self: Any) -> Any:
        unit = next_unit(self)
        _Place.step, _Place.carrier = self._task.op.step, self._donor.carrier
        if unit is not None and self._task.op.kind is module.OpKind.PASS:
            look(failpoints.IN_REPETITION if self._task.op.label else failpoints.IN_SHARD)
        return unit

    def looking_done(self: Any, leaf: Any) -> None:
        unit_done(self, leaf)
        if self._task.op.kind is module.OpKind.EVALUATE:
            look(failpoints.IN_EVALUATION)

    module.OperationLoop.next_unit, module.OperationLoop.unit_done = looking_next, looking_done


def _in_turn(module: Any, look: Look) -> None:
    exchange = module.RingExchange.exchange

    def looking(self: Any, task: Any, *rest: Any) -> Any:
        _Place.step, _Place.in_pass = task.op.step, task.op.kind is module.OpKind.PASS
        if _Place.in_pass:
            look(failpoints.BEFORE_REDUCTION)
        result = exchange(self, task, *rest)
        if _Place.in_pass and result is not None:
            look(failpoints.RESULT_HELD)
        return result

    module.RingExchange.exchange = looking


def _in_verified(module: Any, look: Look) -> None:
    end_shard = module.Pass._end_shard

    def looking(self: Any, shard: Any) -> None:
        if shard.index == self._verified:
            look(failpoints.GRADIENT_READY)
        end_shard(self, shard)

    module.Pass._end_shard = looking


def _in_scripts(module: Any, look: Look) -> None:
    """The process of a script gets a thread that looks for orders."""
    become = module._Host._become_script

    def look_on() -> None:
        while True:
            look(failpoints.IN_SCRIPT)
            time.sleep(SCRIPT_LOOKS_S)

    def looking(self: Any, settings: Any) -> None:
        run = self._run

        def watched() -> None:
            threading.Thread(target=look_on, name="chaos", daemon=True).start()
            run()

        self._run = watched
        become(self, settings)

    module._Host._become_script = looking


def _in_storage(module: Any, look: Look) -> None:
    """Files of the checkpoints that come by themselves: a script is told when one fails that it has asked for, and may
    end. What fails at a directory would fail after the file has its name."""
    from elastic.checkpoints.naming import PERIODIC  # not before the product itself imports it

    sync = module.LocalStorage._sync

    def looking(self: Any, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        periodic = f"/{PERIODIC}/" in path and os.path.isfile(path)
        if periodic:
            look(failpoints.IN_WRITE)
        if periodic and time.monotonic() < _Disk.until_s:
            if _Disk.act is Act.DISK_FAILS:
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}, by the chaos harness")
            time.sleep(SLOW_S)  # this is the fault
        sync(self, descriptor)

    module.LocalStorage._sync = looking

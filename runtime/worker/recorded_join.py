"""Sessions of jobs with one worker, for `elastic doctor`: a job that keeps a pass for a newcomer, a newcomer that
enters this pass, and a job that computes shards in another order.

If the bits differ from those of a plain job with one worker, the script has values that no newcomer gets, or that go on
from shard to shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch.serialization import load, save  # torch.save and torch.load are replaced in a script with logical ranks

from elastic.errors import Disagree
from elastic.protocol.loop_state import Admitted
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.transfer.client import parse_op, parse_result
from runtime.session import HomeRank, JoinMeta, Op, OpKind, ScriptLoop
from runtime.worker.donor import op_json, result_json
from runtime.worker.single import SingleSession


class Recording(SingleSession):
    """Session (see runtime/session.py). Writes to `path` what a newcomer gets if it enters in the first pass of step
    `at`. Writes to `said_file` what this member brings to calls of all workers, from this pass to the first pass of the
    next step."""

    def __init__(self, path: Path, at: int, device: torch.device) -> None:
        super().__init__(device)
        self._path = path
        self._at = at
        self._kept: dict[str, Any] | None = None
        self._said: list[list[Json]] | None = None

    def attach(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def publish(self, meta: JoinMeta | None) -> None:
        if meta is not None:
            self._meta = meta

    def begin(self, op: Op, *args: Any, **kwargs: Any) -> None:
        super().begin(op, *args, **kwargs)
        if op.kind is OpKind.PASS and (op.step, op.pass_no) == (self._at, 0):
            header, blobs = self._carrier.capture()
            state = (header, [blob.clone() for blob in blobs])
            self._kept = {"meta": asdict(self._meta), "about": op_json(op), "state": state}
        elif op.kind is OpKind.PASS and op.step > self._at:
            self._said = None

    def finish(self) -> Partial | None:
        op, result = self._op, super().finish()
        if result is not None and self._kept is not None:
            save({**self._kept, "result": result_json(result)}, self._path)
            self._kept, self._said = None, []
        elif result is not None and op is not None and op.kind is OpKind.ALLREDUCE and self._said is not None:
            self._said.append([op.label, result.note])
            said_file(self._path).write_text(json.dumps(self._said))
        return result


def said_file(path: Path) -> Path:
    """The file beside that of Recording: [label, note of the result] of each such call, in order."""
    return path.with_name(f"{path.name}.said")


class Joining(SingleSession):
    """Session (see runtime/session.py) of a newcomer, which computes every step after its first one."""

    rank = 1
    world_size = 2
    restarted = True

    def __init__(self, path: Path, device: torch.device) -> None:
        """path: the file that Recording has written."""
        super().__init__(device)
        self.script = ScriptLoop(newcomer=True)
        self._given: dict[str, Any] = load(path, weights_only=True)

    def attach(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def await_invitation(self) -> None:
        """Return at once: there is always a place."""

    def meta(self, until: Callable[[JoinMeta], bool] = bool) -> JoinMeta:
        return JoinMeta(**self._given["meta"])

    def registered_by_members(self, name: str) -> tuple[dict[str, Json], Sequence[torch.Tensor]]:
        header, blobs = self._given["state"]
        return header, blobs

    def join(self, here: Op, fingerprint: dict[str, str]) -> tuple[Op, Partial | None]:
        self._carrier.load(*self._given["state"])
        result = parse_result(*self._given["result"])
        result.flats = {name: flat.to(self.sums_on) for name, flat in result.flats.items()}
        self.script.post(Admitted())
        return parse_op(self._given["about"]), result


class Succeeding(Joining):
    """Session (see runtime/session.py) of a newcomer with logical ranks. The member that it has copied from goes on to
    the first pass of the next step, and is lost there: this worker is rank 0 from then on."""

    worker_id = "alone.1.0"
    home = HomeRank(1, 0, 1)

    def __init__(self, path: Path, device: torch.device) -> None:
        super().__init__(path, device)
        said = said_file(path)
        self._said: list[list[Json]] = json.loads(said.read_text()) if said.exists() else []
        self._entered = parse_op(self._given["about"]).step

    def begin(self, op: Op, *args: Any, **kwargs: Any) -> None:
        super().begin(op, *args, **kwargs)
        if op.kind is OpKind.PASS and op.step > self._entered:
            self.rank, self.world_size, self._said = 0, 1, []

    def finish(self) -> Partial | None:
        op, result = self._op, super().finish()
        if result is not None and op is not None and op.kind is OpKind.ALLREDUCE and self._said:
            label, note = self._said.pop(0)
            if label != op.label:
                raise Disagree(
                    f"this newcomer called {op.label} where the member that it has copied from called {label}"
                )
            result.note = {**cast(dict[str, Json], note), **cast(dict[str, Json], result.note)}
        return result


class Backwards(SingleSession):
    """Session (see runtime/session.py) of a job of one that computes the shards of a pass in the opposite order."""

    def next_unit(self) -> int | None:
        return self._todo.pop() if self._todo else None

"""A job of one that keeps a pass for a newcomer, and a newcomer that enters it.

`elastic doctor --exact` uses it: a script whose bits then differ from those of a plain job of one has values that no
newcomer gets, because they are neither registered nor in job.state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runtime.allreduce.reduction.partial_sum import Partial
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.transfer.client import parse_op, parse_result
from runtime.session import JoinMeta, Op, OpKind
from runtime.worker.donor import op_json, result_json
from runtime.worker.single import SingleSession


class Recording(SingleSession):
    """Session (see runtime/session.py). Writes what a newcomer gets that enters in the first pass of step `at`."""

    def __init__(self, path: Path, at: int, device: torch.device) -> None:
        super().__init__(device)
        self._path = path
        self._at = at
        self._kept: dict[str, Any] | None = None

    def attach(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def publish(self, meta: JoinMeta) -> None:
        self._meta = meta

    def begin(self, op: Op, *args: Any, **kwargs: Any) -> None:
        super().begin(op, *args, **kwargs)
        if op.kind is OpKind.PASS and (op.step, op.pass_no) == (self._at, 0):
            header, blobs = self._carrier.capture()
            state = (header, [blob.clone() for blob in blobs])
            self._kept = {"meta": asdict(self._meta), "about": op_json(op), "state": state}

    def finish(self) -> Partial | None:
        result = super().finish()
        if result is not None and self._kept is not None:
            torch.save({**self._kept, "result": result_json(result)}, self._path)
            self._kept = None
        return result


class Joining(SingleSession):
    """Session (see runtime/session.py) of a newcomer, which computes every step after its first one."""

    rank = 1
    world_size = 2
    restarted = True

    def __init__(self, path: Path, device: torch.device) -> None:
        """path: the file that Recording has written."""
        super().__init__(device)
        self.joining = True
        self._given: dict[str, Any] = torch.load(path, weights_only=True)

    def attach(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def await_invitation(self) -> None:
        """Return at once: there is always a place."""

    def meta(self, until: Callable[[JoinMeta], bool] = bool) -> JoinMeta:
        return JoinMeta(**self._given["meta"])

    def join(self, here: Op, fingerprint: dict[str, str], *, bound: bool = False) -> tuple[Op, Partial | None]:
        self._carrier.load(*self._given["state"])
        result = parse_result(*self._given["result"])
        result.flats = {name: flat.to(self.sums_on) for name, flat in result.flats.items()}
        self.joining = False
        return parse_op(self._given["about"]), result

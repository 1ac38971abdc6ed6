"""Learning rates, schedulers, counters of BatchNorm and other plain values: within a phase each worker has its own.

Between two phases all workers have those of the oldest one. All compare learning rates in each operation, and a
newcomer or a checkpoint gets rates and schedulers that belong together: many schedulers make a rate of the one before.
"""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import nn

from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state import encoding
from runtime.recovery.state.training_state import Carrier

OBJECT_BYTES_MAX = 1 << 14
"""At the end of a phase each worker tells the others the states of its objects as JSON. A state with more bytes than
this is not told: each worker keeps its own."""


class OwnValues:
    """Use: `begin` a phase; at its end `end`, then `settle`. For the thread of the script."""

    def __init__(self, carrier: Carrier, outer: object) -> None:
        """carrier: frozen. outer: what all workers have in common anyhow."""
        self._carrier = carrier
        kinds = (nn.Module, torch.optim.Optimizer)
        self._objects = {
            name: cast(Any, thing)
            for name, thing in carrier.objects.items()
            if not isinstance(thing, kinds) and thing is not outer and " " not in name
        }
        self._integers = carrier.int_buffers()
        self._common: dict[str, Json] = {}
        """When the phase began, or is over."""
        self._own: dict[str, Json] = {}
        """To which this worker has come; {}: it has been in no phase."""

    def _now(self) -> dict[str, Json]:
        objects: dict[str, Json] = {}
        for name, thing in self._objects.items():
            tensors: list[encoding.NamedTensor] = []
            encoded = encoding.encode(thing.state_dict(), name, tensors)
            if not tensors and len(json.dumps(encoded)) <= OBJECT_BYTES_MAX:
                objects[name] = encoded
        integers: dict[str, Json] = {buffer.name: buffer.live.tolist() for buffer in self._integers}
        return {"rates": list(self._carrier.learning_rates()), "objects": objects, "integers": integers}

    def _become(self, values: dict[str, Json]) -> None:
        for name, encoded in cast(dict[str, Json], values["objects"]).items():
            self._objects[name].load_state_dict(encoding.decode(encoded, _no_tensor))
        optimizers = self._carrier.optimizers().values()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        for group, rate in zip(groups, cast(list[float], values["rates"]), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for buffer in self._integers:
            buffer.live.copy_(torch.tensor(cast(dict[str, Json], values["integers"])[buffer.name]))

    def begin(self, *, behind: bool) -> None:
        """Go on with this worker's values, unless the script has set others since the last phase, as all workers do
        then. behind: it only takes over what the others have done."""
        now = self._now()
        if not behind and self._own and now == self._common:
            self._become(self._own)
        self._common = now

    def end(self, *, behind: bool) -> dict[str, Json]:
        """Have the values with which the phase began. Returns this worker's own."""
        if not (behind and self._own):
            self._own = self._now()
        self._become(self._common)
        return self._own

    def settle(self, common: dict[str, Json]) -> None:
        """Have the values of the oldest worker, which `end` has returned there."""
        self._become(common)
        self._common = self._now()


def _no_tensor(number: int) -> torch.Tensor:
    raise ValueError(f"plain values name tensor {number}, and have none")

"""What the script trains, and the guards that watch it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType

import torch

from elastic.config import Reduction
from runtime.allreduce.fixed_point.exponents import BlockExponents
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.guards import checks
from runtime.guards.module_attributes import Attributes
from runtime.guards.unregistered import Strays
from runtime.recovery.state.script_state import Values
from runtime.recovery.state.training_state import Carrier
from runtime.session import Session

STRAYS_STEPS = 256
"""Every this many steps, values that are not registered are checked for changes."""

_EXPONENTS = "exponents of --reduction fixed"
"""A name among the registered objects that no script can give to another one."""


class Registered:
    """Used by the user's thread only."""

    def __init__(self, session: Session, threads: int, device: torch.device) -> None:
        self._session = session
        self._threads = threads
        self.device = device
        self.values = Values()
        self.carrier = Carrier(self.values, device)
        self.exponents = _exponents(session.reduction)
        if self.exponents is not None:
            self.carrier.register(None, **{_EXPONENTS: self.exponents})
        self._harvest = Harvest([])
        self._trainable: list[int] = []
        self._guard = checks.OptimizerGuard()
        self._attributes = Attributes({})
        self._strays: Strays | None = None
        self._strays_due = False
        self.cleanup = ExitStack()
        """What must be undone when a rehearsal, or the job, ends."""

    def freeze(self) -> None:
        """The loop begins: nothing more can be registered, and what is there is watched."""
        self.carrier.freeze()
        self._guard.attach(self.carrier.optimizers())
        self._attributes = Attributes(self.carrier.modules())
        self._session.attach(self.carrier)

    def begin_epoch(self) -> None:
        """An epoch is handed out."""
        self._attributes.begin_epoch()

    def begin_step(self) -> None:
        """A step is handed out."""
        self._attributes.begin_step()

    def left_alone(self) -> AbstractContextManager[None]:
        """In a call of all workers, whose code may set attributes for a while."""
        return self._attributes.left_alone()

    def begin_pass(self, where: str, allow: frozenset[str]) -> Harvest:
        """Check what a pass finds. Returns its Harvest. Raises the guards' errors."""
        checks.check_threads(self._threads)
        if self._session.reduction.stable and not self._session.alone:
            checks.check_timed_kernels(self.device)
        self.carrier.check_kinds()
        harvest = self.harvest()
        self._guard.begin_pass(where, harvest.parameters, allow)
        self._attributes.begin_pass()
        self.values.lock()
        return harvest

    def end_pass(self, where: str, *, may_change: bool) -> None:
        """The result is installed, and user code may change everything again. may_change: attributes of modules, too.
        Raises Unregistered."""
        changed = self._attributes.end_pass()
        if changed and not may_change:
            raise checks.changed_attribute(where, changed)
        self._guard.end_pass(self._harvest.installed)
        self.values.unlock()

    def harvest(self) -> Harvest:
        """The Harvest for the parameters that require a gradient now, which may differ between passes."""
        parameters = self.carrier.parameters()
        trainable = [id(parameter) for _, parameter in parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            self._harvest.early.close()
            self._harvest = Harvest(
                parameters,
                self.carrier.float_buffers(),
                self.carrier.int_buffers(),
                modes=self.carrier.modes,
                device=self._session.sums_on,
                fixed=self.exponents,
                compression=self._session.compression,
            )
        return self._harvest

    def watch_losses(self, look: Callable[[torch.Tensor], None]) -> None:
        """Show every loss to `look` before its backward(), until `cleanup` is closed."""
        self.cleanup.enter_context(checks.backward_watched(look))

    def watch_strays(self, frame_of_script: Callable[[], FrameType | None]) -> None:
        """In the first step, begin to watch unregistered values that the script trains; newcomers need not."""
        if self._strays is None and not self._session.script.at.joining:
            self._strays = Strays(self.carrier.objects, frame_of_script())
            self._strays_due = True

    def check_strays(self, step: int, *, due: bool = False) -> None:
        """Raise Unregistered. step: the last one. Values may change as rarely as a target network's, so later steps are
        checked too. due: also if this is none of these steps."""
        if self._strays is not None and (due or self._strays_due or (step + 1) % STRAYS_STEPS == 0):
            self._strays_due = False
            self._strays.check(f"step {step}")

    def close(self) -> None:
        """Remove the hooks from the user's objects."""
        self.cleanup.close()
        self._harvest.early.close()
        self._attributes.close()
        self._guard.close()


def _exponents(reduction: Reduction) -> BlockExponents | None:
    """The exponents of sums as integers; None: they are summed as floats."""
    if reduction not in (Reduction.FIXED, Reduction.FIXED64):
        return None
    return BlockExponents(always_wide=reduction == Reduction.FIXED64)

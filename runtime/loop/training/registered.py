"""What the script trains, and the guards that watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FrameType

import torch
from torch import nn

from elastic.config import Reduction
from elastic.errors import ConfigError
from runtime.allreduce.fixed_point.exponents import BlockExponents
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.data.loader import Loader
from runtime.data.stream import Stream
from runtime.guards import checks
from runtime.guards.module_attributes import Attributes
from runtime.guards.unregistered import Strays
from runtime.outer import DiLoCo, Round, by_option
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
        self.shards: int | None = None
        """Of each step, as soon as the script has said it."""
        self.outer: DiLoCo | None = None
        """Said by the script or by --outer; its parts are registered when the loop begins."""
        self.round: Round | None = None
        self._outer_name = ""
        self._chosen: set[int] | None = None
        self._harvest = Harvest([])
        self._trainable: list[int] = []
        self._guard = checks.OptimizerGuard()
        self._attributes = Attributes({})
        self._strays: Strays | None = None
        self._strays_due = False
        self.cleanup = ExitStack()
        """What must be undone when a rehearsal, or the job, ends."""

    def register(self, buffers: Mapping[str, str] | None, objects: Mapping[str, object]) -> None:
        """As Carrier.register, also for one DiLoCo. Raises ConfigError for a second one, and beside --outer."""
        plain = {name: thing for name, thing in objects.items() if not isinstance(thing, DiLoCo)}
        for name, thing in objects.items():
            if isinstance(thing, DiLoCo):
                if self._session.outer is not None:
                    raise by_option.twice(f"job.register({name}=...)")
                if self.outer is not None or self.carrier.frozen:
                    raise ConfigError(f"register({name}=...): a job has one DiLoCo, registered before its loop")
                self.outer, self._outer_name = thing, name
        self.carrier.register(buffers, **plain)

    def renew(self) -> None:
        """Another training loop begins, which trains other objects: forget those of the last one."""
        self._harvest.early.close()
        self._attributes.close()
        self._guard.close()
        self._harvest, self._trainable, self._guard = Harvest([]), [], checks.OptimizerGuard()
        self.carrier.renew()
        if self.exponents is not None:
            self.exponents.load_state_dict({"references": {}})
            self.carrier.register(None, **{_EXPONENTS: self.exponents})

    def freeze(self) -> None:
        """The loop begins: nothing more can be registered, and what is there is watched. Raises ConfigError for --outer
        with a loop that is not of replicas."""
        if self.outer is None and self._session.outer is not None:
            raise by_option.no_loop()
        if self.outer is not None and not self.carrier.frozen:
            self._begin_outer(self.outer)
        self.carrier.freeze()
        self._guard.attach(self.carrier.optimizers())
        self._attributes = Attributes(self.carrier.modules())
        self._session.attach(self.carrier)

    def choose_outer(self) -> None:
        """A loop of the job comes: with --outer, make the DiLoCo that the script leaves out. Raises ConfigError."""
        if self.outer is None and (said := self._session.outer) is not None:
            self.outer = by_option.make(said, self.carrier.modules(), self.carrier.optimizers())
            self._outer_name = by_option.NAME

    def _begin_outer(self, outer: DiLoCo) -> None:
        """Register what belongs to the replicas, and the outer optimizer. Raises ConfigError for other optimizers."""
        optimizers = {id(one): name for name, one in self.carrier.optimizers().items()}
        if optimizers.pop(id(outer.inner_optimizer), None) is None:
            raise ConfigError("the inner optimizer given to DiLoCo is not registered; job.register(optimizer=...)")
        has_outer = optimizers.pop(id(outer.outer_optimizer), None) is not None
        if optimizers:
            raise ConfigError(
                f"{', '.join(optimizers.values())}: with DiLoCo the job has one inner and one outer optimizer"
            )
        if self.shards is None:
            raise ConfigError(
                "the loop of a job with DiLoCo begins, and the number of shards, each of which is a replica, is not "
                "known: make the job.loader() before job.epochs(), or write job.steps(shards=...) without epochs"
            )
        outer.begin(self.shards)
        name, rows = f"{self._outer_name} rows", outer.rows
        parts: dict[str, object] = {name: rows} if rows.elements else {}
        if not has_outer:
            parts[f"{self._outer_name} optimizer"] = outer.outer_optimizer
        self.carrier.register({f"{name}.{group}": rows.merge for group in rows.elements}, **parts)
        self.round = Round(outer, self.carrier)

    def rounds_of(self, data: Loader | Stream | None, gradients: str, outer: DiLoCo | None) -> Loader | Stream | None:
        """The data of a loop with `outer`, cut into rounds; without, as it is. Raises ConfigError for what does not go
        together."""
        if not isinstance(outer, DiLoCo | None):
            raise ConfigError(
                f"job.steps(outer=...) was given a {type(outer).__name__}; it takes an elastic.DiLoCo or an "
                "elastic.LocalSGD. elastic.Asynchronous and elastic.Gossip have a loop of their own: `for phase in "
                "elastic.asynchronous(job, train, outer=outer, total=...)`"
            )
        self.choose_outer()
        if self._session.outer is not None:
            if outer is not None:
                raise by_option.twice("job.steps(outer=...)")
            outer = self.outer
        if outer is not self.outer:
            raise ConfigError(
                "job.steps(outer=...) and job.register(...) need the same DiLoCo: all loops of a job have it, or none"
            )
        if outer is None:
            return data
        if gradients != "mean":
            raise ConfigError(f"job.steps(gradients={gradients!r}): outer= takes the mean of the replicas' differences")
        if isinstance(data, Stream):
            raise ConfigError("job.steps(stream, outer=...): outer= needs a job.loader, or no data")
        return None if data is None else data.in_rounds(outer.schedule.inner_steps)

    @property
    def inner_steps(self) -> int:
        """Inner steps of a round; 0: a step has none."""
        return 0 if self.outer is None else self.outer.schedule.inner_steps

    def choose(self, parameters: Sequence[nn.Parameter]) -> None:
        """Only these parameters get gradients, from the next Harvest on."""
        self._chosen = set(map(id, parameters))

    def steps_inside(self) -> None:
        """Optimizers may step inside the pass that has begun."""
        self._guard.open_inside()

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
        if "StrayGradient" not in allow:
            self.carrier.drop_fixed_gradients()
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
        if self._chosen is not None:
            parameters = [named for named in parameters if id(named[1]) in self._chosen]
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

"""Frameworks are adapted when the script imports them: nothing of a framework is imported before."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from types import ModuleType
from typing import Any

from runtime.frontends.ddp import batches, mistakes
from runtime.frontends.ddp import enable as ddp_enable
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams

Adapt = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that module has been imported. modules: name -> function."""

    def __init__(self, modules: Mapping[str, Adapt]) -> None:
        self._waiting = dict(modules)

    def install(self) -> None:
        """Begin. What is imported already is adapted at once."""
        for name in list(self._waiting):
            if name in sys.modules:
                self._waiting.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        adapt = self._waiting.pop(fullname, None)
        if adapt is None:
            return None
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._waiting[fullname] = adapt  # libraries look whether another one is there, without an import

        def imported(module: ModuleType) -> None:
            if self._waiting.pop(fullname, None) is not None:
                adapt(module)

        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, imported)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader, and what follows."""

    def __init__(self, own: Any, adapt: Adapt) -> None:
        self._own = own
        self._adapt = adapt

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._adapt(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _transformers(module: ModuleType) -> None:
    from runtime.frontends.frameworks import hugging_face

    _note_version("transformers", sys.modules["transformers"].__version__, hugging_face.TESTED)
    hugging_face.install(Seams(), module)


def _accelerate(module: ModuleType) -> None:
    from runtime.frontends.frameworks import accelerate

    _note_version("accelerate", module.__version__, accelerate.TESTED)
    accelerate.install(Seams(), module)


def _metrics(module: ModuleType) -> None:
    """Of libraries whose metrics a script's evaluation feeds."""
    from runtime.frontends.ddp.evaluation import fed_metrics

    fed_metrics.guard(Seams(), module)


def _lightning(module: ModuleType) -> None:
    from runtime.frontends.frameworks.lightning import trainer

    _note_version(module.__name__, sys.modules[module.__name__].__version__, trainer.TESTED)
    trainer.install(Seams(), module)


def _keras(module: ModuleType) -> None:
    from runtime.frontends.frameworks.keras import fit

    _note_version("keras", sys.modules["keras.src.version"].__version__, fit.TESTED)
    fit.install(Seams(), module)


def _keras_models(module: ModuleType) -> None:
    from runtime.frontends.frameworks.keras import saving

    saving.install(Seams(), module)


def _torchdata(module: ModuleType) -> None:
    """Its loader of batches that knows its position, which the job knows here."""

    def load(script: RankScript, original: Any, self: Any, state_dict: Any) -> None:
        raise mistakes.not_in_place(
            "StatefulDataLoader.load_state_dict()",
            "Leave it out: a job that goes on from its checkpoint begins with the batch behind it.",
        )

    seams = Seams()
    seams.wrap(module.StatefulDataLoader, "__iter__", batches.iterate)
    seams.wrap(module.StatefulDataLoader, "load_state_dict", load)


def _timm(module: ModuleType) -> None:
    """Its PrefetchLoader takes each batch before it gives the one before; it gets one batch at a time here."""

    def one_by_one(script: RankScript, original: Any, self: Any) -> Iterator[Any]:
        for batch in self.loader:
            alone = copy(self)
            alone.loader = [batch]
            yield from original(alone)

    Seams().wrap(module.PrefetchLoader, "__iter__", one_by_one)


def _fabric(module: ModuleType) -> None:
    from runtime.frontends.frameworks.lightning import trainer

    trainer.install_fabric(Seams(), module)


def _note_version(framework: str, version: str, tested: Sequence[str]) -> None:
    """Say so if the tests did not run with this version."""
    if not version.startswith(tuple(f"{series}." for series in tested)):
        print(f"elastic: {framework} {version} is not tested in place, {', '.join(tested)} is", flush=True)


FRAMEWORKS: dict[str, Adapt] = {
    "accelerate": _accelerate,
    "evaluate": _metrics,
    "torchmetrics": _metrics,
    "keras.src.backend.torch.trainer": _keras,
    "keras.src.models.model": _keras_models,
    "transformers.trainer": _transformers,
    "lightning.fabric": _fabric,
    "lightning_fabric": _fabric,
    "lightning.pytorch": _lightning,
    "pytorch_lightning": _lightning,
    "timm.data.loader": _timm,
    "torchdata.stateful_dataloader.stateful_dataloader": _torchdata,
}


def enable(ranks: int | None = None) -> None:
    """As ddp.enable: train this script as logical ranks. Each framework that it imports from now on, or has imported,
    is adapted. Raises ConfigError."""
    before = RankScript.current()
    ddp_enable.enable(ranks)
    if before is None and RankScript.current() is not None:
        AfterImport(FRAMEWORKS).install()

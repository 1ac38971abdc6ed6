"""Files that functions and methods of Keras write: from the first fit() on by the leader, or by the next leader if it
dies meanwhile. Names of Keras that are not public, as 3.15 has them: saving_api in keras.src.models.model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elastic.errors import ConfigError
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams, missing

FUNCTIONS = ("save_model", "save_weights")
"""Model.save() and Model.save_weights() call them, too."""
PUBLIC = ("keras.saving", "keras.models")
"""Modules that may have taken them before."""


class _Depth(threading.local):
    alone = 0
    """Depth of what this worker alone does."""


_here = _Depth()


def install(seams: Seams, module: Any) -> None:
    """module: keras.src.models.model. Raises ConfigError."""
    if names := missing({module.__name__: (*(f"saving_api.{name}" for name in FUNCTIONS), "Model.export")}):
        raise ConfigError(f"Keras has no {', '.join(names)}: this version cannot train in place")
    for name in FUNCTIONS:
        own = getattr(module.saving_api, name)
        seams.wrap(module.saving_api, name, _save)
        for public in (sys.modules[name] for name in PUBLIC if name in sys.modules):
            if vars(public).get(name) is own:
                seams.replace(public, name, getattr(module.saving_api, name))
    seams.wrap(module.Model, "export", _save)


@contextmanager
def by_itself() -> Iterator[None]:
    """What this worker alone does: it writes its files itself."""
    _here.alone += 1
    try:
        yield
    finally:
        _here.alone -= 1


def _save(script: RankScript, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    if _here.alone or not script.begun:
        original(*args, **kwargs)
        return
    if script.passing:  # the others have written it
        return

    def write() -> None:
        if script.training.examiner is None:
            with by_itself():
                original(*args, **kwargs)

    write.__name__ = original.__name__
    script.job.once(write)

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy for a moment is not what is tested, and what is found can be found again. The same examples
# each time, because a change is to be told what it broke; `make fuzz` looks for new ones, and for many.
settings.register_profile(
    "patient",
    max_examples=int(os.environ.get("FUZZ", "30")),
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record what the machines answer now; read the diff")


# What torch and the tests make when they are imported stays: no collection looks through it, then or later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The bits of a sum depend on torch's thread count, and a test may change that: each begins with one thread."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    return (yield)

"""What the product uses of torch that torch does not document: all of it is listed, and all of it is there."""

from __future__ import annotations

import ast
import pkgutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
import elastic.ddp
from elastic.agent.worker.import_scan import program_of
from elastic.errors import UnsupportedTorch
from elastic.version import OLDEST_TORCH, torch_is_newer, torch_releases
from runtime import torch_names
from runtime.allreduce.ring import nccl
from runtime.forkserver import script_runner

ROOT = Path(__file__).resolve().parents[3]

OF_OBJECTS: dict[str, Callable[[], object]] = {
    "_buffers": lambda: nn.Module()._buffers,
    "_modules": lambda: nn.Module()._modules,
    "_non_persistent_buffers_set": lambda: nn.Module()._non_persistent_buffers_set,
    "_optimizer_state_dict_post_hooks": lambda: _optimizer()._optimizer_state_dict_post_hooks,
    "_optimizer_state_dict_pre_hooks": lambda: _optimizer()._optimizer_state_dict_pre_hooks,
    "_parameters": lambda: nn.Module()._parameters,
    "_state_dict_hooks": lambda: nn.Module()._state_dict_hooks,
    "_state_dict_pre_hooks": lambda: nn.Module()._state_dict_pre_hooks,
    "_num_yielded": lambda: iter(DataLoader(TensorDataset(torch.ones(2))))._num_yielded,
    "_orig_mod": lambda: cast(Any, torch.compile(nn.Linear(1, 1), backend="eager"))._orig_mod,
    "_raw_saved_other": lambda: _saved("_raw_saved_other"),
    "_raw_saved_self": lambda: _saved("_raw_saved_self"),
}
"""Attributes that an object has and its class has not."""

OF_NEWER = {"_check_manual_backward_finalization_supported"}
"""Since 2.15; tests/unit/runtime/frontends/ddp/test_wrapper.py finds that it is gone."""

REPLACED = {"_allgather_base", "_reduce_scatter_base"}
"""Methods that torch calls of a process group of ours. The collectives of test_mistakes.py come to them."""

NOT_OF_TORCH = {
    *("_Message", "_elastic_raised_at", "_fields", "_extra_state"),
    "_wrap_update",
    *("_exit", "_getframe", "_slotnames", "_run_module_as_main", "_Hash", "_shutdown", "_run_exitfuncs"),
}
"""Of ours, in strings, of the standard library and of torchmetrics; and the key that get_extra_state() has in a
state_dict()."""


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)])


def _saved(name: str) -> object:
    """What is raw belongs to the node, and must not be read when that is gone."""
    doubled = torch.ones(1, requires_grad=True) * torch.ones(1, requires_grad=True)
    return getattr(doubled.grad_fn, name).data


def listed() -> set[str]:
    scripts = (torch_names.OF_RANKS, torch_names.OF_KEPT, torch_names.OF_SHARDS, torch_names.OF_KEPT_RANKS)
    tables = (torch_names.OF_WORKERS, *scripts, torch_names.OF_NCCL)
    return {name for table in tables for name in table}


FRONTENDS = ROOT / "runtime" / "frontends"
ADAPTERS = {*(FRONTENDS / "frameworks").rglob("*.py"), *(FRONTENDS / "restart").glob("kept_*.py")}
"""Their private names are those of frameworks: each adapter lists them, and says which are missing."""


def sources() -> list[ast.Module]:
    """Of all that imports torch, but for the adapters of frameworks."""
    files = [path for path in (ROOT / "runtime").rglob("*.py") if path.name != "torch_names.py"]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in files if path not in ADAPTERS]


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def defined(trees: list[ast.Module]) -> set[str]:
    """Names that the product gives itself."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def used(trees: list[ast.Module]) -> Iterator[str]:
    """Private names that are imported of torch, are attributes of what is not `self`, or are strings as for getattr(),
    and all names of modules of torch that are private."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                yield from (one.name for one in names if private(one.name) or "._" in module)
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(value=of, attr=name) if private(name) or "torch._" in ast.unparse(of):
                yield name
            case ast.Constant(value=str(name)) if name.isidentifier() and private(name):
                yield name


def test_every_use_is_listed() -> None:
    trees = sources()
    last = {part for name in listed() for part in name.split(".") if private(part) or "._" in name}
    known = last | OF_OBJECTS.keys() | OF_NEWER | REPLACED | NOT_OF_TORCH
    assert set(used(trees)) - defined(trees) - known == set()


def test_adapters_of_frameworks_import_nothing_private_of_torch() -> None:
    imported = [
        f"{node.module} {one.name}"
        for path in ADAPTERS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] == "torch"
        for one in node.names
    ]
    assert imported
    assert [name for name in imported if "._" in name or " _" in name] == []


def test_nothing_is_listed_that_is_not_used() -> None:
    there = set(used(sources()))
    assert {name for name in listed() if name.rpartition(".")[2] not in there} - {
        "torch.distributed.ProcessGroupNCCL.Options.config",
        "torch.distributed.ProcessGroupNCCL.eager_connect_single_device",
    } == set()
    assert OF_OBJECTS.keys() <= there


@pytest.mark.parametrize("name", sorted(listed()))
def test_this_torch_has_it(name: str) -> None:
    if name in torch_names.OF_NCCL and not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    pkgutil.resolve_name(name)


@pytest.mark.parametrize("name", sorted(OF_OBJECTS))
def test_objects_of_this_torch_have_it(name: str) -> None:
    OF_OBJECTS[name]()


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(lambda: elastic.__getattr__("join"), id="elastic.join"),
        pytest.param(lambda: elastic.ddp.__getattr__("enable"), id="elastic.ddp.enable"),
        pytest.param(lambda: script_runner.run(program_of(["python", "x.py"]), ["x.py"]), id="--ranks"),
    ],
)
def test_a_worker_that_cannot_work_with_its_torch_says_so(
    begin: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_RANKS", "2")
    monkeypatch.setattr(sys, "orig_argv", [])
    monkeypatch.setattr(script_runner, "run_to_end", lambda script: script())  # which would end the threads of pytest
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    with pytest.raises(UnsupportedTorch) as raised:
        begin()
    said = str(raised.value)
    assert said.startswith("torch 9.1.0 lacks torch._C._storage_Use_Count, which elastic-ring ")
    assert said.endswith(f" before they are added; it was tested with {torch_releases()}")


def test_a_worker_that_cannot_use_the_nccl_of_its_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch_names, "OF_NCCL", {"torch.distributed.ProcessGroupNCCL.gone": "--ring nccl"})
    with pytest.raises(UnsupportedTorch, match=r"lacks torch\.distributed\.ProcessGroupNCCL\.gone"):
        nccl.check_device(torch.device("cuda", 0))


def test_only_a_newer_torch_is_told() -> None:
    assert not any(map(torch_is_newer, ("2.9.0", "2.11.0", "2.13.0+cpu", "2.15.1+cu132", "unknown", "")))
    assert torch_is_newer("2.16.0a0+git1").startswith("torch 2.16.0a0+git1 is newer than all that elastic-ring ")
    assert torch_is_newer("10.0").endswith("torch 2.11 to 2.15")


def test_what_is_installed_and_what_is_asked_for_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>={}.{}".format(*OLDEST_TORCH) in project["dependencies"]
    assert torch_is_newer(torch.__version__) == ""

"""What one part of a step, or of an evaluation, does to Lightning's objects: what it logs, what it does to plain
attributes of the LightningModule, and to metrics of torchmetrics.

A part is computed by one worker. Its effects are recorded there, taken back, and had on every worker, in the order of
the parts. Names of torchmetrics that are not public, as 1.9 has them: `_defaults`, `_reductions`, `_update_count`,
`_computed`, `_forward_cache`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.lightning.attributes import (
    NUMBERS,
    PlainAttributes,
    detached,
    with_lists,
    with_rows,
)
from runtime.loop.control_scalars import UNRECORDED
from runtime.loop.step import Step

ADDED_MAX = 64
"""Elements of a tensor that travel with a training step."""

OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
BY_NAME = {kind.__name__: kind for kind in NUMBERS}


class LogRecorder(dict[str, Any]):
    """In the place of Lightning's results, while a part is computed. It is empty, so nobody asks it for metrics."""

    def __init__(self, batch_size: Any) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self._infer = batch_size

    def log(self, fx: str, name: str, value: Any, **given: Any) -> None:
        """As Lightning's results are called by self.log()."""
        reduction = given.get("reduce_fx", torch.mean)
        row: dict[str, Any] = {option: given[option] for option in OPTIONS if option in given}
        kind = str(getattr(reduction, "__name__", reduction)).lower()
        row["name"], row["reduce_fx"] = name, "mean" if kind == "avg" else kind
        size = given.get("batch_size") if given.get("on_epoch") else None  # the value of a step has no weight
        if isinstance(value, torch.Tensor):
            row["value"] = float(value.detach())
            if size is None:
                size = self._infer() if given.get("on_epoch") and row["reduce_fx"] == "mean" else 1
        else:
            row["metric"] = given.get("metric_attribute")
        row["batch_size"] = int(size or 1)
        self.rows.append(row)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is added up here."""


class Record:
    """What a part has done."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.changes: dict[str, Any] = {}
        """Attribute -> as `PlainAttributes.changes` tells it."""
        self.values: dict[str, float | torch.Tensor] = {}
        """Attribute that had no finite number -> the number that it was set to, a tensor if that was one."""
        self.metrics: dict[str, dict[str, Any]] = {}
        """Path of a metric -> its state of this part alone."""
        self.nested: dict[str, Any] = {}
        """Attribute, a list of lists -> what was appended to each of these."""

    def plain(self) -> list[Any]:
        """What `gather` carries."""
        return [self.logs, self.changes, self.metrics, self.values, self.nested]

    @classmethod
    def of(cls, plain: list[Any]) -> Record:
        record = cls()
        record.logs, record.changes, record.metrics, record.values, record.nested = plain
        return record


@contextmanager
def recording(trainer: Any, module: Any, loop: Any, batch_size: Any) -> Iterator[Record]:
    """Record what the body does, and take it back. loop: Lightning's, that has the results in progress. batch_size: a
    function that infers it."""
    with attributes(module, evaluates=True) as record, logs(record, trainer, module, loop, batch_size):
        yield record


@contextmanager
def attributes(module: Any, *, evaluates: bool = False) -> Iterator[Record]:
    """Record what the body does to plain attributes, and take it back. evaluates: the body is part of an evaluation.
    Raises ConfigError for what is refused."""
    record, before = Record(), PlainAttributes(module)
    try:
        yield record
        record.changes, record.values, record.nested = before.changes(), before.values(), before.nested()
    finally:
        before.put_back(new_lists=evaluates)


@contextmanager
def logs(record: Record, trainer: Any, module: Any, loop: Any, batch_size: Any) -> Iterator[None]:
    """Put into the record what the body logs and what its metrics count, and take it back. See `recording`."""
    results, connector = loop._results, trainer._logger_connector
    function = connector._current_fx
    loop._results = recorder = LogRecorder(batch_size)
    metrics = dict(metrics_of(module))
    states = {path: _begin(metric) for path, metric in metrics.items()}
    try:
        yield
        record.logs = recorder.rows
        record.metrics = {path: said for path, metric in metrics.items() if (said := _state(metric))["updates"]}
    finally:
        loop._results, connector._current_fx = results, function
        for path, metric in metrics.items():
            vars(metric).update(states[path])


def have(module: Any, record: Record) -> None:
    """Have the effects of a part on this worker."""
    for path, said in record.metrics.items():
        _merge(attrgetter(path)(module), said)
    for name, change in record.changes.items():
        value: Any = getattr(module, name, None)
        if isinstance(change, dict):
            rows = change.get("rows")
            setattr(module, name, detached(change["list"]) if rows is None else with_rows(name, value, rows))
        elif isinstance(value, list):
            value.extend(change)
        elif isinstance(value, bool):
            setattr(module, name, bool(value + change > 0))
        elif isinstance(value, torch.Tensor):
            setattr(module, name, _added(value, change))
        else:
            setattr(module, name, change if value is None else value + change)
    for name, set_to in record.values.items():
        setattr(module, name, detached(set_to))
    for name, added in record.nested.items():
        setattr(module, name, with_lists(getattr(module, name, None), added))
    for row in record.logs:
        said = {key: value for key, value in row.items() if key not in ("name", "value", "metric")}
        if "metric" in row:
            said["metric_attribute"] = row["metric"]
        module.log(row["name"], attrgetter(row["metric"])(module) if "metric" in row else row["value"], **said)


# Metrics of torchmetrics


def objects_of(strategy: Any, trainer: Any) -> dict[str, Any]:
    """What a training by Lightning changes besides its loops, by name: model, optimizers, schedulers, the scaler, and
    modules of callbacks."""
    module = trainer.lightning_module
    objects: dict[str, Any] = {"model": module}
    for number, optimizer in enumerate(strategy.optimizers):
        objects[f"optimizer{number or ''}"] = optimizer
    for number, config in enumerate(strategy.lr_scheduler_configs):
        objects[f"scheduler{number or ''}"] = config.scheduler
    if (scaler := getattr(strategy.precision_plugin, "scaler", None)) is not None:
        objects["scaler"] = scaler
    for number, callback in enumerate(trainer.callbacks):
        for name, value in vars(callback).items():
            if isinstance(value, nn.Module) and value is not module:
                objects[f"callback{number}_{name.strip('_')}"] = value
    return objects


def checkpoints_in(callbacks: list[Any]) -> list[str]:
    """What is in the directories of Lightning's checkpoints."""
    roots = {str(callback.dirpath) for callback in callbacks if getattr(callback, "dirpath", None)}
    return sorted(os.path.join(root, name) for root in roots if os.path.isdir(root) for name in os.listdir(root))


def metrics_of(module: Any) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        if hasattr(part, "_defaults") and hasattr(part, "_reductions"):
            yield path, part


def _begin(metric: Any) -> dict[str, Any]:
    """Its state so far; from now on it has none."""
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    before = {name: vars(metric).get(name) for name in names}
    before = {name: list(value) if isinstance(value, list) else value for name, value in before.items()}
    for name, default in metric._defaults.items():
        setattr(metric, name, [] if isinstance(default, list) else default.detach().clone().to(metric.device))
    metric._update_count, metric._computed, metric._forward_cache = 0, None, None
    return before


def _state(metric: Any) -> dict[str, Any]:
    cache = metric._forward_cache
    return {
        "states": {name: detached(getattr(metric, name)) for name in metric._defaults},
        "updates": metric._update_count,
        "cache": cache.detach().clone() if isinstance(cache, torch.Tensor) else None,
    }


def _merge(metric: Any, said: Mapping[str, Any]) -> None:
    """Add a part's state to a metric's."""
    before, updates = metric._update_count, said["updates"]
    for name, value in said["states"].items():
        own, kind = getattr(metric, name), _kind(metric, name)
        if isinstance(own, list):
            more = value if isinstance(value, list) else [value]
            setattr(metric, name, [*own, *(item.to(metric.device) for item in more)])
            continue
        value = value.to(own)
        if kind == "sum":
            value = own + value
        elif kind == "mean":
            value = (own * before + value * updates) / max(1, before + updates)
        elif kind in ("max", "min"):
            value = torch.maximum(own, value) if kind == "max" else torch.minimum(own, value)
        else:
            raise ConfigError(
                f"{type(metric).__name__} adds up {name!r} in a way of its own, which cannot be spread over workers: "
                "use a metric whose states are sums, means, minima, maxima or lists"
            )
        setattr(metric, name, value)
    metric._update_count, metric._computed, metric._forward_cache = before + updates, None, said["cache"]


def _kind(metric: Any, name: str) -> str:
    """How torchmetrics reduces a state: "dim_zero_sum" -> "sum"."""
    return str(getattr(metric._reductions[name], "__name__", "")).removeprefix("dim_zero_")


# A training step: the parts of all ranks, as scalars of the step


def tell(step: Step, module: Any, part: int, record: Record) -> dict[str, float]:
    """Put a record of one rank into the step. part: number of the micro-batch. Returns what was logged, for the step's
    own record. Raises ConfigError for what a step does not carry."""
    sums: dict[str, float] = {}
    for row in record.logs:
        kind, size = row["reduce_fx"], row["batch_size"]
        bits = sum(row.get(option, False) << place for place, option in enumerate(OPTIONS))
        key = ["log", part, kind, bits, row.get("metric") or ""]
        if "metric" in row:
            sums[_key(row["name"], *key)] = 1.0
        elif kind in ("max", "min"):
            sums[_key(row["name"], *key, step.shard.index)] = row["value"]
        else:
            weight = size if kind == "mean" else 1
            sums[_key(row["name"], *key)] = row["value"] * weight
            sums[_key(row["name"], *key, "n")] = float(weight)
    for name in record.nested:
        raise ConfigError(
            f"training_step() appends to a list in self.{name}; append to a list of its own, or use self.log()"
        )
    for name, change in record.changes.items():
        if isinstance(change, dict):
            if "rows" in change:
                raise ConfigError(
                    f"training_step() puts rows behind self.{name}; append numbers to a list, or use self.log()"
                )
            continue
        for place, value in enumerate(_numbers(name, change)):
            sums[_key(name, "add", part, place)] = value
            sums[_key(name, "add", part, place, "n")] = 1.0
    for name, set_to in record.values.items():
        key = ["set", part, *_kind_set(set_to)]
        sums[_key(name, *key)] = float(set_to)
        sums[_key(name, *key, "n")] = 1.0
    for path, said in record.metrics.items():
        sums[_key(path, "metric", part)] = float(said["updates"])
        metric = attrgetter(path)(module)
        for name, value in said["states"].items():
            if isinstance(value, list) or value.numel() > ADDED_MAX or _kind(metric, name) != "sum":
                raise ConfigError(
                    f"{type(metric).__name__} in training_step() keeps {name!r}, which is no short sum: log a number, "
                    "or use the metric in validation_step()"
                )
            for place, number in enumerate(value.reshape(-1).tolist()):
                sums[_key(path, "metric", part, name, place)] = float(number)
    step.log(sum=sums)
    return {row["name"]: row["value"] for row in record.logs if "value" in row and row["reduce_fx"] == "mean"}


def told(module: Any, metrics: Mapping[str, float], ranks: int, device: torch.device | None = None) -> list[Record]:
    """The records of all micro-batches, from what the ranks have told. device: instead of the module's."""
    records: dict[int, Record] = {}
    sets: dict[tuple[int, str], list[tuple[list[str], float, float]]] = {}
    for name, (kind, part, *about), value in _in_order(metrics):
        record = records.setdefault(part, Record())
        if kind == "log":
            _told_log(record, name, about, value, metrics.get(_key(name, kind, part, *about, "n"), 1.0))
        elif kind == "add":
            own = getattr(module, name)
            mean = value / (metrics[_key(name, kind, part, *about, "n")] if isinstance(own, list) else ranks)
            if isinstance(own, list) or (isinstance(own, torch.Tensor) and own.dim()):
                record.changes.setdefault(name, []).append(mean)
            else:
                record.changes[name] = int(mean) if isinstance(own, int) and mean.is_integer() else mean
        elif kind == "set":
            ranks_that_set = metrics[_key(name, kind, part, *about, "n")]
            sets.setdefault((part, name), []).append((about, value, ranks_that_set))
        elif kind == "metric":
            said = record.metrics.setdefault(name, {"states": {}, "updates": 0, "cache": None})
            if about:
                said["states"].setdefault(about[0], []).append(value)
            else:
                said["updates"] = round(value)
    for (part, name), found in sets.items():
        mean = sum(value for _, value, _ in found) / sum(count for _, _, count in found)
        records[part].values[name] = _set_to([kind for kind, _, _ in found], mean, device or module.device)
    for record in records.values():
        _shape(module, record)
    return [records[part] for part in sorted(records)]


def _kind_set(value: float | torch.Tensor) -> list[str]:
    """What `tell` says of the type of a number that a rank has set an attribute to."""
    if isinstance(value, torch.Tensor):
        return ["Tensor", str(value.dtype).removeprefix("torch."), value.device.type]
    return [type(value).__name__]


def _set_to(kinds: list[list[str]], mean: float, device: torch.device) -> float | torch.Tensor:
    """The mean of what ranks have set, as the widest of the types that they have set: bool, int, float, tensor. A bool
    is true if any rank has set it. kinds: of `_kind_set`. device: of the module."""
    numbers = [kind for kind, *rest in kinds if not rest]
    tensors = [kind[1:] for kind in kinds if len(kind) > 1]
    if tensors:
        dtype = functools.reduce(torch.promote_types, (getattr(torch, name) for name, _ in tensors))
        for kind in numbers:
            dtype = torch.result_type(torch.zeros((), dtype=dtype), BY_NAME[kind](1))
        where = device if device.type in {name for _, name in tensors} else torch.device(tensors[0][1])
        return _as_dtype(torch.tensor(mean, dtype=torch.float64), dtype).to(where)
    if "float" in numbers:
        return mean
    if "int" in numbers:
        return int(mean) if mean.is_integer() else mean
    return mean > 0


def _added(value: torch.Tensor, change: Any) -> torch.Tensor:
    """A tensor and the mean of what ranks have added to it. Truth values are true if any rank has them true."""
    change = torch.as_tensor(change).to(value.device)
    return value.float() + change > 0 if value.dtype == torch.bool else value + _as_dtype(change, value.dtype)


def _as_dtype(mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mean of whole numbers is rounded; one of truth values is true if any was."""
    if dtype.is_floating_point or dtype == torch.bool:
        return mean.to(dtype)
    return mean.round().to(dtype)


def _in_order(metrics: Mapping[str, float]) -> list[tuple[str, list[Any], float]]:
    """(name, what the key says, value) of what `tell` has put in, without the numbers of values."""
    found = []
    for key, value in metrics.items():
        if key.startswith(UNRECORDED):
            name, _, about = key.removeprefix(UNRECORDED).rpartition(" [")
            if (says := json.loads(f"[{about}"))[-1] != "n":
                found.append((name, says, value))
    return sorted(found, key=lambda entry: entry[:2])


def _told_log(record: Record, name: str, about: list[Any], value: float, weight: float) -> None:
    kind, bits, path = about[:3]
    row: dict[str, Any] = {option: bool(bits >> place & 1) for place, option in enumerate(OPTIONS)}
    row.update(name=name, reduce_fx=kind, batch_size=max(1, round(weight)))
    if path:
        row["metric"] = path
    elif kind in ("max", "min"):
        earlier = next((found for found in record.logs if found["name"] == name and found["reduce_fx"] == kind), None)
        if earlier is not None:
            earlier["value"] = max(earlier["value"], value) if kind == "max" else min(earlier["value"], value)
            return
        row["value"] = value
    else:
        row["value"] = value / weight if kind == "mean" else value
    record.logs.append(row)


def _shape(module: Any, record: Record) -> None:
    """Give the states of metrics and the tensors back their shapes, and metrics their values of this step."""
    for path, said in record.metrics.items():
        metric = attrgetter(path)(module)
        for name, numbers in said["states"].items():
            like = metric._defaults[name]
            said["states"][name] = torch.tensor(numbers, dtype=torch.float64).to(like.dtype).reshape(like.shape)
        before = _begin(metric)
        _merge(metric, said)
        said["cache"] = metric.compute().detach().clone()
        vars(metric).update(before)
    for name, change in record.changes.items():
        own = getattr(module, name)
        if isinstance(own, torch.Tensor) and isinstance(change, list):
            record.changes[name] = torch.tensor(change).reshape(own.shape)


def _key(name: str, *about: Any) -> str:
    return f"{UNRECORDED}{name} {json.dumps(about, separators=(',', ':'))}"


def _numbers(name: str, change: Any) -> list[float]:
    values = change.reshape(-1).tolist() if isinstance(change, torch.Tensor) else change
    values = values if isinstance(values, list) else [values]
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as why:
        raise ConfigError(
            f"training_step() appends to self.{name} what is no number; append the loss, or use self.log()"
        ) from why
    if len(found) > ADDED_MAX:
        raise ConfigError(f"training_step() changes {len(found)} numbers of self.{name}; a step carries {ADDED_MAX}")
    return found

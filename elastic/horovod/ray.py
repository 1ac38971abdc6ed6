"""horovod.ray's executors, on a Ray cluster (docs/ray.md). A job begins when run() is called, and ends with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """timeout_s: how long a job waits for all its workers before it begins with fewer, if it may. elastic_timeout: how
    long, in seconds, it waits with fewer than its smallest number. min_num_proc, max_num_proc: those of
    ElasticRayExecutor."""

    timeout_s: float = 30.0
    elastic_timeout: float = 600.0
    min_num_proc: int | None = None
    max_num_proc: int | None = None


class RayExecutor:
    """Calls functions in workers on a Ray cluster. With min_workers or max_workers the function trains in one with
    @hvd.elastic.run, and workers come and go; without them it is called again on all workers when one is lost."""

    def __init__(
        self,
        settings: ExecutorSettings | None = None,
        num_workers: int | None = None,
        *,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        use_gpu: bool = False,
        **options: Any,
    ) -> None:
        """num_workers: how many; or num_hosts, each with num_workers_per_host. use_gpu: each has one. options:
        cpus_per_worker and gpus_per_worker (default 1 each), min_workers, max_workers, elastic_timeout; others are
        those of elastic.ray.Trainer(), and of Horovod's a line says what became of them. Raises ConfigError."""
        if (num_workers is None) == (num_hosts is None) and options.get("min_workers") is None:
            raise ConfigError("RayExecutor(): give num_workers=, or num_hosts= and num_workers_per_host=")
        number = num_workers if num_hosts is None else num_hosts * num_workers_per_host
        self._settings = settings or ExecutorSettings()
        gpus = options.pop("gpus_per_worker", None) or 1
        self._resources = {"CPU": options.pop("cpus_per_worker", 1), **({"GPU": gpus} if use_gpu else {})}
        times = {"start_timeout": self._settings.timeout_s, "elastic_timeout": self._settings.elastic_timeout}
        world = {
            "num_proc": number,
            "min_num_proc": options.pop("min_workers", None),
            "max_num_proc": options.pop("max_workers", None),
        }
        for name in ("use_current_placement_group", "override_discovery"):
            options.pop(name, None)  # Ray finds the places either way
        self._options = {**times, **world, "workers_per_node": num_workers_per_host, **options}

    @staticmethod
    def create_settings(timeout_s: float = 30.0, **options: Any) -> ExecutorSettings:
        """options: fields of ExecutorSettings; Horovod's others are about ssh and networks, which are not used."""
        return ExecutorSettings(
            timeout_s, **{name: value for name, value in options.items() if name in ExecutorSettings.__slots__}
        )

    def start(self, *executable: object, extra_env_vars: Mapping[str, str] | None = None, **more: object) -> None:
        """The environment of later jobs, which begin in run(). Raises ConfigError for an object that workers would keep
        from one call to the next."""
        if any(value is not None for value in (*executable, *more.values())):
            raise ConfigError("RayExecutor.start(executable_cls=): workers end with their job; make it in the function")
        if extra_env_vars:
            self._options["env"] = {name: str(value) for name, value in extra_env_vars.items()}

    def run(self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[T]:
        """Call fn(*args, **kwargs) in the workers of a job, and return what it returns on each rank, by rank. Raises
        what elastic.ray.Trainer() and its fit() raise."""
        from elastic.platforms.horovod import function_calls
        from elastic.platforms.ray import Trainer

        call = function_calls.call_of(fn, args or (), kwargs, self._options)
        return list(Trainer(call.function, resources_per_worker=self._resources, **call.of_engine()).fit().values)

    def __getattr__(self, name: str) -> Any:
        if name in ("run_remote", "execute", "execute_single"):
            raise ConfigError(f"RayExecutor.{name}() wants workers that live between two calls; use run()")
        raise AttributeError(name)

    def shutdown(self) -> None:
        """Nothing is left of a job when run() returns."""


class ElasticRayExecutor(RayExecutor):
    """The same, with the numbers of its settings."""

    def __init__(
        self, settings: ExecutorSettings, use_gpu: bool = False, cpus_per_slot: int = 1, **options: Any
    ) -> None:
        super().__init__(
            settings,
            settings.max_num_proc or settings.min_num_proc,
            use_gpu=use_gpu,
            cpus_per_worker=cpus_per_slot,
            min_workers=settings.min_num_proc or 1,
            max_workers=settings.max_num_proc,
            **{name: value for name, value in options.items() if name not in ("env_vars", "override_discovery")},
        )
        self.start(extra_env_vars=options.get("env_vars"))

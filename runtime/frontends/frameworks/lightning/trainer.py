"""Lightning in place: its own Trainer, loops, callbacks and loggers, with the gradients of all ranks in each step.

Lightning's loops get the places of batches instead of batches. At the last place of a step, the strategy computes this
worker's ranks, one after the other, by Lightning's own training step and backward(); behind it Lightning clips, steps,
logs, validates and saves as it always does. In an evaluation the batches are spread over the workers, and each worker's
loop goes through the results of all.

A newcomer comes to its first batch, and is given there what the others' loops have: all stand at the same place.

Names of Lightning that are not public, as 2.6 has them: those of PRIVATE, and what `state.py` names.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from elastic.errors import ConfigError
from runtime.frontends.ddp.process_group import LiveRank
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams, missing
from runtime.frontends.frameworks.lightning.evaluation import BatchPlace
from runtime.frontends.frameworks.lightning.refusals import check_arguments, check_callbacks
from runtime.frontends.frameworks.lightning.strategy import RankStrategy

TESTED = ("2.6",)
"""Versions with which the tests ran."""

PRIVATE = {
    "trainer.connectors.signal_connector": ("_SignalConnector.register_signal_handlers",),
    "core.module": ("LightningModule._on_before_batch_transfer",),
    "loops.fit_loop": ("_FitLoop.run",),
    "loops.training_epoch_loop": ("_TrainingEpochLoop._build_kwargs", "_TrainingEpochLoop._should_accumulate"),
    "loops.optimization.automatic": ("_AutomaticOptimization._training_step",),
    "trainer.connectors.logger_connector.result": ("_ResultCollection.log", "_ResultMetric.update"),
    "trainer.connectors.logger_connector.logger_connector": ("_LoggerConnector.should_reset_tensors",),
}
"""Module -> names in it."""

LIMITS = ("limit_val_batches", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps")
"""Attributes of a trainer that count the batches of one rank."""


def install(seams: Seams, module: Any) -> None:
    """module: lightning.pytorch or pytorch_lightning. Every Trainer that is made from now on trains in place. Raises
    ConfigError."""
    package = module.__name__
    if names := missing(PRIVATE, package):
        raise ConfigError(
            f"Lightning has no {', '.join(names)}: this version cannot train in place, {', '.join(TESTED)} can; or "
            "start the script with --restart"
        )
    strategies = sys.modules[f"{package}.strategies"]
    base = strategies.ParallelStrategy
    strategy: Any = type("ElasticStrategy", (RankStrategy, base), {"base": base, "__module__": __name__})
    strategies.StrategyRegistry.register("elastic", strategy, description="logical ranks of `elastic run --ranks`")
    allowed = (strategies.DDPStrategy, strategy)
    original = module.Trainer.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        script = RankScript.current()
        if script is None:
            original(self, *args, **kwargs)
            return
        named = kwargs.get("strategy")
        if isinstance(named, str) and named.startswith("ddp") and named in strategies.StrategyRegistry:
            kwargs["strategy"] = strategies.StrategyRegistry.get(named)  # with what the script has registered it
        check_arguments(kwargs, allowed)
        replaced = kwargs.get("strategy")
        if not isinstance(replaced, strategy):
            kwargs["strategy"] = "elastic"
        kwargs.update(devices=1, num_nodes=1)
        if script.job.device.type == "cpu":
            kwargs["accelerator"] = "cpu"
        original(self, *args, **kwargs)
        checkpoint_io = vars(replaced).get("_checkpoint_io") if type(replaced) is allowed[0] else None
        if checkpoint_io is not None:
            self.strategy.checkpoint_io = checkpoint_io
        for name in LIMITS:
            if type(limit := getattr(self, name)) is int:
                setattr(self, name, limit * script.ranks)

    def fit(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A worker that gets the state from others, or from a checkpoint of this job, reads none of Lightning's: these
        are older, and may be deleted or half written."""
        given = inspect.signature(original).bind(*args, **kwargs)
        check_callbacks(given.arguments["self"].callbacks)
        strategy = given.arguments["self"].strategy
        if strategy.begin_fit():
            given.arguments.pop("ckpt_path", None)
        found = original(*given.args, **given.kwargs)
        strategy.end_fit()
        return found

    def run(script: RankScript, original: Any, /, self: Any) -> Any:
        self.trainer.strategy.begin_run()
        return original(self)

    def transfer(script: RankScript, original: Any, /, self: Any, batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, BatchPlace) else original(self, batch, dataloader_idx=dataloader_idx)

    def sampler(script: RankScript, original: Any, /, self: Any, *args: Any, **kwargs: Any) -> None:
        """The sampler of a DataLoader is asked for all ranks, so its own rank means nothing. There is no process group
        that it could ask."""
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        if not dist.is_initialized():
            given["num_replicas"] = ranks = given.get("num_replicas") or script.ranks
            given["rank"] = rank if (rank := given.get("rank")) is not None and rank < ranks else 0
        original(**given)

    def exists(script: RankScript, original: Any, /, self: Any, filepath: Any, trainer: Any) -> Any:
        return trainer.strategy.file_exists(str(filepath))

    seams.replace(module.Trainer, "__init__", made)
    seams.wrap(module.Trainer, "fit", fit)
    seams.wrap(sys.modules[f"{package}.loops.fit_loop"]._FitLoop, "run", run)
    seams.wrap(sys.modules[f"{package}.core.module"].LightningModule, "_on_before_batch_transfer", transfer)
    seams.wrap(DistributedSampler, "__init__", sampler)
    seams.wrap(sys.modules[f"{package}.callbacks"].ModelCheckpoint, "file_exists", exists)


def install_fabric(seams: Seams, module: Any) -> None:
    """module: lightning.fabric or lightning_fabric. A loop of the script's own over what Fabric sets up has turns, as
    that of a script for DistributedDataParallel (see frontends/ddp). Each Fabric has all ranks, whatever it asks for,
    and is rank 0 where the present leader is."""
    original = module.Fabric.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        script = RankScript.current()
        if script is not None:
            given = inspect.signature(original).bind(self, *args, **kwargs).arguments
            strategy = given.get("strategy", "auto")
            if isinstance(strategy, str) and not (strategy in ("auto", "elastic") or strategy.startswith("ddp")):
                raise ConfigError(
                    f"Fabric(strategy={strategy!r}) cannot train in place; write strategy='ddp', or start the script "
                    "with --restart"
                )
            if strategy in ("auto", "elastic"):
                given["strategy"] = "ddp"
            given.update(devices=script.ranks, num_nodes=1)
            if script.job.device.type == "cpu":
                given["accelerator"] = "cpu"
            args, kwargs = (), {name: value for name, value in given.items() if name != "self"}
        original(self, *args, **kwargs)

    def live_rank(script: RankScript, original: Any, /, self: Any) -> int:
        return LiveRank(script.home)

    seams.replace(module.Fabric, "__init__", made)
    environment = sys.modules[f"{module.__name__}.plugins.environments.torchelastic"].TorchElasticEnvironment
    for name in ("global_rank", "local_rank"):
        seams.wrap(environment, name, live_rank)

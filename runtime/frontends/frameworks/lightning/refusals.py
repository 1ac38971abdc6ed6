"""What Lightning cannot do in place, refused by name, with what to write instead."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from elastic.errors import ConfigError
from runtime.frontends.frameworks.lightning.evaluation import BatchPlace

REFUSED = {
    "GradientAccumulationScheduler": "",
    "StochasticWeightAveraging": ", which puts a scheduler of its own in the place of another one while it trains,",
    "BaseFinetuning": " or BackboneFinetuning, which adds parameters to the optimizer while it trains,",
}
"""Callbacks of Lightning -> why a newcomer, or a run that goes on, could not have what they have done."""

OF_DDP = ("ddp_comm_hook", "model_averaging_period", "precision_plugin")
"""Arguments of a DDPStrategy that would change the training, and have no effect here."""


def check_callbacks(callbacks: list[Any]) -> None:
    """Raise ConfigError for those that train to find a setting: nothing of that is to stay. Tuner adds them."""
    for kind, call in (("LearningRateFinder", "lr_find()"), ("BatchSizeFinder", "scale_batch_size()")):
        if any(kind in (each.__name__ for each in type(callback).__mro__) for callback in callbacks):
            raise ConfigError(
                f"{kind} and Tuner.{call} cannot train in place; look for the setting in a run of one process without "
                "elastic run, and write down what it finds"
            )


def check_arguments(given: dict[str, Any], allowed: tuple[type, ...]) -> None:
    """Raise ConfigError for arguments of a Trainer that cannot train in place."""
    strategy = given.get("strategy", "auto")
    fits = strategy in ("auto", "elastic") or strategy.startswith("ddp") if isinstance(strategy, str) else None
    if not (type(strategy) in allowed if fits is None else fits):
        shown = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise ConfigError(
            f"Trainer(strategy={shown!r}) cannot train in place; write strategy='ddp', or start the script with "
            "--restart"
        )
    for name in OF_DDP:
        if type(strategy) is allowed[0] and vars(strategy).get(f"_{name}") is not None:
            raise ConfigError(
                f"DDPStrategy({name}=...) cannot train in place: gradients are the mean over all ranks in each step; "
                "leave it out, or start the script with --restart"
            )
    for name in ("sync_batchnorm", "reload_dataloaders_every_n_epochs"):
        if given.get(name):
            raise ConfigError(f"Trainer({name}={given[name]!r}) cannot train in place; leave it out")


def check_training(strategy: Any, loader: Any, *, more: bool) -> None:
    """Raise ConfigError for what cannot be trained in place. more: fit() has a training loader already."""
    trainer, module = strategy._trainer, strategy.lightning_module
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    refused = {
        "a training loader that is no DataLoader": not isinstance(loader, DataLoader),
        "an IterableDataset": isinstance(getattr(loader, "dataset", None), IterableDataset),
        "a second training loader": more,
        "manual optimization": not module.automatic_optimization,
        f"{len(strategy.optimizers)} optimizers": len(strategy.optimizers) != 1,
        **{f"{callback}{why}": callback in kinds for callback, why in REFUSED.items()},
        "training_step(dataloader_iter)": "dataloader_iter" in inspect.signature(module.training_step).parameters,
        "val_check_interval as a time, which each worker's clock tells otherwise,": (
            trainer._val_check_time_interval is not None
        ),
    }
    if names := [name for name, used in refused.items() if used]:
        raise ConfigError(
            f"Lightning with {names[0]} cannot train in place; start the script with --restart, or write the loop "
            "with job.steps()"
        )


def check_validations(trainer: Any, batches: int) -> None:
    """Raise ConfigError for a validation inside of accumulated batches, where a step is in progress. batches: of a rank
    in an epoch."""
    interval, micro = trainer.val_check_interval, trainer.accumulate_grad_batches
    if not trainer.enable_validation:
        return
    every = interval if isinstance(interval, int) else max(1, int(batches * interval))
    if trainer.check_val_every_n_epoch is not None:
        fits = every >= batches or every % micro == 0
    else:
        fits = every % batches == 0 or (batches % micro == 0 and every % micro == 0)
    if not fits:
        raise ConfigError(
            f"Trainer(val_check_interval={interval}, accumulate_grad_batches={micro}) cannot train in place, as it "
            f"validates inside of accumulated batches; use an interval that is a multiple of {micro} batches"
        )


def check_evaluation(trainer: Any, module: Any) -> None:
    """Raise ConfigError if the step of the evaluation that begins takes its batches itself."""
    stage = "predict" if trainer.predicting else "test" if trainer.testing else "validation"
    if "dataloader_iter" in inspect.signature(getattr(module, f"{stage}_step")).parameters:
        raise ConfigError(
            f"{stage}_step(dataloader_iter) cannot be evaluated in place, as workers share the batches of an "
            f"evaluation; write {stage}_step(batch, batch_idx)"
        )


def check_batch(batch: Any, stage: str) -> None:
    """Raise ConfigError if an evaluation gives batches of several loaders at once. stage: its name."""
    several = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    if any(isinstance(each, BatchPlace) for each in several):
        raise ConfigError(
            f"a CombinedLoader that gives several batches at once cannot be evaluated in place ({stage}); use a list "
            "of DataLoaders, which are gone through one after the other"
        )

"""Trainers and optimizers of Lightning that would run another step than the one that is charged."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hush.core.errors import Unsupported

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_PRECISIONS = ("32-true", "bf16-mixed")
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_CALLBACKS = {
    "StochasticWeightAveraging": "it sets the weights while the step trains them",
    "WeightAveraging": "it sets the weights while the step trains them",
    "LearningRateFinder": "it takes steps that it then takes back, and each is a release",
    "BatchSizeFinder": "it takes steps that it then takes back, and each is a release",
    "GradientAccumulationScheduler": "a step draws its whole batch at once",
}


def check_gradients(trainer: "Trainer") -> None:
    """Raise for clipping and accumulation of gradients by the Trainer.

    Lightning refuses them too, but later, and by advice to switch to automatic optimization.

    Args:
        trainer: about to fit a `PrivateModule`.
    """
    if trainer.gradient_clip_val is not None:
        raise Unsupported(
            f"gradient_clip_val={trainer.gradient_clip_val!r} of the Trainer would clip a gradient that "
            "is noisy already, and bounds no record: the plan clips each record's. Leave it out, and "
            "set the plan's clipping, as in clipping=hush.L2(norm=1.0)."
        )
    if trainer.accumulate_grad_batches != 1:
        raise Unsupported(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches!r} of the Trainer would add up "
            "several noisy gradients: a private step draws its whole batch at once. Raise the plan's "
            "sampling rate; PoissonLoader(..., physical_batch=...) is what is in memory at a time."
        )


def check_trainer(trainer: "Trainer") -> None:
    """Raise for settings of a Trainer that would change the private step.

    Args:
        trainer: about to fit a `PrivateModule`.
    """
    if trainer.precision not in _PRECISIONS:
        raise Unsupported(
            f"precision={trainer.precision!r} scales losses or converts records, and the private step "
            f"does neither: its gradients would be of other numbers. Use one of {_PRECISIONS}."
        )
    strategy = type(trainer.strategy).__name__
    if strategy not in _STRATEGIES:
        raise Unsupported(
            f"strategy {strategy} moves or splits the weights and gradients by itself. Use one device "
            "or strategy='ddp', or fully_shard in a loop of your own (docs/distributed.md)."
        )
    if "MultiProcessing" in type(getattr(trainer.strategy, "launcher", None)).__name__:
        raise Unsupported(
            "the strategy starts processes by multiprocessing (ddp_spawn, ddp_fork, ddp_notebook), "
            "which end with fit: weights come back from them, and the ledger that says what was spent "
            "does not. Use strategy='ddp', which runs the script in every process, or one device."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                raise Unsupported(
                    f"the callback {type(callback).__name__} cannot run beside a private step: "
                    f"{_CALLBACKS[kind.__name__]}. Leave it out; docs/lightning.md has an average of "
                    "the weights."
                )


def one_optimizer(configured: Any) -> torch.optim.Optimizer:
    """The optimizer among what configure_optimizers returned."""
    found = list(_optimizers(configured))
    if len(found) != 1:
        raise Unsupported(
            f"configure_optimizers returns {len(found)} optimizers: a private step applies one noisy "
            "gradient of all parameters with one. Return one optimizer, with several parameter groups "
            "where settings differ."
        )
    return found[0]


def _optimizers(configured: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(configured, torch.optim.Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _optimizers(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for part in configured:
            yield from _optimizers(part)

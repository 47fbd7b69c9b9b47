"""Private training of a LightningModule in Lightning's own loop. See docs/lightning.md."""

import inspect
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hush.accounting.ledger import Ledger
from hush.core.errors import CheckpointError, PrivacyWarning, Unsupported
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.value import check_kind, with_article
from hush.integrations import require
from hush.integrations.host_loop import HostLoop, batch_data
from hush.training.checkpoint import settings_of
from hush.training.data import Data
from hush.training.disjoint import check_held_out
from hush.training.records import leaves
from hush.training.source import CollateFn

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers.logger import DummyLogger
else:
    _pytorch = require("lightning.pytorch", "lightning")
    Callback, LightningModule = _pytorch.Callback, _pytorch.LightningModule
    DummyLogger = require("lightning.pytorch.loggers.logger", "lightning").DummyLogger

_CHECKPOINT = "hush"
_MONITORING = ("monitor", "strict", "reduce_on_plateau")
_PRECISIONS = ("32-true", "bf16-mixed")
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_SETS_WEIGHTS = "it changes the weights during private training"
_TAKES_BACK = "it takes steps and reverts them, and each step is a release"
_CALLBACKS = {
    "GradientAccumulationScheduler": "a step draws its whole batch at once",
    **dict.fromkeys(("StochasticWeightAveraging", "WeightAveraging"), _SETS_WEIGHTS),
    **dict.fromkeys(("LearningRateFinder", "BatchSizeFinder"), _TAKES_BACK),
}
_MIX_IN = "class Private(PrivateModule, Mine): pass"


class PoissonLoader(HostLoop):
    """Replacement for a training `DataLoader`: one item per step, with records drawn by the plan.

    Its length is the number of steps in an epoch, 1 / sampling rate. After `fit`, `spent()` returns the
    guarantee.

    Args:
        data: Records of the batches for `training_step`: a pair of tensors, or a map-style data set.
        plan: Sampling, clipping, noise and release.
        budget: Maximum privacy cost of all charges on the ledger. Training stops when it is spent.
        ledger: Ledger or path; by default a ledger in memory. Resuming from a checkpoint needs a ledger
            on disk.
        collate_fn: Function as in a `DataLoader`, called with one record at a time.
        workers: Number of processes that read ahead.
        pad_to: Public length of every record, or a tree of lengths in the structure of the batch, as in
            `hush.Source`.
        pad_value: Padding value, or a tree of padding values.
        physical_batch: Number of records to process at once; by default as many as fit in memory.
        generator: Seed of sampling and noise, for tests; the guarantee then has `randomness: seeded`.
    """

    def __init__(
        self,
        data: Data,
        plan: Plan,
        budget: Budget,
        *,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        collate_fn: CollateFn | None = None,
        workers: int = 0,
        pad_to: Any = None,
        pad_value: Any = 0,
        physical_batch: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(ledger, generator)
        self.records = data
        self.data = batch_data(
            data, collate_fn=collate_fn, workers=workers, pad_to=pad_to, pad_value=pad_value
        )
        self.plan = check_kind("plan", plan, Plan)
        self.budget = check_kind("budget", budget, Budget)
        self.physical_batch = physical_batch

    def __len__(self) -> int:
        return max(1, round(1 / self.plan.sampling.average_participation))

    def __iter__(self) -> Iterator[int]:
        """Indices of the steps of an epoch. The private step draws the records."""
        if (
            self.step is None
        ):  # checked at the first item, because the Trainer creates the iterator before on_train_start
            raise Unsupported(
                "a PoissonLoader needs a PrivateModule, which creates the private step that draws the "
                f"batches. Put PrivateModule first in the bases: {_MIX_IN}."
            )
        yield from range(len(self))


class PrivateModule(LightningModule):
    """Mix-in that trains a `LightningModule` privately: `class Private(PrivateModule, Mine): pass`.

    Training records come from a `PoissonLoader`. `Mine.training_step` is called with one record at a
    time and returns that record's loss. Optimizer, schedules, validation, loggers, callbacks and
    checkpoints are unchanged.

    **Guarantee.** `loader.spent()` covers the weights, the checkpoints of the `Trainer` and the logged
    `epsilon`. Metrics that `training_step` logs depend on the private records; they are dropped with a
    warning. Validation records are not protected.
    """

    _recording = False  # whether the loss of a record is being computed
    _checkpoint: dict[str, Any] | None = None  # name of the step's state in the loaded checkpoint
    _settings: list[dict[str, Any]]  # settings of the optimizer before any schedule changes them
    _monitors: dict[int, str]  # metric that a schedule monitors, by the id of the schedule

    @property
    def automatic_optimization(self) -> bool:
        """False: the private step updates the weights."""
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        if not automatic:
            raise Unsupported(
                "the module sets automatic_optimization=False: its training_step would apply gradients "
                "that are neither clipped nor charged. Return the loss from training_step instead."
            )

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        parts = list(_parts(configured))
        optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        if len(optimizers) != 1:
            raise Unsupported(
                f"configure_optimizers returns {len(optimizers)} optimizers: a private step applies one "
                "noisy gradient of all parameters. Return one optimizer, with parameter groups."
            )
        self._settings, self._monitors = settings_of(optimizers[0]), {}
        for part in parts:
            if isinstance(part, dict):
                schedule = part.get("scheduler", part.get("lr_scheduler"))
                schedule = schedule.get("scheduler") if isinstance(schedule, dict) else schedule
                if "monitor" in part:
                    self._monitors[id(schedule)] = part["monitor"]
                # Lightning warns about these and ignores them under manual optimization
                for name in _MONITORING:
                    part.pop(name, None)
        return configured

    def configure_callbacks(self) -> list[Callback]:
        """Callbacks of the module, and a callback that closes the ledger. Lightning calls this first."""
        _check_trainer(self.trainer)
        own = super().configure_callbacks()
        return [*(own if isinstance(own, (list, tuple)) else [own]), _CloseLedger()]

    def on_train_start(self) -> None:
        """Create the private step, or restore it from a checkpoint."""
        super().on_train_start()
        for name in ("training_step", "configure_optimizers"):
            if getattr(type(self), name) is not getattr(PrivateModule, name):
                raise Unsupported(
                    f"{type(self).__name__} overrides the private {name}: gradients would be neither "
                    f"clipped nor charged. Put PrivateModule first in the bases: {_MIX_IN}."
                )
        loader = self._loader()
        for held_out in leaves(self.trainer.val_dataloaders):
            check_held_out(getattr(held_out, "dataset", held_out), loader.records)
        resumed = self._checkpoint if self.trainer.ckpt_path else None
        if self.trainer.ckpt_path and resumed is None:
            raise CheckpointError(
                f"{self.trainer.ckpt_path} is not a checkpoint of a private run: weights that were "
                "trained on these records without noise are not private. Start with public weights."
            )
        wanted = self.trainer.estimated_stepping_batches
        loader.begin(
            self,
            self._loss_of_record,
            self.optimizers(),  # a single optimizer: see configure_optimizers
            loader.plan,
            settings=self._settings,
            budget=loader.budget,
            delta=loader.budget.delta,
            steps=None if wanted == float("inf") else int(wanted),
            physical_batch=loader.physical_batch,
            resumed=resumed,
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one private step. The loop stops when the budget is used up."""
        _, batch_idx = args
        loader = self._loader()
        moved = loader.advance()
        if moved is None:
            self.trainer.should_stop = True
            return None
        if moved:
            self._step_schedules("step", batch_idx + 1)
        assert loader.step is not None
        if loader.step.steps % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self.log("epsilon", loader.step.spent().epsilon.upper, batch_size=1)
        return None

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self._step_schedules("epoch", self.current_epoch + 1)

    def on_train_end(self) -> None:
        """Charge all planned steps if a callback has stopped the run, and check the weights."""
        super().on_train_end()
        if (step := self._loader().step) is not None:
            self._loader().stop()
            step.spent()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the public name of the step's state. The secret state is saved beside the ledger."""
        super().on_save_checkpoint(checkpoint)
        if self._loader().step is not None:
            checkpoint[_CHECKPOINT] = self._loader().save()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._checkpoint = checkpoint.get(_CHECKPOINT)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a metric, as in Lightning. Metrics of training records are dropped."""
        if self._recording:
            _warn_of_log(repr(name))
            return
        super().log(name, value, *args, **options)

    def _loss_of_record(self, batch: Any) -> Any:
        """Call the training_step of the user's module on a batch of one record."""
        own = super().training_step
        loggers = self.trainer.loggers
        self._recording = True
        self.trainer.loggers = [_NoLogger() for _ in loggers]
        try:
            return own(batch, 0) if len(inspect.signature(own).parameters) > 1 else own(batch)
        finally:
            self._recording = False
            self.trainer.loggers = loggers

    def _loader(self) -> PoissonLoader:
        loader = self.trainer.train_dataloader
        if not isinstance(loader, PoissonLoader):
            raise Unsupported(
                f"the training records come from {with_article(type(loader).__name__)}: shuffled "
                "records are not the sampling that is accounted for. Pass trainer.fit(module, "
                "hush.integrations.lightning.PoissonLoader(dataset, plan, budget)); with "
                "hush.RandomAllocation in the plan, each record takes part once per epoch."
            )
        return loader

    def _step_schedules(self, interval: str, number: int) -> None:
        for config in self.trainer.lr_scheduler_configs:
            if config.interval != interval or number % config.frequency:
                continue
            monitor = self._monitors.get(id(config.scheduler))
            metric = None if monitor is None else self.trainer.callback_metrics.get(monitor)
            if isinstance(config.scheduler, ReduceLROnPlateau) and metric is None:
                raise Unsupported(
                    f"the schedule monitors {monitor!r}, which is not logged: a loss of the training "
                    "records is not released. Monitor a metric of validation_step."
                )
            self.lr_scheduler_step(config.scheduler, metric)


class _CloseLedger(Callback):
    """Closes the ledger when training ends or raises."""

    def on_exception(self, trainer: "Trainer", pl_module: LightningModule, _: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def on_fit_end(self, trainer: "Trainer", pl_module: LightningModule) -> None:
        if isinstance(trainer.train_dataloader, PoissonLoader):
            trainer.train_dataloader.close()


class _NoLogger(DummyLogger):
    """Replaces the loggers while the loss of a record is computed."""

    def log_metrics(self, metrics: Any = None, *_: Any, **__: Any) -> None:
        _warn_of_log(", ".join(map(repr, metrics or ())))

    @property
    def experiment(self) -> Any:
        _warn_of_log("to an experiment")
        return super().experiment


def _warn_of_log(what: str) -> None:
    warnings.warn(
        f"training_step logs {what}, a metric of private records that the guarantee does not cover: it "
        "is dropped. Log it in validation_step, for records that need no protection.",
        PrivacyWarning,
        stacklevel=3,
    )


def _check_trainer(trainer: "Trainer") -> None:
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    strategy = type(trainer.strategy).__name__
    rejected = {
        "gradient_clip_val": clip is not None
        and f"={clip!r} would clip the noisy gradient. Leave it out, and set the plan's clipping.",
        "accumulate_grad_batches": accumulated != 1
        and f"={accumulated!r} would accumulate noisy gradients, but a private step draws its whole "
        "batch at once. Increase the rate of the plan, and pass physical_batch= to the PoissonLoader.",
        "precision": trainer.precision not in _PRECISIONS
        and f"={trainer.precision!r} scales losses or converts records. Use one of {_PRECISIONS}.",
        "strategy": strategy not in _STRATEGIES
        and f" {strategy} moves or shards weights and gradients. Use one device or "
        "strategy='ddp', or fully_shard in your own loop (docs/distributed.md).",
        "launcher": "MultiProcessing" in type(getattr(trainer.strategy, "launcher", None)).__name__
        and " starts processes (ddp_spawn, ddp_fork, ddp_notebook) that end with fit: they return the "
        "weights, but not the ledger. Use strategy='ddp', or one device.",
    }
    for name, reason in rejected.items():
        if reason:
            raise Unsupported(f"{name}{reason}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                raise Unsupported(
                    f"the callback {type(callback).__name__} cannot run with a private step: "
                    f"{_CALLBACKS[kind.__name__]}. Leave it out, see docs/lightning.md."
                )


def _parts(configured: Any) -> Iterator[Any]:
    """Iterate over the result of configure_optimizers and all entries of its lists and dictionaries."""
    yield configured
    if isinstance(configured, (dict, list, tuple)):
        for part in configured.values() if isinstance(configured, dict) else configured:
            yield from _parts(part)

"""Mix-in for a LightningModule whose training is private."""

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from hush.core.errors import CheckpointError, PrivacyWarning, Unsupported
from hush.core.value import with_article
from hush.integrations.batch_loss import BatchLoss
from hush.integrations.extras import require
from hush.integrations.lightning.checks import check_gradients, check_trainer, one_optimizer
from hush.integrations.lightning.loader import PoissonLoader
from hush.training.checks.disjoint import check_held_out
from hush.training.resume import settings_of
from hush.training.sources.records import leaves

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers.logger import DummyLogger
else:
    _pytorch = require("lightning.pytorch", "lightning")
    Callback, LightningModule = _pytorch.Callback, _pytorch.LightningModule
    DummyLogger = require("lightning.pytorch.loggers.logger", "lightning").DummyLogger

_CHECKPOINT = "hush"
_MONITORING = ("monitor", "strict", "reduce_on_plateau")


class _LetGo(Callback):
    """Closes the ledger when training has ended, or an error has ended it."""

    def on_exception(self, trainer: "Trainer", pl_module: LightningModule, _: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def on_fit_end(self, trainer: "Trainer", pl_module: LightningModule) -> None:
        if isinstance(trainer.train_dataloader, PoissonLoader):
            trainer.train_dataloader.close()


class _NoLogger(DummyLogger):
    """Stands in the place of the loggers while the loss of a record is computed."""

    def log_metrics(self, metrics: Any = None, *_: Any, **__: Any) -> None:
        _warn_of_log(", ".join(map(repr, metrics or ())))

    @property
    def experiment(self) -> Any:
        _warn_of_log("to an experiment")
        return super().experiment


def _warn_of_log(what: str) -> None:
    warnings.warn(
        f"training_step logs {what}, a number of the private records that no charge covers: "
        "it is left out. Log it in validation_step, of records that need no protection.",
        PrivacyWarning,
        stacklevel=3,
    )


class PrivateModule(LightningModule):
    """Mix-in that trains a `LightningModule` privately: `class Private(PrivateModule, Mine): pass`.

    Training records come from a `PoissonLoader`; `Mine.training_step` is called with one record at a
    time, and what it returns is that record's loss. Everything else of the module, and of the `Trainer`,
    is used as it is: optimizer and schedules, validation, loggers, callbacks, checkpoints.

    **Guarantee.** `loader.spent()`, for the weights, for what `Trainer` saves in checkpoints and
    for what is logged as `epsilon`. What `training_step` logs is a function of the records: it is left
    out, with a warning. Validation records have no protection.
    """

    _recording = False
    """Whether the loss of a record is being computed."""
    _checkpoint: dict[str, Any] | None = None
    """Name of the step's state in the checkpoint that was loaded."""
    _settings: list[dict[str, Any]]
    """Settings of the optimizer when it was made."""
    _monitors: dict[int, str]
    """Metric that a schedule follows, by its identity."""

    @property
    def automatic_optimization(self) -> bool:
        """False: the private step moves the weights."""
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        if not automatic:
            raise Unsupported(
                "the module sets automatic_optimization=False: a training_step that calls the optimizer "
                "itself would move the weights by gradients that are neither clipped nor charged. "
                "Return the loss from training_step, and leave the optimizer to the private step."
            )

    def configure_optimizers(self) -> Any:
        """The module's own optimizer and schedules."""
        configured = super().configure_optimizers()
        self._settings = settings_of(one_optimizer(configured))
        self._monitors = {}
        return _take_monitors(configured, self._monitors)

    def on_fit_start(self) -> None:
        """Refuse what would run another step than the one that is charged."""
        super().on_fit_start()
        if type(self).training_step is not PrivateModule.training_step:
            raise Unsupported(
                f"{type(self).__name__} has a training_step of its own in place of the private one: its "
                "gradients would be neither clipped nor charged. Define it in a class of its own, and "
                "mix in from the left: class Private(PrivateModule, Mine): pass."
            )
        check_trainer(self.trainer)

    def on_train_start(self) -> None:
        """Make the private step, or go on with that of the checkpoint."""
        super().on_train_start()
        if not hasattr(self, "_settings"):
            raise Unsupported(
                f"{type(self).__name__} has a configure_optimizers of its own in place of the private "
                "one, which keeps to one optimizer and its first settings: a resumed run would not know "
                "with which it began. Define it in a class of its own, and mix in from the left: class "
                "Private(PrivateModule, Mine): pass."
            )
        loader = self._loader()
        for held_out in leaves(self.trainer.val_dataloaders):
            check_held_out(getattr(held_out, "dataset", held_out), loader.records)
        resumed = self._checkpoint if self.trainer.ckpt_path else None
        if self.trainer.ckpt_path and resumed is None:
            raise CheckpointError(
                f"{self.trainer.ckpt_path} is of no private run: weights that were trained on these "
                "records without noise cannot be made private by going on. Begin with public weights."
            )
        wanted = self.trainer.estimated_stepping_batches
        loader.begin(
            BatchLoss(self, self._loss_of_record),
            self.optimizers(),  # type: ignore[arg-type]  # one, by configure_optimizers
            self._settings,
            resumed,
            None if wanted == float("inf") else int(wanted),
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One private step; the loop stops where the budget ends.

        Args:
            args: item of the `PoissonLoader`, which holds no record, and its place in the epoch.
            kwargs: none.
        """
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
        """Step the schedules of epochs."""
        super().on_train_epoch_end()
        self._step_schedules("epoch", self.current_epoch + 1)

    def on_train_end(self) -> None:
        """Raise if anything but the private step moved the weights, while they can be compared."""
        super().on_train_end()
        step = self._loader().step
        if step is not None:
            step.spent()

    def configure_callbacks(self) -> list[Callback]:
        """The module's own callbacks, and one that closes the ledger; called before anything else."""
        check_gradients(self.trainer)
        own = super().configure_callbacks()
        return [*(own if isinstance(own, (list, tuple)) else [own]), _LetGo()]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the step's state in the checkpoint; the state itself is secret, and kept elsewhere."""
        super().on_save_checkpoint(checkpoint)
        loader = self._loader()
        if loader.step is not None:
            checkpoint[_CHECKPOINT] = loader.saved()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the name of the step's state."""
        super().on_load_checkpoint(checkpoint)
        self._checkpoint = checkpoint.get(_CHECKPOINT)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """As in Lightning; nothing of a training record.

        Args:
            name: key of the metric.
            value: its value.
            args: as in Lightning.
            options: likewise.
        """
        if self._recording:
            _warn_of_log(repr(name))
            return
        super().log(name, value, *args, **options)

    def _loss_of_record(self, batch: Any) -> Any:
        """What the module's own training_step returns for a batch of one record."""
        own = super().training_step
        loggers = self.trainer.loggers
        self._recording = True
        self.trainer.loggers = [_NoLogger() for _ in loggers]  # what is written there is on disk at once
        try:
            return own(batch, 0) if len(inspect.signature(own).parameters) > 1 else own(batch)
        finally:
            self._recording = False
            self.trainer.loggers = loggers

    def _loader(self) -> PoissonLoader:
        loader = self.trainer.train_dataloader
        if not isinstance(loader, PoissonLoader):
            raise Unsupported(
                f"the training records come from {with_article(type(loader).__name__)}: records in a "
                "shuffled order do not take part by chance, which is what is charged. Pass "
                "trainer.fit(module, hush.integrations.lightning.PoissonLoader(dataset, plan, budget))."
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
                    f"the schedule follows {monitor!r}, which is not logged: a loss of the training "
                    "records is not released. Follow a metric of validation_step."
                )
            self.lr_scheduler_step(config.scheduler, metric)


def _take_monitors(configured: Any, monitors: dict[int, str], monitor: str | None = None) -> Any:
    """What configure_optimizers returned, less the monitors of schedules, which are put in a dictionary.

    Under manual optimization Lightning leaves a monitor out, with a warning: the module follows it.
    """
    if isinstance(configured, dict):
        monitor = configured.get("monitor", monitor)
        kept = {key: part for key, part in configured.items() if key not in _MONITORING}
        if "scheduler" in kept and monitor is not None:
            monitors[id(kept["scheduler"])] = monitor
        if "lr_scheduler" in kept:
            kept["lr_scheduler"] = _take_monitors(kept["lr_scheduler"], monitors, monitor)
        return kept
    if isinstance(configured, (list, tuple)):
        return type(configured)(_take_monitors(part, monitors) for part in configured)
    if monitor is not None:
        monitors[id(configured)] = monitor
    return configured

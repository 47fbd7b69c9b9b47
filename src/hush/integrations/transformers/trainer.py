"""`PrivateTrainer`: a Trainer of the transformers library whose step is private."""

import inspect
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hush.accounting.ledger.ledger import Ledger
from hush.core.errors import LedgerError, PrivacyWarning, Unsupported
from hush.core.guarantee import Guarantee, check_delta
from hush.core.plan import Plan
from hush.integrations.batch_loss import BatchLoss, batch_data, own_loss
from hush.integrations.extras import require
from hush.integrations.step_file import load_step, save_step
from hush.integrations.transformers.arguments import (
    Privacy,
    check_arguments,
    check_evaluation,
    check_inputs_left,
    check_overrides,
    check_records,
    pad_values,
)
from hush.integrations.transformers.checkpoints import SaveStep, read_name, write_name
from hush.integrations.transformers.trainer_state import check_state_unchanged, state_of_trainer
from hush.training.data import Batch, Data
from hush.training.resume import settings_of
from hush.training.sources.source import Source
from hush.training.step import PrivateStep
from hush.training.stopping import last_step

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint
else:
    _transformers = require("transformers", "transformers")
    require("accelerate", "transformers")
    Trainer = _transformers.Trainer
    get_last_checkpoint = _transformers.trainer_utils.get_last_checkpoint

_OF_RECORDS = ("loss", "grad_norm", "train_loss")
"""Logs of a Trainer that are computed from training records; here nothing is computed for them."""


class PrivateTrainer(Trainer):
    """Trainer whose training is differentially private: `PrivateTrainer(..., epsilon=3.0)`.

    TrainingArguments keep their meaning: `per_device_train_batch_size` records are worked on at a time,
    times `gradient_accumulation_steps` (and processes) is the expected size of a batch; epochs or
    `max_steps`, the optimizer and the learning-rate schedule are as they say; `max_grad_norm` is the
    norm that each record's gradient is clipped to. Callbacks, evaluation, logging, checkpoints and
    adapters are the Trainer's own.

    **Guarantee.** `spent()`, for the weights, for everything in checkpoints and for what is logged:
    training losses are not, `epsilon` is. Evaluation records have no protection. The loss of a record
    is `compute_loss` of a batch of it alone.

    Args:
        args: positional arguments of Trainer.
        epsilon: limit of everything on the ledger; noise is calibrated to it for the steps of the
            TrainingArguments, on a ledger without other runs. With others on it training stops earlier:
            pass a plan of `hush.calibrate(..., spent=ledger.counts)` instead.
        delta: of the limit; None: a tenth of one over the number of records, which is public.
        plan: in place of calibrated noise; its batch and norm must be those of the TrainingArguments.
            With `epsilon`, training stops where that is used up.
        pad_to: public length that the data collator's output is padded or cut to, or a dictionary of
            lengths by name. None: the collator makes every record the same shape.
        ledger: ledger or path of one; None: `ledger.jsonl` in `output_dir`. All runs on it add up.
        generator: seeds draws and noise, for tests; the guarantee says so.
        options: keyword arguments of Trainer.
    """

    def __init__(
        self,
        *args: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        plan: Plan | None = None,
        pad_to: Any = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        self._privacy = Privacy(epsilon=epsilon, delta=delta, plan=plan)
        self._recording = False
        """Whether the loss of a record is being computed."""
        passed = {**dict(zip(inspect.signature(Trainer).parameters, args, strict=False)), **options}
        check_records(passed.get("train_dataset"))  # before Trainer asks for the max_steps of a stream
        super().__init__(*args, **options)
        check_arguments(self.args, self.train_dataset, self.eval_dataset)
        self._privacy.check(
            records=self._records,
            batch=self.get_total_train_batch_size(self.args),
            clip_norm=self.args.max_grad_norm,
        )
        self.private_step: PrivateStep | None = None
        """The private step, once training has begun."""
        self._pad_to, self._generator = pad_to, generator
        folder: Any = self.args.output_dir
        self._ledger = Path(folder, "ledger.jsonl") if ledger is None else ledger
        self._resumed: Path | None = None
        self._settings: list[dict[str, Any]] = []
        self._batches: Iterator[Batch] = iter(())
        self._end = 0
        self.add_callback(SaveStep(self.save_step))

    def spent(self, delta: float | None = None) -> Guarantee:
        """(epsilon, delta) guarantee of everything on the ledger, for what the steps on it released.

        Args:
            delta: of the guarantee; None: that of the run.

        Returns:
            The guarantee.
        """
        if self.private_step is not None:
            return self.private_step.ledger.epsilon(delta)
        if isinstance(self._ledger, Ledger):
            return self._ledger.epsilon(delta)
        if not Path(self._ledger).exists():
            raise LedgerError(f"nothing is charged yet, and there is no {self._ledger}: train() first.")
        with Ledger(self._ledger, read_only=True) as ledger:
            return ledger.epsilon(delta)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train privately; as in Trainer.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the last one: the run goes on as if it had
                not stopped, on the same ledger, and steps that it repeats are not charged again.
            args: as in Trainer.
            options: likewise.

        Returns:
            As in Trainer, without a training loss.
        """
        check_arguments(self.args, self.train_dataset, self.eval_dataset)
        check_overrides(type(self), PrivateTrainer, Trainer)
        resumed: Any = resume_from_checkpoint
        if resumed is True:
            resumed = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        self._resumed = Path(resumed) if resumed else None
        self.private_step = None
        try:
            output = super().train(resume_from_checkpoint, *args, **options)
            if self.private_step is not None:
                if self.args.load_best_model_at_end:
                    self.private_step.adopt_weights()  # released before, chosen by evaluation records
                self.private_step.spent()  # raises if anything else has moved them
        finally:
            self._batches = iter(())
            data = getattr(self, "_data", None)
            if isinstance(data, Source):
                data.stop_workers()
            if self.private_step is not None and not isinstance(self._ledger, Ledger):
                self.private_step.ledger.close()
        metrics = {name: value for name, value in output.metrics.items() if name not in _OF_RECORDS}
        return output._replace(training_loss=math.nan, metrics=metrics)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Loader of one empty item a physical batch: the records are drawn by the private step."""
        own = super().get_train_dataloader()
        records: Any = own.dataset
        check_inputs_left(records, self.train_dataset, self.label_names)
        self._data: Data = batch_data(
            records,
            collate_fn=own.collate_fn,
            workers=own.num_workers,
            pad_to=self._pad_to,
            pad_value=pad_values(self.processing_class),
        )
        accumulated = self.args.gradient_accumulation_steps
        items = math.ceil(len(own) / accumulated) * accumulated
        return DataLoader(range(items), batch_size=1, collate_fn=_nothing)  # type: ignore[arg-type]

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of records: of the training data, whose loader has none."""
        if isinstance(dataloader.dataset, range):
            return self._records
        return int(super().num_examples(dataloader))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Zero: it is counted from the records that were drawn."""
        return 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule, as in Trainer; the optimizer's settings before it are those of the run."""
        made: Any = self.optimizer if optimizer is None else optimizer
        self._settings = settings_of(made)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> Tensor:
        """One private step, charged before the weights move, where accumulation would end.

        Args:
            model: as it was prepared.
            inputs: empty.
            args: not used.
            options: not used.

        Returns:
            Zero: no loss of the records is released.
        """
        if self.private_step is None:
            self._begin()
        if self.accelerator.sync_gradients:
            assert self.private_step is not None
            model.train()
            if self.private_step.steps < self._end:
                self.private_step(next(self._batches))
            if self.private_step.steps >= self._end:
                self.control.should_training_stop = True
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log as Trainer does: epsilon in the place of the training loss.

        Args:
            logs: of Trainer; those that would be of training records are left out.
            args: as in Trainer.
            options: likewise.
        """
        if self._recording:
            warnings.warn(
                f"compute_loss logs {', '.join(logs)} of private records, which no charge covers: it is "
                "left out. Log metrics of evaluation records, which need no protection.",
                PrivacyWarning,
                stacklevel=2,
            )
            return
        kept = {name: value for name, value in logs.items() if name not in _OF_RECORDS}
        if "learning_rate" in kept and self.private_step is not None:
            kept["epsilon"] = self.private_step.spent().epsilon.upper
        super().log(kept, *args, **options)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> Any:
        """Evaluate and log the metrics; of training records they would be released uncharged.

        Args:
            eval_dataset: records that need no protection; as in Trainer.
            args: as in Trainer.
            options: likewise.

        Returns:
            As in Trainer.
        """
        check_evaluation(eval_dataset, self.train_dataset)
        return super().evaluate(eval_dataset, *args, **options)

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Predictions and their metrics; of training records they would be released uncharged.

        Args:
            test_dataset: records that need no protection; as in Trainer.
            args: as in Trainer.
            options: likewise.

        Returns:
            As in Trainer.
        """
        check_evaluation(test_dataset, self.train_dataset)
        return super().predict(test_dataset, *args, **options)

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Refused: the best of several runs depends on the records beyond the charge of one."""
        raise Unsupported(
            "hyperparameter_search releases the best of several runs, each of them charged alone, and "
            "which one it is depends on all. Use hush.tune, which charges the whole search once."
        )

    def save_step(self, folder: Path) -> None:
        """Name the private step's state in a checkpoint, and keep it beside the ledger (secret).

        Args:
            folder: of the checkpoint.
        """
        assert self.private_step is not None
        name = save_step(self.private_step, self._data, self._generator)
        if self.args.should_save:
            write_name(folder, name)

    @property
    def _records(self) -> int:
        """Number of slots."""
        dataset: Any = self.train_dataset
        return len(dataset)

    def _begin(self) -> None:
        """Make the step on the weights and the optimizer as they are, resumed or new."""
        records = self._records
        plan = self._privacy.plan_for(
            records=records,
            batch=self.get_total_train_batch_size(self.args),
            clip_norm=self.args.max_grad_norm,
            steps=self.state.max_steps,
        )
        if isinstance(self._ledger, Path):
            self._ledger.parent.mkdir(parents=True, exist_ok=True)
        optimizer: Any = self.optimizer
        model: Any = self.model
        step = PrivateStep(
            BatchLoss(model, self._loss_of_record),
            own_loss,
            getattr(optimizer, "optimizer", optimizer),  # Accelerate's holds the real one
            plan,
            records=records,
            ledger=self._ledger,
            generator=self._generator,
            physical_batch=self.args.per_device_train_batch_size,
        )
        self.private_step = step
        delta = check_delta(self._privacy.delta_for(records), step.records, step.adjacency.unit)
        step.optimizer_settings = self._settings
        if self._resumed is not None:
            load_step(step, read_name(self._resumed), self._data, self._generator)
        budget = self._privacy.budget(records)
        self._end = self.state.max_steps
        if budget is not None:
            self._end, _ = last_step(step, budget, self.state.max_steps)
        self._batches = step.batches(self._data)
        step.ledger.store_delta(delta)

    def _loss_of_record(self, batch: dict[str, Any]) -> Any:
        """What compute_loss says of a batch of one record."""
        model: Any = self.model
        before = state_of_trainer(self)
        self._recording = True
        try:
            loss = self.compute_loss(model, dict(batch))
        finally:
            self._recording = False
        check_state_unchanged(before, state_of_trainer(self))
        return loss


def _nothing(_: list[int]) -> dict[str, Any]:
    """An item of the loader: it holds no record."""
    return {}

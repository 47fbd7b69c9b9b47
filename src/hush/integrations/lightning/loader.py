"""Private records in the place of a training DataLoader, and the step that draws them."""

import os
from collections.abc import Iterator
from typing import Any

import torch

from hush.accounting.ledger.ledger import Ledger
from hush.core.errors import Unsupported
from hush.core.guarantee import Budget, Guarantee, check_delta
from hush.core.plan import Plan
from hush.core.value import check_kind
from hush.integrations.batch_loss import BatchLoss, batch_data, own_loss
from hush.integrations.step_file import load_step, save_step
from hush.training.data import Batch, Data, count
from hush.training.sources.reader import CollateFn
from hush.training.sources.source import Source
from hush.training.step import PrivateStep
from hush.training.stopping import last_step


class PoissonLoader:
    """Private records in the place of a training `DataLoader`: one item a step, which draws by the plan.

    Its length is one epoch, one over the sampling rate. `spent()` is the guarantee after `fit`.

    Args:
        data: records whose batches `training_step` takes: a pair of tensors, or a map-style data set.
        plan: sampling, clipping, noise and release.
        budget: most that everything on the ledger may cost; training stops where it ends.
        ledger: ledger, or path of one: a run resumes from a checkpoint on a ledger on disk alone. None:
            one in memory.
        collate_fn: as for a `DataLoader`; called with one record at a time.
        workers: processes that read ahead.
        pad_to: public length that ragged records are padded or cut to: one number, or a tree like the
            batch with None where nothing is padded. So is `pad_value`.
        pad_value: number to pad with.
        physical_batch: records to work on at once; None: as many as fit.
        generator: seeds the draws and the noise, for tests; the guarantee says so.
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
        self.records = data
        self.data = batch_data(
            data, collate_fn=collate_fn, workers=workers, pad_to=pad_to, pad_value=pad_value
        )
        self.plan = check_kind("plan", plan, Plan)
        self.budget = check_kind("budget", budget, Budget)
        self.step: PrivateStep | None = None
        """The private step, once training has begun."""
        self._ledger, self._physical_batch, self._generator = ledger, physical_batch, generator
        self._batches: Iterator[Batch] | None = None
        self._end = 0

    def __len__(self) -> int:
        """Steps an epoch."""
        return max(1, round(1 / self.plan.sampling.participation))

    def __iter__(self) -> Iterator[int]:
        """Numbers of an epoch's steps: the records are drawn by the step itself."""
        if self.step is None:  # at the first item: the Trainer makes the iterator before on_train_start
            raise Unsupported(
                "a PoissonLoader holds no batches: the private step draws them, and no PrivateModule "
                "has made one. Mix it in from the left: class Private(PrivateModule, Mine): pass."
            )
        yield from range(len(self))

    def begin(
        self,
        model: BatchLoss,
        optimizer: torch.optim.Optimizer,
        settings: list[dict[str, Any]],
        checkpoint: dict[str, Any] | None,
        steps: int | None,
    ) -> None:
        """Make the step, and load the state of a checkpoint.

        Args:
            model: losses of the module.
            optimizer: of the module, as it goes on.
            settings: of the optimizer when it was made.
            checkpoint: name of the step's state; None: a new run.
            steps: that are wanted in all; None: as many as the budget allows.
        """
        step = PrivateStep(
            model,
            own_loss,
            optimizer,
            self.plan,
            records=count(self.data),
            ledger=self._ledger,
            generator=self._generator,
            physical_batch=self._physical_batch,
        )
        self.step = step
        check_delta(self.budget.delta, step.records, step.adjacency.unit)
        step.optimizer_settings = settings  # a restored optimizer has the schedule's
        if checkpoint is not None:
            load_step(step, checkpoint, self.data, self._generator)
        self._end, _ = last_step(step, self.budget, steps)
        self._batches = None
        step.ledger.store_delta(self.budget.delta)

    def advance(self) -> bool | None:
        """Run one step, charged before the weights move.

        Returns:
            Whether they moved; None: the budget, or the steps asked for, are used up.
        """
        assert self.step is not None
        if self._batches is None:  # not in `begin`: the model is tried under the precision of its steps
            self._batches = self.step.batches(self.data)
        return None if self.step.steps >= self._end else self.step(next(self._batches))

    def spent(self, delta: float | None = None) -> Guarantee:
        """(epsilon, delta) guarantee of everything on the ledger, for what the steps on it released.

        Whatever the module's weights are by now: Lightning moves them when training is over, and loads
        the best ones for tests.

        Args:
            delta: of the guarantee; None: that of the budget.

        Returns:
            The guarantee.
        """
        if self.step is None:
            raise Unsupported(
                "no step was run from this loader: there is nothing to account for. Call trainer.fit; "
                "of an earlier run, hush.Ledger(path, read_only=True).epsilon()."
            )
        return self.step.ledger.epsilon(delta)

    def saved(self) -> dict[str, Any]:
        """Keep the secret state of the step beside its ledger, and return its public name."""
        assert self.step is not None
        return save_step(self.step, self.data, self._generator)

    def close(self) -> None:
        """Let go of a ledger that was opened by its path, and end the workers."""
        self._batches = None
        if isinstance(self.data, Source):
            self.data.stop_workers()
        if self.step is not None and not isinstance(self._ledger, Ledger):
            self.step.ledger.close()

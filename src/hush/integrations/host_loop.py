"""Private steps in the training loop of another library."""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hush.accounting.ledger import Ledger
from hush.accounting.planning import low_snr_warning
from hush.core.errors import CheckpointError, LedgerError, Unsupported
from hush.core.guarantee import Budget, Guarantee, check_delta
from hush.core.plan import Plan
from hush.core.value import with_article
from hush.gradients.tree import tree_leaves, tree_map
from hush.training import checkpoint
from hush.training.checkpoint import check_same_origin, origin_of
from hush.training.data import Batch, Data, count, pair_of
from hush.training.end import last_step
from hush.training.options import Execution, Randomness
from hush.training.records import map_leaves
from hush.training.run_folder import step_file
from hush.training.source import CollateFn, Source
from hush.training.step import PrivateStep

_IN_CHECKPOINT = ("model", "optimizer")
"""Parts of a step's state that checkpoints of the library contain."""


class HostLoop:
    """Private step, data and ledger of a training loop of another library.

    Checkpoints of a training library are copied, uploaded and published, so they must not contain the
    key of the noise or the number of skipped records. `save` writes these to a secret file beside the
    ledger, and returns the public name of the state for the library's checkpoint.
    """

    def __init__(
        self, ledger: Ledger | str | os.PathLike[str] | None, generator: torch.Generator | None
    ) -> None:
        self.step: PrivateStep | None = None
        """Private step; None before training begins."""
        self.data: Any = None
        """Private data, from `batch_data`."""
        self._ledger, self._generator = ledger, generator
        self._batches: Iterator[Batch] | None = None
        self._end = 0

    def begin(
        self,
        model: nn.Module,
        loss_of_batch: Callable[[Any], Any],
        optimizer: Any,
        plan: Plan,
        *,
        settings: list[dict[str, Any]],
        budget: Budget | None,
        delta: float,
        steps: int | None,
        physical_batch: int | None,
        resumed: dict[str, Any] | None,
    ) -> None:
        """Create the step with the current weights and optimizer.

        `settings` are the initial settings of the optimizer. `resumed` is the public name of the state
        to restore.
        """
        step = PrivateStep(
            BatchLoss(model, loss_of_batch),
            lambda losses, targets: losses,
            optimizer,
            plan,
            records=count(self.data),
            ledger=self._ledger,
            randomness=Randomness(generator=self._generator),
            execution=Execution(physical_batch=physical_batch),
        )
        self.step, self._batches = step, None
        check_delta(delta, step.records, step.adjacency.unit)
        step.optimizer_settings = settings
        if resumed is not None:
            self._restore(step, resumed)
        self._end = steps or 0
        if budget is not None:
            self._end, _ = last_step(step, budget, steps)
        if low := low_snr_warning(plan, step.records, max(1, self._end), step.dimension):
            warnings.warn(low, UserWarning, stacklevel=3)
        step.ledger.store_delta(delta)

    def advance(self) -> bool | None:
        """Run one step; return whether the weights changed, or None if all steps are done."""
        assert self.step is not None
        if (
            self._batches is None
        ):  # not in `begin`, because the probe must run with the library's precision
            left = max(0, self._end - self.step.steps)
            self._batches = self.step.batches(self.data, left)
        return None if self.done else self.step(next(self._batches))

    def stop(self) -> None:
        """Charge all planned steps if a callback has stopped training early."""
        if self.step is not None and self._batches is not None and not self.done:
            self.step.stop()

    @property
    def done(self) -> bool:
        return self.step is not None and self.step.steps >= self._end

    def spent(self, delta: float | None = None) -> Guarantee:
        """Guarantee of all releases on the ledger, by default at the delta of the run."""
        if self.step is None:
            raise LedgerError(
                "no step has been charged yet, so there is no guarantee yet. Train first; for an "
                "earlier run, call hush.Ledger(path, read_only=True).epsilon()."
            )
        return self.step.ledger.epsilon(delta)

    def save(self) -> dict[str, Any]:
        """Save the secret state of the step (on rank 0), and return its public name."""
        step = self.step
        assert step is not None
        name = {"run": step.run, "steps": step.steps, "ledger": step.ledger.identity}
        path = step.ledger.path
        here = path is not None and step.reducer.rank == 0
        shared = step.past_noise is not None and step.reducer.size > 1  # each rank has a slice
        if not (here or shared):
            return name
        whole = step.state_dict()
        if path is None or not here:
            return name
        state = {key: part for key, part in whole.items() if key not in _IN_CHECKPOINT}
        file = step_file(path)
        states = checkpoint.load(file) if file.exists() else {}
        kept = {"step": state, "origin": origin_of(self.data, self._generator)}
        checkpoint.save(file, {**states, f"{step.run}/{step.steps}": kept})
        return name

    def _restore(self, step: PrivateStep, name: dict[str, Any]) -> None:
        """Restore the secret state with this name, and keep the current weights and optimizer."""
        if step.reducer.rank > 0:
            step.load_state_dict({})  # rank 0 broadcasts its state
            return
        path = step.ledger.path
        if path is None or step.ledger.identity != name["ledger"]:
            raise CheckpointError(
                f"the checkpoint belongs to a run with ledger {name['ledger']}, but this ledger is "
                f"{step.ledger.identity}{' in memory' * (path is None)}: it lacks the charges of the "
                "run. Pass the path of the run's ledger as ledger=, in this run and in later runs."
            )
        file = step_file(path)
        states = checkpoint.load(file) if file.exists() else {}
        kept = states.get(f"{name['run']}/{name['steps']}")
        if kept is None:
            raise CheckpointError(
                f"{file} has no state of step {name['steps']} of run {name['run']}, which contains the "
                "key of the noise. Restore the file, or start a new run on the same ledger."
            )
        check_same_origin(kept["origin"], self.data, self._generator)
        here = {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}
        step.load_state_dict({**kept["step"], **here})

    def close(self) -> None:
        """Stop the workers, and close a ledger that was passed as a path."""
        self._batches = None
        if isinstance(self.data, Source):
            self.data.loader.stop()
        if self.step is not None and not isinstance(self._ledger, Ledger):
            self.step.ledger.close()


class BatchLoss(nn.Module):
    """Per-sample losses from a function of a batch, which is called with one record at a time.

    The mean over a batch of one record is the loss of that record. A loss that compares or averages over
    several records (contrastive, or a mean over all tokens of a batch) only gets one record.
    `loss_of_batch` calls `model` and returns a number, or a dictionary with the number as "loss".
    """

    def __init__(self, model: nn.Module, loss_of_batch: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss_of_batch = loss_of_batch

    def forward(self, batch: Any) -> Tensor:
        rows = torch.arange(len(next(tree_leaves(batch)))).split(1)
        records = [batch]
        if len(rows) > 1:
            records = [tree_map(batch, lambda part: part[row]) for row in rows]  # noqa: B023
        losses = []
        for record in records:
            returned = self._loss_of_batch(record)
            loss = returned.get("loss") if isinstance(returned, dict) else returned
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise Unsupported(
                    f"the loss of a batch of one record is {with_article(kind)}, not one number. Return "
                    "the loss itself, or a dictionary with it as 'loss'."
                )
            losses.append(loss.reshape(1))
        return losses[0] if len(losses) == 1 else torch.cat(losses)


def batch_data(
    data: Data,
    *,
    collate_fn: CollateFn | None = None,
    workers: int = 0,
    pad_to: Any = None,
    pad_value: Any = 0,
) -> Data:
    """Convert data so that the inputs contain the whole batch, for `BatchLoss`.

    For tensors and for a `Source`, the batch is (inputs, targets). The options are as in `hush.Source`.
    """
    source = data if isinstance(data, Source) else None
    custom = collate_fn is not None or workers or pad_to is not None
    pair = None if source is not None or custom else pair_of(data)
    if pair is not None:
        return (tuple(pair),), torch.zeros(len(next(tree_leaves(pair))))
    return Source(
        data,
        collate_fn=_WholeBatch(collate_fn or default_collate),
        workers=workers if source is None else source.workers,
        present=None if source is None else source.present,
        pad_to=pad_to if pad_to is None or isinstance(pad_to, str) else ((pad_to,), None),
        pad_value=((pad_value,), 0),
    )


@dataclass(frozen=True)
class _WholeBatch:
    """Collate function that returns the batch as input, and an unused target."""

    collate_fn: CollateFn

    def __call__(self, records: list[Any]) -> tuple[Any, Tensor]:
        batch = map_leaves(self.collate_fn(records), lambda value: value)  # makes dictionaries plain
        return (batch,), torch.zeros(len(records))

"""Private step in another library's training loop: its loss, its records, and its checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hush.core.errors import CheckpointError, Unsupported
from hush.core.value import with_article
from hush.gradients.tree import tree_leaves, tree_map
from hush.training import checkpoint
from hush.training.checkpoint import check_same_origin, origin_of
from hush.training.data import Data, pair_of
from hush.training.records import map_leaves
from hush.training.run_folder import step_file
from hush.training.source import CollateFn, Source
from hush.training.step import PrivateStep

_IN_CHECKPOINT = ("model", "optimizer")
"""Parts of a step's state that the library's own checkpoint contains."""


class BatchLoss(nn.Module):
    """Per-sample losses by a function of a batch, called with one record at a time.

    The mean over a batch of one is that record's own loss. A loss that compares records (contrastive, or
    a mean over the tokens of the batch) sees one record only.

    Args:
        model: Model with all trained parameters.
        loss_of_batch: Function of a batch that calls the model. Returns one number, or a dictionary with
            it as "loss".
    """

    def __init__(self, model: nn.Module, loss_of_batch: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._loss_of_batch = loss_of_batch

    def forward(self, batch: Any) -> Tensor:
        """Losses, one per record."""
        count = len(next(tree_leaves(batch)))
        if count == 1:
            return self._loss(batch)
        rows = torch.arange(count).split(1)
        return torch.cat([self._loss(tree_map(batch, lambda part: part[row])) for row in rows])  # noqa: B023

    def _loss(self, record: Any) -> Tensor:
        returned = self._loss_of_batch(record)
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise Unsupported(
                f"the loss of a batch of one record is {with_article(kind)}, not one number. Return the "
                "loss itself, or a dictionary with it as 'loss'."
            )
        return loss.reshape(1)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss function for a `BatchLoss`, whose outputs are the losses."""
    return outputs


def batch_data(
    data: Data,
    *,
    collate_fn: CollateFn | None = None,
    workers: int = 0,
    pad_to: Any = None,
    pad_value: Any = 0,
) -> Data:
    """Data whose inputs are a whole batch, as the single argument of `BatchLoss`.

    Args:
        data: Private records. The batch of tensors or of a `Source` is (inputs, targets).
        collate_fn: Makes a batch of [record], as for a DataLoader.
        workers: Number of processes that read ahead.
        pad_to: Public length of every record, or a tree of lengths like the batch, as in `hush.Source`.
        pad_value: Padding value, or a tree of them.
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
    """Collate function with the batch as the only input, and an unused target."""

    collate_fn: CollateFn

    def __call__(self, records: list[Any]) -> tuple[Any, Tensor]:
        batch = map_leaves(self.collate_fn(records), lambda value: value)  # with plain dictionaries
        return (batch,), torch.zeros(len(records))


def save_step(step: PrivateStep, data: Data, generator: torch.Generator | None) -> dict[str, Any]:
    """Save the secret state of a step in a file beside its ledger, and return its public name.

    Checkpoints of a training library are copied, uploaded and published, so they must not contain the
    key of the noise or the number of skipped records. Only the owner may read the file.

    Args:
        step: Training step between two batches. In a process group, rank 0 writes.
        data: Records of the run, stored as a digest to verify that a resumed run uses the same.
        generator: Generator of the run.

    Returns:
        Run, step number and ledger, for the library's checkpoint.
    """
    name = {"run": step.run, "steps": step.steps, "ledger": step.ledger.identity}
    path = step.ledger.path
    if path is None or step.reducer.rank > 0:
        return name
    state = {key: part for key, part in step.state_dict().items() if key not in _IN_CHECKPOINT}
    file = step_file(path)
    states = checkpoint.load(file) if file.exists() else {}
    kept = {"step": state, "origin": origin_of(data, generator, secure=False)}
    checkpoint.save(file, {**states, _key(name): kept})
    return name


def load_step(
    step: PrivateStep, name: dict[str, Any], data: Data, generator: torch.Generator | None
) -> None:
    """Restore the secret state of that name, with the current weights and optimizer.

    Args:
        step: Training step on the same ledger, with the checkpoint's model and optimizer.
        name: Result of `save_step`.
        data: Records of the resumed run.
        generator: Generator that was passed to the resumed run.
    """
    if step.reducer.rank > 0:
        step.load_state_dict({})  # rank 0 broadcasts its state
        return
    path = step.ledger.path
    if path is None or step.ledger.identity != name["ledger"]:
        raise CheckpointError(
            f"the checkpoint belongs to a run that was charged to ledger {name['ledger']}, and this "
            f"one is {step.ledger.identity}{' in memory' * (path is None)}: it lacks what the run has "
            "spent. Pass ledger= with the path of that run's ledger, from its first step on."
        )
    file = step_file(path)
    states = checkpoint.load(file) if file.exists() else {}
    if _key(name) not in states:
        raise CheckpointError(
            f"{file} has no state of step {name['steps']} of run {name['run']}: without the key of its "
            "noise the run cannot continue. Restore the file; or load the weights alone and begin a new "
            "run on the same ledger, which accounts for both."
        )
    kept = states[_key(name)]
    check_same_origin(kept["origin"], data, generator, secure=False)
    here = {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}
    step.load_state_dict({**kept["step"], **here})


def _key(name: dict[str, Any]) -> str:
    return f"{name['run']}/{name['steps']}"

"""Losses that a program computes of a whole batch, taken of one record at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hush.core.errors import Unsupported
from hush.core.value import with_article
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.data import Data, pair_of
from hush.training.sources.reader import CollateFn
from hush.training.sources.records import map_leaves
from hush.training.sources.source import Source

LossOfBatch = Callable[[Any], Any]
"""Loss of a batch, as a training loop computes it: one number, or a dictionary with it."""


class BatchLoss(nn.Module):
    """Per-sample losses of a model by a function of a batch, which is called with one record at a time.

    A mean over a batch of one is that record's own loss. What the function does with several records at
    once (contrastive losses, means over the tokens of all of them) it does with one here.

    Args:
        model: what is trained, with all of its parameters.
        loss_of_batch: calls it.
    """

    def __init__(self, model: nn.Module, loss_of_batch: LossOfBatch) -> None:
        super().__init__()
        self.model = model
        self._loss_of_batch = loss_of_batch

    def forward(self, batch: Any) -> Tensor:
        """Losses, one a record."""
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
                f"the loss of a batch of one record is {with_article(kind)}: its gradient is clipped, "
                "and that takes one number. Return the loss itself, or a dictionary with it as 'loss'."
            )
        return loss.reshape(1)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of a `BatchLoss`: its outputs are the losses already."""
    return outputs


def batch_data(
    data: Data,
    *,
    collate_fn: CollateFn | None = None,
    workers: int = 0,
    pad_to: Any = None,
    pad_value: Any = 0,
) -> Data:
    """Data whose inputs are a whole batch, as the one argument of `BatchLoss`.

    Args:
        data: private records of any kind; of tensors and of a `Source`, a batch is (inputs, targets).
        collate_fn: makes a batch of [record], as for a DataLoader.
        workers: processes that read ahead.
        pad_to: public length of every record, or a tree of them like the batch, as in `hush.Source`.
        pad_value: what to pad with, likewise.
    """
    source = isinstance(data, Source)
    said = collate_fn is not None or workers or pad_to is not None
    pair = None if source or said else pair_of(data)
    if pair is not None:
        return (tuple(pair),), torch.zeros(len(next(tree_leaves(pair))))
    return Source(
        data,
        collate_fn=_WholeBatch(collate_fn or default_collate),
        workers=data.workers if isinstance(data, Source) else workers,
        present=data.present if isinstance(data, Source) else None,
        pad_to=None if pad_to is None else ((pad_to,), None),
        pad_value=((pad_value,), 0),
    )


@dataclass(frozen=True)
class _WholeBatch:
    """Collate function whose batch is one argument, beside a target that says nothing."""

    collate_fn: CollateFn

    def __call__(self, records: list[Any]) -> tuple[Any, Tensor]:
        batch = map_leaves(self.collate_fn(records), lambda value: value)  # with plain dictionaries
        return (batch,), torch.zeros(len(records))

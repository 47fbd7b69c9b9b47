"""What clipping needs to know of per-example gradients; `hush.gradients` provides it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Tape(Protocol):
    """The gradients of a batch, one per record, without saying how they are kept."""

    def norms(self, order: float) -> "torch.Tensor":
        """The l_order norm of each record's whole gradient."""

    def weighted_sum(self, weights: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """The sum of the records' gradients times their weights, by parameter name.

        A record of weight 0 adds exactly zero, even where its gradient is not finite.
        """


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A sum in which no record counts for more than its clipping allows."""

    total: "dict[str, torch.Tensor]"
    skipped: "torch.Tensor"
    """How many records had a gradient that is not finite and so added nothing (sensitive)."""

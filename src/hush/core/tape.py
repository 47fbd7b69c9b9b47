"""Protocol of per-sample gradients, as clipping uses them; `hush.gradients` implements it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from hush.core.parts import SensitivitySet


class CoordinateMask(Protocol):
    """Coordinate sampling: sets each number to 0 or keeps it, at random; it may work in place."""

    def __call__(self, values: "torch.Tensor") -> "torch.Tensor": ...


class Tape(Protocol):
    """Per-sample gradients of a batch, in whatever form they are stored."""

    def norms(self, order: float) -> "torch.Tensor":
        """Per-sample gradient norms over all parameters.

        Args:
            order: Of the norm: 2 for the Euclidean one.

        Returns:
            One norm per record.
        """

    def weighted_sum(self, weights: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Weighted sum of the per-sample gradients.

        Args:
            weights: One per record. A record of weight 0 adds exactly zero, even where its gradient is
                not finite.

        Returns:
            The sum by parameter name.
        """

    def clip_entrywise(
        self, sensitivity: "Sequence[SensitivitySet]", mask: CoordinateMask | None
    ) -> "ClippedSum":
        """Sum of the per-sample gradients, each clipped to the sensitivity sets and then masked.

        Args:
            sensitivity: Sets of consecutive blocks of the gradient; a single one is of all of it.
            mask: Coordinate sampling to apply to each clipped gradient; None for none.

        Returns:
            The sum, and how many records were skipped.
        """


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """Sum of clipped per-sample gradients."""

    total: "dict[str, torch.Tensor]"
    skipped: "torch.Tensor"
    """Number of records whose gradient is not finite and so added nothing (sensitive)."""

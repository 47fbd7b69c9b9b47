"""What clipping needs to know of per-example gradients; `hush.gradients` provides it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hush.core.sensitivity import SensitivitySet

if TYPE_CHECKING:
    import torch


class CoordinateMask(Protocol):
    """Sets some of the numbers to 0, each at random; it may do so in place."""

    def __call__(self, values: "torch.Tensor") -> "torch.Tensor": ...


class Tape(Protocol):
    """The gradients of a batch, one per record, without saying how they are kept."""

    def norms(self, order: float) -> "torch.Tensor":
        """The l_order norm of each record's whole gradient."""

    def weighted_sum(self, weights: "torch.Tensor", most: float = math.inf) -> "dict[str, torch.Tensor]":
        """The sum of the records' gradients times their weights, by parameter name.

        A record of weight 0 adds exactly zero, even where its gradient is not finite. None is longer
        than `most` with its weight.
        """

    def clip_entrywise(
        self, balls: Sequence[SensitivitySet], thin: CoordinateMask | None
    ) -> "ClippedSum":
        """The sum of the gradients, each held in the balls number by number, and then thinned.

        The balls are of consecutive numbers of the gradient; a single one is of all of them.
        """


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """A sum in which no record counts for more than its clipping allows."""

    total: "dict[str, torch.Tensor]"
    skipped: "torch.Tensor"
    """How many records had a gradient that is not finite and so added nothing (sensitive)."""

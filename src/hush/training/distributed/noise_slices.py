"""Noisy mean of several ranks: each owns a slice of the sum, adds that slice's noise, and all gather.

docs/guarantees/distributed.md has the proof that its law is that of one process.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from hush.core.plan import Plan
from hush.core.randomness import RandomSource
from hush.gradients.public_basis import PublicBasis
from hush.training.distributed.group import Processes
from hush.training.phases.private_gradient import BlockNoise, Layout, early_noise, noisy_mean


@dataclass(frozen=True, eq=False)
class NoiseSlices:
    """Noise of one step on a sum that the ranks hold together, each rank that of its own slice."""

    plan: Plan
    layout: Layout
    """Of the whole gradient."""
    basis: PublicBasis | None
    """Public basis that sums are in; None: that of the parameters."""
    records: int
    """Public number of slots of all ranks, which divides the update."""
    source: RandomSource
    """Of this rank's noise in this step."""
    processes: Processes

    def mean_of_shares(self, local_sum: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Noisy mean of the shares of all ranks: one reduction, as much as one gradient.

        Args:
            local_sum: gives the clipped sum of this rank's share; noise is drawn meanwhile where that
                pays.
            device: of the model.
        """
        with early_noise(self.plan, self.own, self.source, device) as drawn:
            total = local_sum()
            with self.processes.moving():
                whole = padded(total, self.processes)
                own, ready = self.processes.sum_slices(whole), drawn()
        return self._gathered(own, whole, ready)

    def mean_of_sum(self, total: Tensor) -> Tensor:
        """Noisy mean from the sum over the records of all ranks, which every rank has."""
        self.processes.exchange("the noise")
        whole = padded(total, self.processes)
        own = whole.view(self.processes.size, -1)[self.processes.rank].clone()
        return self._gathered(own, whole, None)

    @property
    def own(self) -> Layout:
        """Layout of this rank's slice: what it holds of each block of the clipping."""
        size = self.processes.slice_size(sum(self.layout.block_sizes))
        first, last = self.processes.rank * size, (self.processes.rank + 1) * size
        ends = accumulate(self.layout.block_sizes)
        sizes = [
            max(0, min(end, last) - max(end - block, first))
            for end, block in zip(ends, self.layout.block_sizes, strict=True)
        ]
        return replace(self.layout, block_sizes=sizes)

    def _gathered(self, own: Tensor, whole: Tensor, ready: BlockNoise | None) -> Tensor:
        """Noise on this rank's slice, and then the slices of all."""
        part = self.own
        with self.processes.moving():
            held = own[: sum(part.block_sizes)]  # of the last slices a part, or all, is padding
            if len(held):
                held.copy_(noisy_mean(held, self.plan, part, None, self.records, self.source, ready))
            self.processes.gather_slices(own, whole)
        total = whole[: sum(self.layout.block_sizes)]
        return total if self.basis is None else self.basis.to_parameters(total)


def whole_sum(total: Tensor, processes: Processes) -> Tensor:
    """Sum of all ranks' vectors, on every rank (sensitive)."""
    whole = padded(total, processes)
    processes.gather_slices(processes.sum_slices(whole), whole)
    return whole[: len(total)]


def padded(vector: Tensor, processes: Processes) -> Tensor:
    """A copy of a vector with zeros after it: as many slices as there are ranks."""
    whole = vector.new_zeros(processes.slice_size(len(vector)) * processes.size)
    whole[: len(vector)] = vector
    return whole

"""Clipped sum of a step: over the physical batches of a batch, computed or replayed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hush.core.randomness import Randomness, substream
from hush.core.tape import ClippedSum
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import record
from hush.gradients.tape import BranchedTape, GradientTape, MaskedTape
from hush.gradients.tree import tree_map
from hush.gradients.units import UnitTape, unit_tape
from hush.training.data import Batch, own_randomness
from hush.training.private_gradient import Layout
from hush.training.step_state import StepState


class ClippedSumStep(StepState):
    """Clipped sums of a step's batches; `PrivateStep` adds the other phases of a step."""

    _mask_stream: Randomness  # of dropout, views and coins alone: noise is drawn at the same time
    _accumulator: Tensor | None = None
    _verify_later: bool = False
    """Whether replays are used before the GPU says that they can be."""

    def clipped_sum(self, batch: Batch) -> Tensor:
        """Sum of the clipped per-sample gradients of a batch (sensitive).

        One record moves it by (1 + `rounding`) times its sensitivity set at most: the charge rests on
        that, and an override must keep it.

        Args:
            batch: slots drawn under the plan.

        Returns:
            Flat vector in double precision, block after block; the next sum overwrites it.
        """
        basis = self._basis()
        self._mask_stream = substream(self.generator)
        return self._sum(batch, basis, self.layout())

    def clip_physical_batch(
        self,
        inputs: Any,
        targets: Any,
        basis: PublicBasis | None,
        present: Tensor | None,
        counts: Tensor | None,
    ) -> ClippedSum:
        """Clipped sum of one physical batch, on the model's device (sensitive).

        A subclass may override it, as the audit does to put canaries in. What it adds for a slot, or for
        all slots of a unit together, must depend on these, the weights and its own randomness alone, lie
        in the plan's sensitivity set, and be exactly zero where they are empty: the charge is for that.

        Args:
            inputs: of the slots drawn, a row a slot.
            targets: likewise.
            basis: public basis that gradients are clipped in; None: that of the parameters.
            present: which of the slots hold a record; None: all do.
            counts: how many of the slots each unit owns, one after another; None: one each.

        Returns:
            Sum by parameter or block, and the number of records (or units) skipped.
        """
        mask = self.coordinate_mask()
        if self._replay is not None:
            source = self.generator if mask and isinstance(self.generator, torch.Generator) else None
            seeded = partial(own_randomness, self._mask_stream, self.device)
            later = self._verify_later
            return self._replay(
                inputs, targets, mask, source, present, randomness=seeded, verify=not later
            )
        # fresh for each: how much a model draws may depend on a record, and so would what comes after
        with own_randomness(self._mask_stream, self.device):
            tape = record(self.model, self.loss, inputs, targets, self.views)
        occupied: GradientTape | BranchedTape | MaskedTape | UnitTape = tape
        if counts is not None and self.units is not None:
            occupied = unit_tape(tape, counts, self.units.reduction, present)
        elif present is not None:
            occupied = MaskedTape(tape, present)
        with own_randomness(self._mask_stream, self.device):
            return self.plan.clipping.clip(
                occupied if basis is None else ProjectedTape(occupied, basis), mask
            )

    def _sum(self, batch: Batch, basis: PublicBasis | None, layout: Layout) -> Tensor:
        """Sum over the physical batches of a batch, in the accumulator."""
        size = sum(layout.block_sizes)
        if self._accumulator is None or len(self._accumulator) != size:
            self._accumulator = torch.empty(size, dtype=torch.float64, device=self.device)
        total = self._accumulator
        if not len(batch):
            total.zero_()
        self.module_state.begin()
        if self._replay is not None:
            self._replay.ran_forward = False
        for number, part in enumerate(batch.physical_batches(self._mask_stream)):
            inputs, targets, present, counts = tree_map(part, self.to_device)
            clipped = self.clip_physical_batch(inputs, targets, basis, present, counts)
            self._skipped = self._skipped + clipped.skipped
            flat = [values.reshape(-1) for values in clipped.total.values()]
            parts = total.split([len(values) for values in flat])
            (torch._foreach_add_ if number else torch._foreach_copy_)(parts, flat)
        if self._replay is None or self._replay.ran_forward:
            self.module_state.check()
        return total

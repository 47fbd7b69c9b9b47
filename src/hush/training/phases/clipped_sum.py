"""Clipped sum of a step: over the physical batches of a batch, computed or replayed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import ProcessFailed, Unsupported
from hush.core.parts import SensitivitySet
from hush.core.randomness import Stream, SystemSource
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients.probe import buffers_restored
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import record
from hush.gradients.tape import GradientTape, MaskedTape, UnitTape, unit_tape
from hush.gradients.tree import tree_map
from hush.training.checkpoint import settings_digest
from hush.training.data import Batch, Data, count, made_up_record, own_randomness
from hush.training.distributed.group import propagate_errors
from hush.training.distributed.handshake import forward_modes, weights_digest
from hush.training.distributed.noise_slices import whole_sum
from hush.training.distributed.same_records import check_unmoved
from hush.training.distributed.shares import Placement, padded_batches, place, share_of
from hush.training.distributed.streams import step_streams
from hush.training.phases.private_gradient import Layout, fingerprint, rounding_of
from hush.training.phases.resumable import ResumableStep
from hush.training.units import UnitTable

if TYPE_CHECKING:
    from hush.training.distributed.sharded import ShardedParameters


def occupied_tape(
    tape: GradientTape,
    units: UnitTable | None,
    present: Tensor | None,
    counts: Tensor | None,
) -> GradientTape | MaskedTape | UnitTape:
    """Tape of the slots that hold a record, or of the units that own them."""
    if counts is not None and units is not None:
        return unit_tape(tape, counts, units.reduction, present)
    return tape if present is None else MaskedTape(tape, present)


class ClippedSumStep(ResumableStep):
    """Clipped sums of a step's batches; `PrivateStep` adds the other phases of a step."""

    _mask_stream: Stream  # of dropout, views and coins alone: noise is drawn at the same time
    _accumulator: Tensor | None = None
    _verify_later: bool = False
    """Whether replays are used before it is known that they can be."""

    @property
    def rounding(self) -> float:
        """Share of its bound by which rounding may let one record move a clipped sum more than that."""
        return self.layout().rounding

    def layout(self) -> Layout:
        """Trainable parameters as of now, and the sensitivity set of each block of the clipping."""
        parameters = self.trainable()
        size = sum(parameter.numel() for parameter in parameters.values())
        if size > self.dimension and grows_with_dimension(self.plan):
            raise Unsupported(
                f"{size} numbers are to be trained and the step was made for {self.dimension}: "
                f"{self.plan} costs more the more there are. Let all require gradients before making it."
            )
        sensitivity = self._sensitivity(size)
        sizes = [block.dimension or 0 for block in sensitivity]
        if self.sharded is not None:
            sizes = [self.sharded.own_size(parameters)]
        return Layout(parameters, sensitivity, sizes, rounding_of(parameters.values()))

    def _sensitivity(self, size: int) -> Sequence[SensitivitySet]:
        """Sensitivity set of each block of the clipping; kept, as it is the same in most steps."""
        kept, clipping = self._kept_sensitivity, self.plan.clipping
        if kept is None or kept[0] is not clipping or kept[1] != size:
            kept = self._kept_sensitivity = clipping, size, clipping.sensitivity(size)
        return kept[2]

    def clipped_sum(self, batch: Batch) -> Tensor:
        """Sum of the clipped per-sample gradients of a batch (sensitive).

        One record moves it by (1 + `rounding`) times its sensitivity set at most: the charge rests on
        that, and an override must keep it.

        Args:
            batch: slots drawn under the plan.

        Returns:
            Flat vector in double precision, block after block; the next sum overwrites it. Of several
            ranks, the sum over the shares of all; of sharded parameters, this rank's shards of it.
        """
        with propagate_errors(self.processes):
            basis = self._basis()
            self._begin_streams()
            if self.sharded is not None:
                return self._sharded_sum(batch, self.sharded)
            total = self._local_sum(batch, basis, self.layout())
            return total if self.processes is None else whole_sum(total, self.processes)

    def slots(self, data: Data) -> int:
        """Number of slots to draw from: of the data, or of the parts of all ranks together."""
        return count(data) if self.processes is None else self.placement(data).slots

    def placement(self, data: Data, present: Tensor | None = None) -> Placement:
        """Where this rank's data lies among all slots; the ranks compare theirs when it is new."""
        assert self.processes is not None
        if self._placed is None or self._placed[0] is not data:
            self._placed = data, place(data, present, self.processes, shard=self.shard)
        return self._placed[1]

    def place_again(self, data: Data, present: Tensor | None) -> Placement:
        """Where this rank's data lies, compared anew; a batch that is pending keeps its records."""
        assert self.processes is not None
        placement = place(data, present, self.processes, shard=self.shard)
        if self.pending_batch is not None and self._placed is not None:
            check_unmoved(self._placed[1].names, placement.names)
        self._placed = data, placement
        return placement

    def share(self, batch: Batch) -> Batch:
        """Slots of a batch that this process works on, numbered as in its own data (sensitive)."""
        if self.processes is None:
            return batch
        return share_of(batch, self.placement(batch.data), self.processes, shard=self.shard)

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
            tape = self.record(inputs, targets)
        occupied = occupied_tape(tape, self.units, present, counts)
        if self.sharded is not None:
            assert isinstance(occupied, GradientTape | MaskedTape)
            return self.plan.clipping.clip(self.sharded.tape_of(occupied))
        with own_randomness(self._mask_stream, self.device):
            return self.plan.clipping.clip(
                occupied if basis is None else ProjectedTape(occupied, basis), mask
            )

    def coordinate_mask(self) -> CoordinateMask | None:
        """Mask of the coordinates that take part, fresh at every call; None: all of them do."""
        sampling = self.plan.sampling
        if sampling.coordinate_participation == 1:
            return None
        own = self.processes is not None and self._streams is not None
        source = self._streams.coordinates if own and self._streams else self.generator
        return partial(sampling.mask_coordinates, generator=source)

    def _basis(self) -> PublicBasis | None:
        """Public basis of the next step; None: that of the parameters."""
        schedule = self.basis_schedule
        if schedule is None:
            return None
        before = schedule.current
        basis = schedule.at(self.steps, self.generator)
        if self.processes is not None and basis is not before:
            # worked out by other kernels it may round differently, and weights would part
            self.processes.copy_of_first("the public basis", [group.basis for group in basis.groups])
        return basis

    def _begin_streams(self) -> None:
        """Make the sources of the next step's masks and noise."""
        self._streams = step_streams(self.generator, self.processes)
        self._mask_stream = self._streams.masks

    def _local_sum(self, batch: Batch, basis: PublicBasis | None, layout: Layout) -> Tensor:
        """Sum over this rank's share of a batch, once every rank has that of its own (sensitive).

        Records skipped on any rank are counted on all.
        """
        if self.processes is None:
            return self._sum(batch, basis, layout)
        before = self.skipped
        total = self._sum(self.share(batch), basis, layout)
        skipped = self._said_of_same_draw(batch, self.skipped - before)
        self.skipped = before + sum(skipped)
        return total

    def _said_of_same_draw(self, batch: Batch, content: int) -> list[int]:
        """A number of each rank, once all are known to be in the same step and to have the same draw."""
        assert self.processes is not None
        source = self.generator
        state = None if isinstance(source, SystemSource) else fingerprint([source.get_state()])
        adopted = weights_digest(self.model) if self._adopted else None
        self._adopted = False
        applied = settings_digest(self.optimizer)
        modes = forward_modes(self._tree, self.device)
        drawn = [self.steps, fingerprint([batch.indices]), state, self.size, applied, adopted, modes]
        said = self.processes.exchange(f"the sum of step {self.steps + 1}", [drawn, content])
        for rank, (other, _) in enumerate(said):
            if other != said[0][0]:
                raise ProcessFailed(
                    f"ranks 0 and {rank} are not in the same step, did not draw the same slots for it, "
                    "train other parameters or with other settings of the optimizer, run forward passes "
                    "in other modes or adopted other weights: they would add up what does not belong "
                    "together, or part. Nothing was charged. Do the same on every rank (freeze, "
                    "schedule, train() and eval(), autocast, adopt_weights), or resume all from the "
                    "last checkpoint."
                )
        return [number for _, number in said]

    def _sharded_sum(self, batch: Batch, sharded: "ShardedParameters") -> Tensor:
        """This rank's shards of the sum over the shares of all ranks (sensitive).

        All ranks run as many passes, as they gather weights and add up shards in each of them.
        """
        share = self.share(batch)
        # before any pass: ranks that are not in the same step would wait for each other
        passes = max(self._said_of_same_draw(batch, -(-len(share) // share.physical)))
        before = self.skipped
        with sharded.processes.moving():
            total = self._sum(share, None, self.layout(), passes)
        skipped = sharded.processes.exchange("the records skipped", self.skipped - before)
        self.skipped = before + sum(skipped)
        return total

    def gathering(self) -> AbstractContextManager[None]:
        """Context in which forward passes gather weights that are sharded over ranks, where they are."""
        return nullcontext() if self.sharded is None else self.sharded.modules.gathering()

    def _sum(
        self, batch: Batch, basis: PublicBasis | None, layout: Layout, passes: int | None = None
    ) -> Tensor:
        """Sum over the physical batches of a batch, in the accumulator.

        Args:
            batch: this process's share.
            basis: public basis; None: that of the parameters.
            layout: of the sum.
            passes: physical batches to run, the last ones empty; None: as many as the batch has.
        """
        size = sum(layout.block_sizes)
        if self._accumulator is None or len(self._accumulator) != size:
            self._accumulator = torch.empty(size, dtype=torch.float64, device=self.device)
        total = self._accumulator
        parts = batch.physical_batches(self._mask_stream)
        if passes is not None:
            parts = padded_batches(parts, passes, batch.data)
        if not (len(batch) if passes is None else passes):
            total.zero_()
        for number, part in enumerate(parts):
            inputs, targets, present, counts = tree_map(part, self.to_device)
            with buffers_restored(self.model, self.probed.changing_buffers):
                clipped = self.clip_physical_batch(inputs, targets, basis, present, counts)
            self._skipped = self._skipped + clipped.skipped
            flat = [values.reshape(-1) for values in clipped.total.values()]
            parts = total.split([len(values) for values in flat])
            (torch._foreach_add_ if number else torch._foreach_copy_)(parts, flat)
        return total

    def advance_state(self, data: Data) -> None:
        """Advance the buffers that forward passes change by one pass: once a step, whatever was drawn.

        Args:
            data: whose shapes and types a made-up record has.
        """
        if self.probed.changing_buffers:
            inputs, targets = tree_map(made_up_record(data), self.to_device)
            with own_randomness(self._mask_stream, self.device):
                self.record(inputs, targets)

    def record(self, inputs: Any, targets: Any) -> GradientTape:
        """Gradient tape of some records, as the probe found that the model runs."""
        sharded = None if self.sharded is None else self.sharded.modules
        return record(
            self.model,
            self.loss,
            inputs,
            targets,
            self.views,
            one_by_one=self.probed.one_by_one,
            sharded=sharded,
        )

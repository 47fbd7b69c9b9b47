"""Clipped gradient sums of physical batches.

`ClippedGradients` probes the model before the first draw, determines the physical batch size, and
accumulates the clipped sums, with CUDA graphs if possible.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.mechanism import grows_with_dimension
from hush.clipping import Quantile
from hush.core.errors import InvalidValue, PrivacyWarning, Unsupported
from hush.core.parts import ClippedSum, CoordinateMask
from hush.core.plan import Plan
from hush.core.randomness import Stream
from hush.core.value import check_count, check_kind
from hush.gradients.cuda_graph import Replay
from hush.gradients.direct import direct_chain, direct_tape, runs_directly
from hush.gradients.losses import criterion_of, per_sample_loss
from hush.gradients.models import check_model, trainable
from hush.gradients.probe import Probed, buffers_restored, check_padding_ignored, first_views, probe
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import data_errors_translated, record, uncompiled
from hush.gradients.tape import GradientTape, MaskedTape, Reduction, UnitTape, unit_tape
from hush.gradients.tree import (
    Loss,
    Views,
    check_arguments,
    expand_views,
    local_shard,
    structure,
    tree_leaves,
    tree_map,
)
from hush.training.data import (
    Batch,
    Data,
    count,
    no_randomness,
    own_randomness,
    take,
    zero_record,
)
from hush.training.noisy_mean import Layout, rounding_of
from hush.training.options import Execution
from hush.training.records import lengthened
from hush.training.reducer import Local
from hush.training.source import Source
from hush.training.synthetic import (
    check_labels,
    check_some_number,
    records_that_fit,
    synthetic_records,
)

_WRITES = attrgetter("_version")
"""Get the number of writes to a tensor."""


def occupied_tape(
    tape: GradientTape, reduction: Reduction | None, present: Tensor | None, counts: Tensor | None
) -> GradientTape | MaskedTape | UnitTape:
    """Tape of the records in non-empty slots, or of their users."""
    if counts is not None and reduction is not None:
        return unit_tape(tape, counts, reduction, present)
    return tape if present is None else MaskedTape(tape, present)


class ClippedGradients:
    """Clipped sums of the per-sample gradients of one model.

    **Guarantee.** The contribution of one record to a sum lies in (1 + `Layout.rounding`) times the
    sensitivity set: docs/guarantees/tape.md.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        views: Views | None,
        plan: Plan,
        execution: Execution,
        reducer: Local,
        reduction: Reduction | None,
    ) -> None:
        """Initialise without a probe; `probe` must run before the first sum.

        Args:
            model: Module to train.
            loss: Loss module or function of outputs and targets, one value per record.
            views: Function that returns augmented views of a record. Their mean gradient is clipped.
            plan: Plan of the step.
            execution: Physical batch size and use of CUDA graphs.
            reducer: Reducer over the ranks.
            reduction: Mean or sum of a user's gradients; None for record-level privacy.
        """
        if views is not None and not callable(views):
            raise InvalidValue(
                f"views={views!r} must be a function that returns several views of one record's "
                "inputs. Pass e.g. hush.data.flips_and_shifts(4)."
            )
        if check_kind("execution", execution, Execution).physical_batch is not None:
            check_count("physical_batch", execution.physical_batch, "it is a number of records", 1)
        self.model = check_kind("model", model, nn.Module)
        check_model(model, sharded=bool(reducer.processes))
        self.loss = per_sample_loss(loss)
        self.views = views
        self.plan = plan
        self.execution = execution
        self.reducer = reducer
        self.reduction = reduction
        parameters = trainable(model).values()
        self.device = next(iter(parameters)).device
        self.dimension = sum(value.numel() for value in parameters)
        """Number of trained parameters; the privacy cost of some plans grows with it."""
        self.probed = Probed()
        """Properties of the model and the loss, set by `probe`."""
        self.clip_norm: Tensor | None = None
        """Current clipping norm of `Quantile`, a function of earlier releases; None for other rules."""
        if isinstance(plan.clipping, Quantile):
            self.clip_norm = torch.tensor(plan.clipping.norm, dtype=torch.float64, device=self.device)
        self.replay: Replay | None = None
        self.replayed: bool | None = None
        """Whether CUDA graphs are used; None before the decision."""
        self._buffers: dict[str, Tensor] = {}
        """Buffers that forward passes must not write to, set by `probe`."""
        self._verify_later = False
        """Whether replays are verified after all physical batches, instead of after each one."""
        self._skipped: int | Tensor = 0
        self._accumulator: Tensor | None = None
        self._structure: list[Any] = []
        self._layout: Layout | None = None
        self._chain: tuple[Loss, list[nn.Module] | None] | None = None
        """Loss, and the layers of the model if it runs without `torch.vmap`."""
        self.laid_out: list[nn.Parameter] = []
        """Trained parameters of the current step."""

    @property
    def skipped(self) -> int:
        """Number of records skipped so far because their gradients are not finite (sensitive)."""
        return int(self._skipped)  # counted on the device; only this access synchronises

    @skipped.setter
    def skipped(self, number: int) -> None:
        self._skipped = number

    def to_device(self, value: Tensor) -> Tensor:
        """Copy a tensor to the device of the model, asynchronously."""
        if value.device == self.device:
            return value
        return value.to(self.device, non_blocking=self.device.type == "cuda")

    def structure(self) -> list[Any]:
        """Current structure of the model; a change resets cached decisions."""
        now = structure(self.model)
        if now != self._structure:
            self._structure, self._layout, self._chain = now, None, None
        return now

    def layout(self) -> Layout:
        """Layout of the flat gradient of the currently trainable parameters."""
        self.structure()
        if self._layout is not None:
            return self._layout
        parameters, plan = trainable(self.model), self.plan
        size = sum(value.numel() for value in parameters.values())
        if size > self.dimension and grows_with_dimension(plan):
            raise Unsupported(
                f"{size} parameters are trainable, but the step was made for {self.dimension}: the "
                f"privacy cost of {plan} depends on their number. Unfreeze all parameters before "
                "creating the step."
            )
        sensitivity = plan.clipping.sensitivity(size)
        sizes = [block.dimension or 0 for block in sensitivity]
        self.laid_out = list(parameters.values())
        self._layout = Layout(
            parameters,
            sensitivity,
            self.reducer.block_sizes(parameters, sizes),
            rounding_of(parameters.values()),
            plan.noise.per_block(sensitivity, plan.clipping.reference_norm),
        )
        return self._layout

    def _direct_chain(self, inputs: Any) -> list[nn.Module] | None:
        """Layers that run on these inputs without `torch.vmap`, or None if the model needs it."""
        if self.views is not None or not runs_directly(inputs):
            return None
        if self._chain is None or self._chain[0] is not self.loss:
            self._chain = self.loss, direct_chain(self.model, self.loss)
        return self._chain[1]

    def record(self, inputs: Any, targets: Any) -> GradientTape:
        """Record the gradient tape of a batch."""
        return record(
            self.model,
            self.loss,
            inputs,
            targets,
            self.views,
            one_by_one=self.probed.one_by_one,
            modules=self.reducer.modules,
        )

    def clip(
        self,
        inputs: Any,
        targets: Any,
        basis: PublicBasis | None,
        present: Tensor | None,
        counts: Tensor | None,
        *,
        masks: Stream,
        mask: CoordinateMask | None,
    ) -> ClippedSum:
        """Clipped sum of one physical batch on the device of the model (sensitive).

        Args:
            inputs: Inputs, one row per slot.
            targets: Targets, one row per slot.
            basis: Public basis for clipping; None: the standard basis.
            present: Mask of non-empty slots; None if no slot is empty.
            counts: Number of consecutive slots of each user; None for record-level privacy.
            masks: Random source for dropout, views and randomised clipping.
            mask: Mask for coordinate sampling; None: all coordinates.
        """
        clipping = self.plan.clipping
        if self.replay is not None:
            seeded = partial(own_randomness, masks, self.device)
            verify = not self._verify_later
            return self.replay(inputs, targets, present, randomness=seeded, verify=verify)
        if (chain := self._direct_chain(inputs)) is not None:
            no_randomness(masks, self.device)
            parameters = (self._layout or self.layout()).parameters
            try:
                tape = direct_tape(chain, self.loss, inputs, targets, parameters)
            except (IndexError, RuntimeError, ValueError) as error:
                with data_errors_translated(self.model):
                    raise error
        else:
            # seed each batch, because the number of draws may depend on a record
            with own_randomness(masks, self.device):
                tape = self.record(inputs, targets)
        occupied = occupied_tape(tape, self.reduction, present, counts)
        own = self.reducer.tape(occupied)
        if own is not occupied:
            return clipping.clip(own)
        if isinstance(clipping, Quantile):
            no_randomness(masks, self.device)
            return clipping.clip(occupied, mask, self.clip_norm)
        if mask is None and not clipping.draws:
            no_randomness(masks, self.device)
            return clipping.clip(occupied if basis is None else ProjectedTape(occupied, basis))
        with own_randomness(masks, self.device):
            return clipping.clip(occupied if basis is None else ProjectedTape(occupied, basis), mask)

    def sum(
        self,
        batch: Batch,
        passes: int | None,
        *,
        size: int,
        masks: Stream,
        clip: Callable[..., ClippedSum],
        basis: PublicBasis | None,
    ) -> Tensor:
        """Clipped sum over the physical batches of a batch (sensitive); the next sum overwrites it.

        Args:
            batch: Slots that this process computes.
            passes: Number of physical batches, padded with empty batches; None: no padding.
            size: Length of the sum.
            masks: Random source for data sets with augmentation.
            clip: Function that computes the clipped sum of one physical batch.
            basis: Public basis for clipping; None: the standard basis.
        """
        if self._accumulator is None or self._accumulator.numel() != size:
            self._accumulator = torch.empty(size, dtype=torch.float64, device=self.device)
        total, empty = self._accumulator, True
        for inputs, targets, present, counts in _passes(batch, masks, passes):
            writes = list(map(_WRITES, self._buffers.values()))
            inputs, targets = tree_map(inputs, self.to_device), tree_map(targets, self.to_device)
            present, counts = tree_map(present, self.to_device), tree_map(counts, self.to_device)
            changing, kept = self.probed.changing_buffers, self.probed.kept
            with buffers_restored(self.model, changing, kept) if changing or kept else nullcontext():
                clipped = clip(inputs, targets, basis, present, counts)
            if writes != list(map(_WRITES, self._buffers.values())):
                names = [
                    name
                    for (name, buffer), before in zip(self._buffers.items(), writes, strict=True)
                    if buffer._version != before
                ]
                raise Unsupported(
                    f"the model wrote to its buffers {', '.join(names[:3])} in a forward pass, but not "
                    "for synthetic records: a buffer that depends on a record would affect other "
                    "gradients, or be released without noise. Compute it anew in every call."
                )
            self._skipped = self._skipped + clipped.skipped
            flat = list(map(torch.flatten, clipped.total.values()))
            places = total.split(list(map(Tensor.numel, flat)))
            (torch._foreach_copy_ if empty else torch._foreach_add_)(places, flat)
            empty = False
        return total.zero_() if empty else total

    def verified_later(self, replay: Replay, masks: Stream, compute: Callable[[], Tensor]) -> Tensor:
        """Run a computation, verify its replays at the end, and repeat it if a replay is invalid.

        Host and GPU do not wait for each other until the noise is queued.

        Args:
            replay: Graphs of the physical batches.
            masks: Random source of the computation; it is reset before a repetition.
            compute: Function that computes the noisy mean of a batch.
        """
        before = masks.get_state(), self._skipped
        self._verify_later = replay.fits(self.layout().parameters.values())
        try:
            result = compute()
        finally:
            self._verify_later = False
        if replay.failed():
            masks.set_state(before[0])
            self._skipped = before[1]
            result = compute()
        return result

    def advance(self, data: Data, masks: Stream) -> None:
        """Update the buffers that forward passes change, with one pass over a record of zeros.

        This runs once per step, so the buffers do not depend on the drawn slots.
        """
        if self.probed.changing_buffers:
            inputs, targets = tree_map(zero_record(data), self.to_device)
            with own_randomness(masks, self.device):
                self.record(inputs, targets)

    def probe(
        self, data: Data, slots: int, per_unit: int, also: Callable[[Any, Any], None]
    ) -> tuple[int, bool]:
        """Determine the physical batch size, and whether the rounding of a sum is within its slack.

        The probe uses synthetic records, so the results depend only on the model, the loss and public
        shapes (docs/guarantees/tape.md, 10). If the model rejects synthetic records, the probe uses the
        first two private records.

        Args:
            data: Data of this rank; only shapes and types are used, unless the model rejects synthetic
                records.
            slots: Number of slots, over all ranks.
            per_unit: Maximum number of records of one user per step.
            also: Additional check that is called with two records.

        Raises:
            Unsupported: The model cannot be trained privately.
            DataError: The data do not fit the model.
        """
        if torch.is_inference_mode_enabled():
            raise Unsupported(
                "the step runs inside torch.inference_mode(), which disables gradients. Train outside "
                "of this context."
            )
        self._check_weights()
        check_some_number(data)
        records = tree_map(take(data, torch.arange(min(2, count(data)))), self.to_device)
        check_arguments(self.model, records[0])
        devices = [self.device] if self.device.type == "cuda" else []
        with uncompiled(), torch.random.fork_rng(devices):
            pair = synthetic_records(*records)
            try:
                tape = self._probed_tape(pair, also)
                usable = bool(tape.norms(2.0).isfinite().all())
            except Unsupported:
                raise
            except Exception:  # the model may raise any error for invalid inputs
                usable = False
            if not usable:
                pair = records
                tape = self._probed_tape(pair, also)
            self._warn_of_probe()
            if isinstance(data, Source) and data.ragged:
                longer = lengthened(pair, data.pad_value)
                check_padding_ignored(self.model, self.loss, pair, longer, self.probed)
            self._buffers = {
                name: buffer
                for name, buffer in self.model.named_buffers()
                if name not in self.probed.changing_buffers
            }
            with buffers_restored(self.model, self.probed.changing_buffers, self.probed.kept):
                one_view = first_views(self.views, *pair)
                check_labels(self.model, criterion_of(self.loss), one_view[0], data)
                if self.reducer.modules.sharded:  # share an error if one rank has invalid labels
                    self.reducer.exchange("the labels")
                expanded = pair if self.views is None else expand_views(self.views, *pair)
                physical = self.execution.physical_batch or records_that_fit(
                    self.model, self.loss, *expanded, tape, one_by_one=self.probed.one_by_one
                )
        # users are not split, so a physical batch may be larger
        together = min(max(physical, per_unit), slots)
        batches = -(-slots // physical) * (2 if per_unit > 1 else 1)
        if self.reducer.size > 1 or self.reducer.processes:  # each rank adds a partial batch and a sum
            batches += 2 * self.reducer.size
        running = batches * slots * 2.0**-52 <= self.layout().rounding / 8
        bounded = (
            running
            and tape.rounding_bounded(together)
            and not (self.probed.one_by_one or self.probed.host_draws)
        )
        if self.reduction is not None and per_unit > 1 and tape.records == 2:
            # terms of users with more records have the same form (materialised or factored)
            two = unit_tape(tape, torch.tensor([2]), self.reduction, None)
            bounded = bounded and two.rounding_bounded(together)
        return physical, bounded

    @torch.no_grad()
    def _check_weights(self) -> None:
        """Raise if a weight is not finite; the message may name it, because weights are public."""
        for name, value in trainable(self.model).items():
            if not bool(local_shard(value).isfinite().all()):
                raise Unsupported(
                    f"{name} has a weight that is NaN or infinite: no gradient would be finite, so "
                    "the privacy budget would be spent on pure noise. Initialise or load it again, or "
                    "reduce the learning rate."
                )

    def _probed_tape(self, pair: tuple[Any, Any], also: Callable[[Any, Any], None]) -> GradientTape:
        """Probe the model if there are two records, and return the tape of the records."""
        if len(next(tree_leaves(pair[0]))) == 2:
            modules = self.reducer.modules
            self.probed = probe(self.model, self.loss, *pair, self.views, modules=modules)
            also(*pair)
        with buffers_restored(self.model, self.probed.changing_buffers, self.probed.kept):
            return self.record(*pair)

    def _warn_of_probe(self) -> None:
        """Warn about parameters that receive only noise, and if records are processed one at a time."""
        unused: Sequence[str] = self.probed.unused
        if unused:
            more = f" and {len(unused) - 3} others" if len(unused) > 3 else ""
            warnings.warn(
                f"the loss does not depend on {', '.join(unused[:3])}{more} for synthetic records: an "
                "unused parameter receives only noise. Freeze it with requires_grad_(False), or use it "
                "in forward().",
                PrivacyWarning,
                stacklevel=5,
            )
        if self.probed.one_by_one:
            warnings.warn(
                "the model runs one record at a time, because torch.vmap does not support it (e.g. it "
                "branches on a value): steps are slow, and the guarantee has arithmetic: assumed. Use "
                "torch.where instead of branches; for a model of the transformers library, call "
                "hush.integrations.transformers.vectorize_attention(model).",
                PrivacyWarning,
                stacklevel=5,
            )


def _passes(batch: Batch, masks: Stream, passes: int | None) -> Iterator[tuple[Any, ...]]:
    """Physical batches of a logical batch, followed by empty ones until there are `passes`."""
    number = 0
    for part in batch.physical_batches(masks):
        yield part
        number += 1
    if passes is not None and number < passes:
        inputs, targets = zero_record(batch.data)
        for _ in range(number, passes):
            yield inputs, targets, torch.zeros(1, dtype=torch.bool), None

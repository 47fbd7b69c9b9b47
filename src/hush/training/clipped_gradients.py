"""Clipped sum of the physical batches of a model, a loss and views.

`ClippedGradients` probes the model before the first draw, finds the size of a physical batch, chooses
between computing and replaying it as a CUDA graph, and adds up the sums of the physical batches.
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
    made_up_record,
    no_randomness,
    own_randomness,
    take,
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
"""Number of writes to a tensor."""


def occupied_tape(
    tape: GradientTape, reduction: Reduction | None, present: Tensor | None, counts: Tensor | None
) -> GradientTape | MaskedTape | UnitTape:
    """Tape of the slots that hold a record, or of the units that own them."""
    if counts is not None and reduction is not None:
        return unit_tape(tape, counts, reduction, present)
    return tape if present is None else MaskedTape(tape, present)


class ClippedGradients:
    """Clipped sums of the per-sample gradients of one model.

    **Guarantee.** One record moves a sum by (1 + `Layout.rounding`) times its sensitivity set at most:
    docs/guarantees/tape.md.
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
        """Clipped gradients before the probe.

        Args:
            model: Module to train.
            loss: Loss module or function of outputs and targets, one value per record.
            views: Views of one record's inputs, whose mean gradient is clipped.
            plan: Plan of the step.
            execution: Size of physical batches and use of CUDA graphs.
            reducer: Ranks of the step.
            reduction: Mean or sum of a unit's gradients; None: each record is a unit.
        """
        if views is not None and not callable(views):
            raise InvalidValue(
                f"views={views!r} cannot be called: it is to turn one record's inputs into several. "
                "Pass e.g. hush.data.flips_and_shifts(4)."
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
        """Number of trained parameters for which a charge that grows with it is made."""
        self.probed = Probed()
        """Properties of the model and the loss, known after `probe`."""
        self.replay: Replay | None = None
        self.replayed: bool | None = None
        """Whether physical batches are replayed; None: not decided."""
        self._buffers: dict[str, Tensor] = {}
        """Buffers that no pass may write to, known after `probe`."""
        self._verify_later = False
        """Whether replays are used before the GPU has confirmed that they are valid."""
        self._skipped: int | Tensor = 0
        self._accumulator: Tensor | None = None
        self._structure: list[Any] = []
        self._layout: Layout | None = None
        self._chain: tuple[Loss, list[nn.Module] | None] | None = None
        """Loss, and layers that run without `torch.vmap` if all do."""
        self.laid_out: list[nn.Parameter] = []
        """Trained parameters of the step that was begun."""

    @property
    def skipped(self) -> int:
        """Number of records left out because their gradient was not finite, so far (sensitive)."""
        return int(self._skipped)  # counted on the device: only the caller waits for it

    @skipped.setter
    def skipped(self, number: int) -> None:
        self._skipped = number

    def to_device(self, value: Tensor) -> Tensor:
        """Tensor on the device of the model; the host does not wait for a GPU."""
        if value.device == self.device:
            return value
        return value.to(self.device, non_blocking=self.device.type == "cuda")

    def structure(self) -> list[Any]:
        """Structure of the model now; cached decisions are dropped if it has changed."""
        now = structure(self.model)
        if now != self._structure:
            self._structure, self._layout, self._chain = now, None, None
        return now

    def layout(self) -> Layout:
        """Layout of the flat gradient of the parameters that are trainable now."""
        self.structure()
        if self._layout is not None:
            return self._layout
        parameters, plan = trainable(self.model), self.plan
        size = sum(value.numel() for value in parameters.values())
        if size > self.dimension and grows_with_dimension(plan):
            raise Unsupported(
                f"{size} numbers are to be trained and the step was made for {self.dimension}: "
                f"{plan} costs more the more there are. Let all require gradients before making it."
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
        """Layers that run on these inputs without `torch.vmap`; None if it is needed."""
        if self.views is not None or not runs_directly(inputs):
            return None
        if self._chain is None or self._chain[0] is not self.loss:
            self._chain = self.loss, direct_chain(self.model, self.loss)
        return self._chain[1]

    def record(self, inputs: Any, targets: Any) -> GradientTape:
        """Gradient tape of some records."""
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
        generator: torch.Generator | None,
    ) -> ClippedSum:
        """Clipped sum of one physical batch on the device of the model (sensitive).

        Args:
            inputs: Inputs of the slots, a row each.
            targets: Their targets.
            basis: Public basis of the gradients; None: the basis of the parameters.
            present: Whether each slot holds a record; None: all do.
            counts: Number of slots of each unit, one after another; None: one each.
            masks: Source of dropout, views and coins of the clipping.
            mask: Mask of the coordinates that take part; None: all do.
            generator: Generator of the mask that a CUDA graph advances.
        """
        clipping = self.plan.clipping
        if self.replay is not None:
            seeded = partial(own_randomness, masks, self.device)
            verify = not self._verify_later
            return self.replay(
                inputs, targets, mask, generator, present, randomness=seeded, verify=verify
            )
        if (chain := self._direct_chain(inputs)) is not None:
            no_randomness(masks, self.device)
            parameters = (self._layout or self.layout()).parameters
            try:
                tape = direct_tape(chain, self.loss, inputs, targets, parameters)
            except (IndexError, RuntimeError, ValueError) as error:
                with data_errors_translated(self.model):
                    raise error
        else:
            # seeded for each batch: how much is drawn may depend on a record, and must not shift others
            with own_randomness(masks, self.device):
                tape = self.record(inputs, targets)
        occupied = occupied_tape(tape, self.reduction, present, counts)
        own = self.reducer.tape(occupied)
        if own is not occupied:
            return clipping.clip(own)
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
        """Sum over the physical batches of a batch, in the accumulator (sensitive).

        Args:
            batch: Share of this process.
            passes: Number of physical batches, the last ones empty; None: as many as the batch has.
            size: Length of the sum.
            masks: Source of the randomness of data sets that draw.
            clip: Clipped sum of one physical batch.
            basis: Public basis of the gradients; None: the basis of the parameters.
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
                    f"the model wrote to its buffers {', '.join(names[:3])} in a forward pass, and not "
                    "for synthetic records: what one record leaves there would enter the gradients of "
                    "others, or be released without noise. Compute it anew in every call."
                )
            self._skipped = self._skipped + clipped.skipped
            flat = list(map(torch.flatten, clipped.total.values()))
            places = total.split(list(map(Tensor.numel, flat)))
            (torch._foreach_copy_ if empty else torch._foreach_add_)(places, flat)
            empty = False
        return total.zero_() if empty else total

    def verified_later(self, replay: Replay, masks: Stream, compute: Callable[[], Tensor]) -> Tensor:
        """Result of a computation whose replays are verified at its end; repeated if one is invalid.

        The GPU does not wait for the checks of the host, nor the host for the GPU before the noise is
        queued.

        Args:
            replay: Graphs of the physical batches.
            masks: Source of the masks of the step.
            compute: Noisy mean of a batch.
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
        """Advance the buffers that forward passes change by one pass over a synthetic record.

        Once a step, so that they do not depend on the draw.
        """
        if self.probed.changing_buffers:
            inputs, targets = tree_map(made_up_record(data), self.to_device)
            with own_randomness(masks, self.device):
                self.record(inputs, targets)

    def probe(
        self, data: Data, slots: int, per_unit: int, also: Callable[[Any, Any], None]
    ) -> tuple[int, bool]:
        """Physical batch size, and whether the rounding of a clipped sum is within its slack.

        Synthetic records take the place of private ones, so the answers are functions of the model, the
        loss and public shapes (docs/guarantees/tape.md, 10). If the model does not accept them, the
        first two private records are used.

        Args:
            data: Data of this rank; only shapes and types count unless the model refuses synthetic ones.
            slots: Number of slots of all ranks.
            per_unit: Maximum number of records of one unit in a step.
            also: Another probe of the model on two records.

        Raises:
            Unsupported: The model cannot be trained privately.
            DataError: The data do not fit the model.
        """
        if torch.is_inference_mode_enabled():
            raise Unsupported(
                "the step is inside torch.inference_mode(), where there are no gradients to clip. Train "
                "outside of it."
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
            except Exception:  # any error of the model for an input that it does not accept
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
                if self.reducer.modules.sharded:  # labels of one rank may be wrong
                    self.reducer.exchange("the labels")
                expanded = pair if self.views is None else expand_views(self.views, *pair)
                physical = self.execution.physical_batch or records_that_fit(
                    self.model, self.loss, *expanded, tape, one_by_one=self.probed.one_by_one
                )
        # no unit is split: one may be more than a physical batch, and two batches may hold just one
        together = min(max(physical, per_unit), slots)
        batches = -(-slots // physical) * (2 if per_unit > 1 else 1)
        if self.reducer.size > 1 or self.reducer.processes:  # an unfilled one, and a sum, of each rank
            batches += 2 * self.reducer.size
        running = batches * slots * 2.0**-52 <= self.layout().rounding / 8
        bounded = (
            running
            and tape.rounding_bounded(together)
            and not (self.probed.one_by_one or self.probed.host_draws)
        )
        if self.reduction is not None and per_unit > 1 and tape.records == 2:
            # units of more records are materialised if these are, or kept in the same form
            two = unit_tape(tape, torch.tensor([2]), self.reduction, None)
            bounded = bounded and two.rounding_bounded(together)
        return physical, bounded

    @torch.no_grad()
    def _check_weights(self) -> None:
        """Raise if a weight is not finite; weights are released or public."""
        for name, value in trainable(self.model).items():
            if not bool(local_shard(value).isfinite().all()):
                raise Unsupported(
                    f"{name} has a weight that is NaN or infinite: no gradient would be finite, every "
                    "record would be left out, and the budget spent on noise alone. Initialise or load "
                    "it anew; after private steps, lower the learning rate."
                )

    def _probed_tape(self, pair: tuple[Any, Any], also: Callable[[Any, Any], None]) -> GradientTape:
        """Tape of one or two records, after the probe of the model on two."""
        if len(next(tree_leaves(pair[0]))) == 2:
            modules = self.reducer.modules
            self.probed = probe(self.model, self.loss, *pair, self.views, modules=modules)
            also(*pair)
        with buffers_restored(self.model, self.probed.changing_buffers, self.probed.kept):
            return self.record(*pair)

    def _warn_of_probe(self) -> None:
        """Warn of parameters that receive noise only, and of a model that runs one record at a time."""
        unused: Sequence[str] = self.probed.unused
        if unused:
            more = f" and {len(unused) - 3} others" if len(unused) > 3 else ""
            warnings.warn(
                f"the loss does not depend on {', '.join(unused[:3])}{more} for synthetic records: a "
                "parameter that it never reaches receives noise only. Freeze it with "
                "requires_grad_(False), or use it in forward().",
                PrivacyWarning,
                stacklevel=5,
            )
        if self.probed.one_by_one:
            warnings.warn(
                "the model runs one record at a time, as torch.vmap cannot run it (it branches on a "
                "value, for example): steps are slow, and the guarantee says arithmetic: assumed. Use "
                "torch.where in place of branches; for a model of the transformers library, call "
                "hush.integrations.transformers.vectorize_attention(model).",
                PrivacyWarning,
                stacklevel=5,
            )


def _passes(batch: Batch, masks: Stream, passes: int | None) -> Iterator[tuple[Any, ...]]:
    """Physical batches of a batch, filled up with empty ones to a number of passes."""
    number = 0
    for part in batch.physical_batches(masks):
        yield part
        number += 1
    if passes is not None and number < passes:
        inputs, targets = made_up_record(batch.data)
        for _ in range(number, passes):
            yield inputs, targets, torch.zeros(1, dtype=torch.bool), None

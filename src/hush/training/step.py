"""One private step: draw, clip, add noise, put the charge on disk, and only then move the model."""

import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.epsilon import rdp
from hush.accounting.ledger.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import DataError, InvalidValue, LedgerError, Unsupported
from hush.core.guarantee import Arithmetic, Guarantee, Secrecy
from hush.core.plan import Plan
from hush.core.randomness import (
    Randomness,
    SystemSource,
    cryptographic,
    set_apart,
    source_for,
    substream,
)
from hush.core.ranges import check_count, check_kind
from hush.core.release import Selective
from hush.core.tape import ClippedSum
from hush.core.value import SingleOwner
from hush.gradients.checks.isolation import check_independent_losses
from hush.gradients.checks.models import check_model, check_optimizer, per_record
from hush.gradients.checks.module_state import ModuleState
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import Views, expand_views, record
from hush.gradients.replay import Replay
from hush.gradients.tape import GradientTape, OccupiedTape, SplitTape
from hush.gradients.terms import ROUNDING
from hush.gradients.tree import tree_map
from hush.training.async_noise import in_background
from hush.training.checks.labels import check_labels
from hush.training.checks.public import check_public
from hush.training.checks.released_weights import note_released, warn_of_other_ledger
from hush.training.checks.stand_ins import stand_ins
from hush.training.data import Batch, Data, check_present, check_some_number, count, take
from hush.training.fingerprint import fingerprint
from hush.training.methods.public_basis import basis_schedule
from hush.training.methods.selective import Trials
from hush.training.physical_batch import fitting
from hush.training.randomness import own_randomness
from hush.training.resume import load_state, settings_of, state_of

_MANY = 2**17
"""So many numbers take longer to draw than a thread takes to start."""
_DECIDING = 64
"""Physical batch of models that decide by a value, where two records do not tell what others take."""
_DOUBLE = 2.0**-12
"""Share of its bound by which rounding in double precision lets a record move a sum more than that."""


class PrivateStep(SingleOwner):
    """Runs the steps of a plan on a model and charges each one.

    **Guarantee.** Everything that the steps on its ledger released (the weights, the optimizer's
    state, the ledger) satisfies `spent(delta)`, for neighbours of which one has an empty slot where the
    other has a record (zero-out): `records`, the number of slots, is public. Assumes that the model, the
    loss, the plan and the number of steps do not depend on the data, and that a kernel's result for one
    record is a function of that record and of shapes (docs/guarantees/tape.md). Noise is drawn exactly
    from a cryptographic stream and the rounding of sums is paid for (docs/guarantees/sampling.md); where
    that is not so, the guarantee says `arithmetic: assumed`. Proved in
    docs/guarantees/poisson-gaussian.md and ledger.md. Two steps on one model must share a ledger: the
    weights of another one's run are trained further with a `PrivacyWarning`.

    A step has five phases, each a method: `batches` draws, `clipped_sum` clips and adds up, `privatize`
    adds noise, `charge` puts the step on the ledger, `apply` moves the model. `step(batch)` runs them.

    `generator` seeds the stream, so that a run can be repeated by whoever knows the seed: for tests, and
    the guarantee says `randomness: seeded`. `secure` draws
    from the operating system instead of a stream: such a step cannot be repeated, so a run that resumes
    pays again for the steps since its checkpoint. `arithmetic="assumed"` draws noise with torch's own
    generator: faster, and on a grid that can be recognised.

        step = hush.PrivateStep(model, loss, optimizer, plan, records=len(inputs))
        for batch in step.batches((inputs, targets), steps=100):
            step(batch)
        print(step.spent(delta=1e-5))

    `replay=True` (on a GPU) records the work of a physical batch once, as a CUDA graph, and replays it:
    much faster for small models, if forward() does the same work whenever it is given the same shapes.

    `views` turns the inputs of one record into several views of it, along a new first dimension; the
    record's gradient is their mean, before it is clipped (hush.data.views has some for images).
    `public` are records that need no protection, for `Subspaces(bases=Principal(...))`; they must be
    others than the private ones.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        records: int,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        generator: torch.Generator | None = None,
        secure: bool = False,
        arithmetic: Arithmetic = "proved",
        physical_batch: int | None = None,
        replay: bool = False,
        views: Views | None = None,
        public: Data | None = None,
    ) -> None:
        check_kind("plan", plan, Plan)
        check_model(check_kind("model", model, nn.Module))
        check_optimizer(check_kind("optimizer", optimizer, torch.optim.Optimizer), model)
        self.model = model
        self.loss = per_record(loss)
        self._given_loss = loss
        self.module_state = ModuleState(model, getattr(self.loss, "loss", self.loss))
        """Watches that forward passes keep nothing of a record in the model's attributes."""
        self.optimizer = optimizer
        self._settings = settings_of(optimizer)
        self.plan = plan
        self.records = check_count(
            "records", records, "the divisor of the update is a public number of records", 1
        )
        self.device = next(iter(self.trainable().values())).device
        self.dimension = self.size
        """How many numbers are trained: what a charge that grows with the dimension is for."""
        # raise for blocks of another model, and for a plan that cannot be charged
        plan.clipping.sensitivity(self.dimension)
        rdp(plan, [2.0], self.dimension if grows_with_dimension(plan) else None)
        self.physical_batch = (
            None
            if physical_batch is None
            else check_count("physical_batch", physical_batch, "it is a number of records", 1)
        )
        """How many records are worked on at once; None: to be found when the data is known."""
        if views is not None and not callable(views):
            raise InvalidValue(
                f"views={views!r} cannot be called: it is to turn one record's inputs into several. "
                "Pass e.g. hush.data.views.flips_and_shifts(4)."
            )
        self._views = views
        self._frames = basis_schedule(model, self.loss, public, plan.clipping)
        self.generator = source_for(self.device, generator, secure=secure, arithmetic=arithmetic)
        on_device = (
            isinstance(self.generator, torch.Generator)
            and self.generator.device.type == self.device.type
        )
        if replay and not on_device and plan.sampling.coordinate_participation < 1:
            raise Unsupported(
                f"replay=True repeats the same work, and {type(plan.sampling).__name__} draws which "
                "coordinates take part: replayed, the same ones always would, as only torch's generator "
                "on the GPU can be asked for new ones from within. Leave out replay, or pass "
                'arithmetic="assumed" without a generator of your own.'
            )
        self._replay = Replay(model, self.loss, plan.clipping, views) if replay else None
        self.ledger = _ledger_of(ledger, plan)
        self.generator = set_apart(self.generator, self.ledger.stream_label())
        self.randomness: Secrecy = "secret" if generator is None else "seeded"
        """Whether the stream's key came from the operating system or from a seed that was given."""
        self.run = secrets.token_hex(8)
        self.charged_run = self.run
        """Run that the last step was charged to: another one right after `reseed`."""
        self.steps = 0
        self.skipped = 0
        """How many records added nothing because their gradient was not finite (sensitive)."""
        self.update: Tensor | None = None
        """Private gradient that the last step released; valid until the next step."""
        self._drawn: Batch | None = None
        self._memory: Tensor | None = None
        self._masks: Randomness = self.generator
        """Of dropout, views and coins: for them alone, as noise is drawn at the same time."""
        self._bounded = False
        """Whether rounding is within what is paid for, by what is public: known after `probe`."""
        self._versions = self._weights_now()
        warn_of_other_ledger(self._versions[1], self.ledger)
        self._trials = Trials(self, plan.release) if isinstance(plan.release, Selective) else None

    def batches(
        self, data: Data, steps: int | None = None, present: Tensor | None = None
    ) -> Iterator[Batch]:
        """Draw one batch after another, each to be passed to this step once.

        Data that cannot be trained on is refused here, before the first is drawn.

        Args:
            data: inputs and targets, a row a slot.
            steps: how many batches; None: without end.
            present: which slots hold a record. What is in an empty slot counts for nothing.
        """
        if count(data) != self.records:
            raise DataError(
                f"the data has {count(data)} records and the step was made for records="
                f"{self.records}: the divisor and the charge are for that number of slots. Pass the "
                "same data; a record that is missing leaves its slot empty (present=)."
            )
        last = None if steps is None else self.steps + check_count("steps", steps, "steps are counted")
        if self._frames is not None:
            check_public(self._frames.public, data)
        held = check_present(present, self.records)
        return self._draws(data, last, self.probe(data), held)

    def _draws(
        self, data: Data, last: int | None, physical: int, present: Tensor | None
    ) -> Iterator[Batch]:
        while last is None or self.steps < last:
            self._nothing_drawn()
            self._drawn = self.draw(Batch(torch.arange(0), data, physical, present))
            yield self._drawn

    def draw(self, like: Batch) -> Batch:
        """A fresh draw of slots under the plan, on the data of another batch.

        Coin i is of slot i, whoever is in it.
        """
        indices = self.plan.sampling.draw(self.records, self.generator)
        return Batch(indices, like.data, like.physical, like.present)

    def __call__(self, batch: Batch) -> bool:
        """Update the model from a batch that `batches` has just drawn; return whether it moved.

        It always does, unless the plan is selective and the proposal was rejected. A learning-rate
        schedule should move only when the model did.
        """
        if batch is None or batch is not self._drawn:
            raise DataError(
                "this batch was not drawn by `step.batches`, or was used before: the charge is for a "
                "fresh draw. Loop `for batch in step.batches(data): step(batch)`."
            )
        check_model(self.model)
        check_optimizer(self.optimizer, self.model)
        self._check_unmoved()
        if self.size > self.dimension and grows_with_dimension(self.plan):
            raise Unsupported(
                f"{self.size} numbers are to be trained and the step was made for {self.dimension}: "
                f"{self.plan} costs more the more there are. Let all of them require gradients before "
                "making the step."
            )
        if self._trials is not None:
            return self._trials(batch)
        update = self.private_gradient(batch)
        self.charge(fingerprint([update]))
        self.apply(update)
        return True

    def private_gradient(self, batch: Batch) -> Tensor:
        """Noisy mean of the clipped per-sample gradients of a batch, parameters one after the other.

        `privatize(clipped_sum(batch))`, with the noise drawn while gradients are computed where it pays.
        It must not be used before it is charged.
        """
        frame = None if self._frames is None else self._frames.at(self.steps, self.generator)
        self._masks = substream(self.generator)
        with in_background(self._noise, self._early()) as noise:
            total = self._sum(batch, frame)
            return self._noisy(total, noise(), frame)

    def clipped_sum(self, batch: Batch) -> Tensor:
        """Sum of the clipped per-sample gradients of a batch, in double precision (sensitive).

        Blocks of the clipping one after the other. One record moves it by (1 + `rounding`) times what
        its clipping allows, at most.
        """
        frame = None if self._frames is None else self._frames.at(self.steps, self.generator)
        self._masks = substream(self.generator)
        return self._sum(batch, frame)

    def privatize(self, total: Tensor) -> Tensor:
        """Noisy mean from a clipped sum, which is used up; not to be used before it is charged."""
        frame = None if self._frames is None else self._frames.at(self.steps, self.generator)
        return self._noisy(total, self._noise(), frame)

    def charge(self, release: str) -> None:
        """Put the step on the ledger, on disk: from here on what it releases may be used.

        Args:
            release: what is released, or a fingerprint of it; it must not tell more than the release.
        """
        self.ledger.charge(
            self.plan,
            run=self.run,
            step=self.steps + 1,
            release=release,
            dimension=self.dimension,
            arithmetic=self.arithmetic,
            randomness=self.randomness,
            records=self.records,
        )
        self.steps += 1
        self.charged_run = self.run
        self._drawn = None

    def apply(self, update: Tensor) -> None:
        """Move the model by the optimizer's rule for this gradient; no gradient is left behind.

        A gradient that stayed would be applied again by whoever calls the optimizer next.
        """
        self._give(update)
        self.optimizer.step()
        for parameter in self.trainable().values():
            parameter.grad = None
        self.update = update
        before, self._versions = self._versions, self._weights_now()
        note_released(self.model, before[1], self._versions[1], self.ledger)

    @property
    def rounding(self) -> float:
        """By which share of its bound rounding may let one record move a clipped sum more than that."""
        double = all(value.dtype == torch.float64 for value in self.trainable().values())
        return _DOUBLE if double else ROUNDING

    @property
    def arithmetic(self) -> Arithmetic:
        """Whether what ran so far rounded within what is paid for, under noise drawn exactly."""
        exact = cryptographic(self.generator) and self.plan.noise.exact and self._bounded
        return "proved" if exact else "assumed"

    @property
    def trials(self) -> Trials | None:
        """Trials of a selective plan; None where every step is released."""
        return self._trials

    @property
    def accepted(self) -> int:
        """How many steps moved the model."""
        return self.steps if self._trials is None else self._trials.accepted

    def spent(self, delta: float) -> Guarantee:
        """The guarantee for everything on the ledger so far."""
        self._check_unmoved()
        return self.ledger.epsilon(delta)

    def adopt_weights(self) -> None:
        """Declare that the model's weights were set outside of this step without looking at the records.

        For weights that were loaded, averaged or clamped: functions of what was released before, or of
        public data.
        """
        self._versions = self._weights_now()

    def state_dict(self) -> dict[str, Any]:
        """All that a step needs to go on exactly as it would have."""
        self._nothing_drawn()
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, on the ledger that was charged for it."""
        self._nothing_drawn()
        load_state(self, state)
        self.adopt_weights()

    def reseed(self) -> None:
        """Draw new randomness from here on; steps taken again are then charged again."""
        if not isinstance(self.generator, SystemSource):
            kind: Arithmetic = "proved" if cryptographic(self.generator) else "assumed"
            self.generator = source_for(self.generator.device, arithmetic=kind)
        self.randomness = "secret"
        self.run = secrets.token_hex(8)

    def _nothing_drawn(self) -> None:
        """Raise while a batch is drawn and not yet used."""
        if self._drawn is not None:
            raise DataError(
                "a batch was drawn and not used: leaving out a draw after seeing it would make the "
                "sampling depend on the records. Pass every batch to the step; one whose step was "
                "interrupted can be passed again."
            )

    def _check_unmoved(self) -> None:
        """Raise, and void the ledger, if the weights have changed since the last step."""
        tensors, lengths = self._weights_now()
        if tensors == self._versions[0] and torch.equal(lengths, self._versions[1]):
            return
        reason = "the model's weights were changed outside of the private step, where nothing is charged"
        self.ledger.void(reason)
        raise LedgerError(
            f"{reason}: no guarantee holds for the model. Only step(batch) may train it: leave out "
            "other calls of optimizer.step(). If the change did not depend on the records (weights that "
            "were loaded, averaged or clamped), call step.adopt_weights() right after it."
        )

    @torch.no_grad()
    def _weights_now(self) -> tuple[list[tuple[int, int]], Tensor]:
        """Which tensors the weights are and how often each was written; the bits of their lengths.

        Writes by way of `.data` are not counted by torch; they change the length. The bits stay on the
        device until they are compared, so that a step does not wait for what it has just moved.
        """
        values: list[Tensor] = list(self.model.parameters())
        lengths = torch._foreach_norm(values)
        if len({length.dtype for length in lengths}) > 1:
            lengths = tuple(length.double() for length in lengths)
        return [(value.data_ptr(), value._version) for value in values], _bits(torch.stack(lengths))

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters to train; which ones they are may change between steps."""
        return {k: v for k, v in self.model.named_parameters() if v.requires_grad}

    @property
    def size(self) -> int:
        """How many numbers there are to train."""
        return sum(parameter.numel() for parameter in self.trainable().values())

    def probe(self, data: Data) -> int:
        """How many records to work on at once, after made-up ones have shown that the model will do.

        Where the model does not take those, two records decide: docs/guarantees/tape.md, 10.
        """
        check_some_number(data)
        records = tree_map(take(data, torch.arange(min(2, self.records))), self.to_device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            inputs, targets = stand_ins(*records)
            try:
                tape = self._probed(inputs, targets)
                # what is not finite cannot be compared, and a branch may have been left out
                made_up = bool(tape.norms(2.0).isfinite().all()) and not tape.idle
            except Unsupported:
                raise
            except Exception:  # whatever the model raises for an input that it does not take
                made_up = False
            if not made_up:
                inputs, targets = records
                tape = self._probed(inputs, targets)
            if tape.idle:
                raise Unsupported(
                    f"the loss does not depend on {', '.join(tape.idle)}: noise alone would move it. "
                    "Freeze it with requires_grad_(False), or use it in forward()."
                )
            check_labels(self.model, self._given_loss, inputs, data)
            physical = self.physical_batch or self._fitting(inputs, targets, tape)
        batches = -(-self.records // physical)
        running = batches * self.records * 2.0**-52 <= self.rounding / 8
        self._bounded = running and tape.rounding_bounded(min(physical, self.records))
        return physical

    def _probed(self, inputs: Any, targets: Any) -> GradientTape | SplitTape:
        """The tape of one or two records, after checks that the model keeps them apart."""
        tape: GradientTape | SplitTape = self.module_state.probe(self._recorded, inputs, targets)
        if self._trials is not None:
            self._trials.probe(inputs, targets)
        if tape.records == 2:
            check_independent_losses(self.model, self.loss, inputs, targets)
        return tape

    def _fitting(self, inputs: Any, targets: Any, tape: GradientTape | SplitTape) -> int:
        """How many records to work on at once: what fits, if that does not depend on the records."""
        if tape.decided:
            return _DECIDING
        if self._views is not None:
            inputs, targets = expand_views(self._views, inputs, targets)
        return fitting(self.model, self.loss, inputs, targets, tape)

    def _recorded(self, inputs: Any, targets: Any) -> GradientTape | SplitTape:
        return record(self.model, self.loss, inputs, targets, self._views)

    def _sum(self, batch: Batch, frame: PublicBasis | None) -> Tensor:
        """Sum over the physical batches of a batch, in double precision."""
        total = self._accumulator(sum(self._sizes()))
        if not len(batch):
            total.zero_()
        self.module_state.begin()
        for number, (inputs, targets, present) in enumerate(batch):
            here = tree_map((inputs, targets, present), self.to_device)
            clipped = self.clip_physical_batch(here[0], here[1], frame, here[2])
            self.skipped += int(clipped.skipped)
            found = [part.reshape(-1) for part in clipped.total.values()]
            if number:
                torch._foreach_add_(total.split([len(part) for part in found]), found)
            else:
                torch.cat(found, out=total)
        self.module_state.check()
        return total

    def _noise(self) -> list[Callable[[Tensor], Tensor]]:
        """What privatizes each block of a sum; draws that do not depend on it are made now, if early."""
        clipping, source = self.plan.clipping, self.generator
        noises = self.plan.noise.per_block(clipping.sensitivity(self.size), clipping.reference_norm)
        if not self._early():
            return [partial(noise.privatize, norm=norm, generator=source) for noise, norm in noises]
        return [
            noise.prepare(size, norm=norm, generator=source, device=self.device)
            for size, (noise, norm) in zip(self._sizes(), noises, strict=True)
        ]

    def _noisy(
        self, total: Tensor, noise: list[Callable[[Tensor], Tensor]], frame: PublicBasis | None
    ) -> Tensor:
        # scaled down, so that what rounding adds to a record's share is within the noise; and up again,
        # unless that would leave the noise's support
        share = 1 - self.rounding
        for block, privatize in zip(total.mul_(share).split(self._sizes()), noise, strict=True):
            block.copy_(privatize(block))
        total = total if frame is None else frame.to_parameters(total)
        again = share if self.plan.noise.additive else 1.0
        return total.div_(again * self.plan.sampling.expected(self.records))

    def _sizes(self) -> list[int]:
        """How many numbers each block of the clipping has."""
        return [ball.dimension or 0 for ball in self.plan.clipping.sensitivity(self.size)]

    def _early(self) -> bool:
        """Whether noise is drawn while gradients are computed."""
        return (
            self.device.type == "cpu"
            and self.dimension >= _MANY
            and self.plan.sampling.coordinate_participation
            == 1  # otherwise both would draw from the generator
        )

    def _accumulator(self, size: int) -> Tensor:
        """Accumulator of the trainable parameters, in double precision, as the last step left it."""
        if self._memory is None or len(self._memory) != size:
            self._memory = torch.empty(size, dtype=torch.float64, device=self.device)
        return self._memory

    def clip_physical_batch(
        self, inputs: Any, targets: Any, frame: PublicBasis | None, present: Tensor | None
    ) -> ClippedSum:
        """Clipped sum of one physical batch, on the model's device (sensitive).

        A subclass may override it, as the audit does to put canaries in. What it adds for a slot must
        depend on that slot, the weights and its own randomness alone, lie in the plan's sensitivity set,
        and be exactly zero for a slot that is empty: the charge is for that.

        Args:
            inputs: of the slots drawn, a row a slot.
            targets: likewise.
            frame: public basis that gradients are clipped in; None: that of the parameters.
            present: which of the slots hold a record; None: all do.
        """
        thin = None if self.plan.sampling.coordinate_participation == 1 else self._thin
        if self._replay is not None:
            source = self.generator if thin and isinstance(self.generator, torch.Generator) else None
            with own_randomness(self._masks, self.device):
                return self._replay(inputs, targets, thin, source, present)
        # fresh for each: how much a model draws may depend on a record, and so would what comes after
        with own_randomness(self._masks, self.device):
            tape = self._recorded(inputs, targets)
        occupied = tape if present is None else OccupiedTape(tape, present)
        with own_randomness(self._masks, self.device):
            return self.plan.clipping.clip(
                occupied if frame is None else ProjectedTape(occupied, frame), thin
            )

    def _thin(self, values: Tensor) -> Tensor:
        return self.plan.sampling.mask_coordinates(values, self.generator)

    def to_device(self, value: Tensor) -> Tensor:
        """A tensor where the model is."""
        return value.to(self.device)

    def _give(self, update: Tensor) -> None:
        """Hand each parameter its part of the update as its gradient."""
        parameters = list(self.trainable().values())
        parts = update.split([parameter.numel() for parameter in parameters])
        gradients = [torch.empty_like(parameter) for parameter in parameters]
        shaped = [part.view_as(parameter) for parameter, part in zip(parameters, parts, strict=True)]
        torch._foreach_copy_(gradients, shaped)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _bits(values: Tensor) -> Tensor:
    """Bytes of a flat tensor: those of a NaN are equal to themselves."""
    return values.view(torch.uint8)


def _ledger_of(ledger: Ledger | str | os.PathLike[str] | None, plan: Plan) -> Ledger:
    """The ledger to charge; one opened by its path must be of this plan alone."""
    if isinstance(ledger, Ledger):
        return ledger
    opened = Ledger(ledger)
    others = [other for other in opened.counts if other != plan]
    if others:
        opened.close()
        raise LedgerError(
            f"the ledger {ledger} was charged for another plan, {others[0]}: it does not belong to "
            "this run. To add up several plans, open it yourself: ledger=hush.Ledger(path)."
        )
    return opened

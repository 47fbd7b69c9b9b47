"""One private step: draw, clip, add noise, put the charge on disk, and only then move the model."""

import functools
import os
import secrets
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.charge import rdp
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import DataError, InvalidValue, LedgerError, Unsupported
from hush.core.guarantee import Guarantee
from hush.core.kind import check_kind
from hush.core.number import check_count
from hush.core.plan import Plan
from hush.core.randomness import SystemSource, fresh_generator, seed_from, source_for
from hush.core.selective import Selective
from hush.core.tape import ClippedSum
from hush.gradients.admissible import check_model, check_optimizer, per_record
from hush.gradients.frame import Frame, FramedTape
from hush.gradients.isolation import check_apart
from hush.gradients.recording import Views, record, shown
from hush.gradients.replay import Replay
from hush.gradients.structure import each
from hush.training.ahead import ahead
from hush.training.batch import Batch
from hush.training.fingerprint import fingerprint
from hush.training.frames import frames_for
from hush.training.labels import check_labels
from hush.training.own_randomness import own_randomness
from hush.training.public import check_public
from hush.training.records import Data, count, take
from hush.training.selective import Trials
from hush.training.sizing import fitting
from hush.training.state import load_state, settings_of, state_of

_MANY = 2**17
"""So many numbers take longer to draw than a thread takes to start."""


class PrivateStep:
    """Runs the steps of a plan on a model and charges each one.

    **Guarantee.** Everything that the steps on its ledger released (the weights, the optimizer's
    state, the ledger) satisfies `spent(delta)`, for neighbours that differ by one record. Assumes
    that `records`, the model, the loss, the plan and the number of steps do not depend on the data;
    that arithmetic is exact; and that the generator is random and used for nothing else. Proved in
    docs/guarantees/poisson-gaussian.md and ledger.md. Two steps on one model must share a ledger.

    `secure` draws records and noise from the operating system's cryptographic source instead of a
    generator: docs/guarantees/sampling.md. Such a step cannot be repeated, so a run that resumes
    pays again for the steps since its checkpoint.

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
        self.optimizer = optimizer
        self._settings = settings_of(optimizer)
        self.plan = plan
        self.records = check_count(
            "records", records, "the divisor of the update is a public number of records", 1
        )
        self._device = next(iter(self._trainable().values())).device
        self.dimension = self._size()
        """How many numbers are trained: what a charge that grows with the dimension is for."""
        # raise for blocks of another model, and for a plan that cannot be charged
        plan.clipping.balls(self.dimension)
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
        self._frames = frames_for(model, self.loss, public, plan.clipping)
        self.generator = source_for(self._device, generator, secure=secure)
        elsewhere = secure or self.generator.device.type != self._device.type
        if replay and elsewhere and plan.sampling.thinning < 1:
            raise Unsupported(
                f"replay=True repeats the same work, and {type(plan.sampling).__name__} draws which "
                "coordinates take part: replayed, the same ones always would, as only a generator on "
                "the GPU can be asked for new ones from within. Leave out replay, or secure=True and a "
                "generator of your own."
            )
        self._replay = Replay(model, self.loss, plan.clipping, views) if replay else None
        self.ledger = _ledger_of(ledger, plan)
        self.run = secrets.token_hex(8)
        self.steps = 0
        self.skipped = 0
        """How many records added nothing because their gradient was not finite (sensitive)."""
        self._drawn: Batch | None = None
        self._memory: Tensor | None = None
        self._trials = Trials(self, plan.release) if isinstance(plan.release, Selective) else None

    def batches(self, data: Data, steps: int | None = None) -> Iterator[Batch]:
        """Draw one batch after another, each to be passed to this step once.

        Data that cannot be trained on is refused here, before the first is drawn.
        """
        if count(data) != self.records:
            raise DataError(
                f"the data has {count(data)} records and the step was made for records="
                f"{self.records}: the divisor and the charge are for that number. Pass the same data."
            )
        last = None if steps is None else self.steps + check_count("steps", steps, "steps are counted")
        if self._frames is not None:
            check_public(self._frames.public, data)
        return self._draws(data, last, self._tried(data))

    def _draws(self, data: Data, last: int | None, physical: int) -> Iterator[Batch]:
        while last is None or self.steps < last:
            self._nothing_drawn()
            indices = self.plan.sampling.draw(self.records, self.generator)
            self._drawn = Batch(indices, data, physical)
            yield self._drawn

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
        if self._size() > self.dimension and grows_with_dimension(self.plan):
            raise Unsupported(
                f"{self._size()} numbers are to be trained and the step was made for {self.dimension}: "
                f"{self.plan} costs more the more there are. Let all of them require gradients before "
                "making the step."
            )
        if self._trials is not None:
            return self._trials(batch)
        update = self._noisy_mean(batch)
        self._charge(fingerprint([update]))
        self._move(update)
        return True

    @property
    def accepted(self) -> int:
        """How many steps moved the model."""
        return self.steps if self._trials is None else self._trials.accepted

    def spent(self, delta: float) -> Guarantee:
        """The guarantee for everything on the ledger so far."""
        return self.ledger.epsilon(delta)

    def state_dict(self) -> dict[str, Any]:
        """All that a step needs to go on exactly as it would have."""
        self._nothing_drawn()
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, on the ledger that was charged for it."""
        self._nothing_drawn()
        load_state(self, state)

    def reseed(self) -> None:
        """Draw new randomness from here on; steps taken again are then charged again."""
        if not isinstance(self.generator, SystemSource):
            self.generator = fresh_generator(self.generator.device)
        self.run = secrets.token_hex(8)

    def _nothing_drawn(self) -> None:
        """Raise while a batch is drawn and not yet used."""
        if self._drawn is not None:
            raise DataError(
                "a batch was drawn and not used: leaving out a draw after seeing it would make the "
                "sampling depend on the records. Pass every batch to the step; one whose step was "
                "interrupted can be passed again."
            )

    def _trainable(self) -> dict[str, nn.Parameter]:
        """The parameters to train; which ones they are may change between steps."""
        return {k: v for k, v in self.model.named_parameters() if v.requires_grad}

    def _size(self) -> int:
        """How many numbers there are to train."""
        return sum(parameter.numel() for parameter in self._trainable().values())

    def _tried(self, data: Data) -> int:
        """How many records to work on at once, after two of them have shown that the model will do."""
        inputs, targets = each(take(data, torch.arange(min(2, self.records))), self._here)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            tape = record(self.model, self.loss, inputs, targets, self._views)
            if tape.idle:
                raise Unsupported(
                    f"the loss does not depend on {', '.join(tape.idle)}: noise alone would move it. "
                    "Freeze it with requires_grad_(False), or use it in forward()."
                )
            check_labels(self.model, self._given_loss, inputs, data)
            if tape.records == 2:
                check_apart(self.model, self.loss, inputs, targets)
            if self.physical_batch:
                return self.physical_batch
            if self._views is not None:
                inputs, targets = shown(self._views, inputs, targets)
            return fitting(self.model, self.loss, inputs, targets, tape)

    def _noisy_mean(self, batch: Batch) -> Tensor:
        """The update of all trainable parameters, one after the other in one vector."""
        clipping = self.plan.clipping
        balls = clipping.balls(self._size())
        frame = None if self._frames is None else self._frames.at(self.steps, self.generator)
        sizes = [ball.dimension or 0 for ball in balls]
        total = self._nothing(sum(sizes))
        seed = seed_from(self.generator)

        def hide() -> None:
            noises = self.plan.noise.over(balls, clipping.unit)
            for block, (noise, norm) in zip(total.split(sizes), noises, strict=True):
                block.copy_(noise.around(block, norm=norm, generator=self.generator))

        with ahead(hide, self._early(total)) as ready, own_randomness(seed, self._device):
            for inputs, targets in batch:
                clipped = self._clipped(each(inputs, self._here), each(targets, self._here), frame)
                self.skipped += int(clipped.skipped)
                found = [part.reshape(-1) for part in clipped.total.values()]
                ready()
                torch._foreach_add_(total.split([len(part) for part in found]), found)
        total = total if frame is None else frame.restored(total)
        return total.div_(self.plan.sampling.expected(self.records))

    def _early(self, total: Tensor) -> bool:
        """Whether the noise is drawn while the gradients are computed, and they are added to it."""
        return (
            self._device.type == "cpu"
            and len(total) >= _MANY
            and self.plan.noise.additive
            and self.plan.sampling.thinning == 1  # otherwise both would draw from the generator
        )

    def _charge(self, release: str) -> None:
        """Put the step on the ledger: from here on what it releases may be used."""
        self.ledger.charge(
            self.plan, run=self.run, step=self.steps + 1, release=release, dimension=self.dimension
        )
        self.steps += 1
        self._drawn = None

    def _move(self, update: Tensor) -> None:
        self._give(update)
        self.optimizer.step()

    def _nothing(self, size: int) -> Tensor:
        """So many zeros, the sum over an empty batch; in the memory of the step before, if it fits."""
        parameters = self._trainable().values()
        dtype = functools.reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        if self._memory is None or (len(self._memory), self._memory.dtype) != (size, dtype):
            self._memory = torch.empty(size, dtype=dtype, device=self._device)
        return self._memory.zero_()

    def _clipped(self, inputs: Any, targets: Any, frame: Frame | None) -> ClippedSum:
        thin = None if self.plan.sampling.thinning == 1 else self._thin
        if self._replay is not None:
            source = self.generator if thin and isinstance(self.generator, torch.Generator) else None
            return self._replay(inputs, targets, thin, source)
        tape = record(self.model, self.loss, inputs, targets, self._views)
        return self.plan.clipping.clip(tape if frame is None else FramedTape(tape, frame), thin)

    def _thin(self, values: Tensor) -> Tensor:
        return self.plan.sampling.thin(values, self.generator)

    def _here(self, value: Tensor) -> Tensor:
        return value.to(self._device)

    def _give(self, update: Tensor) -> None:
        """Hand each parameter its part of the update as its gradient."""
        parameters = list(self._trainable().values())
        parts = update.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))


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

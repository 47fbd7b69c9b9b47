"""One step of differentially private training: draw, clip, add noise, charge on disk, move the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from hush.core.errors import DataError, ProcessFailed, Unsupported
from hush.core.parts import Sampling
from hush.core.release import Selective
from hush.core.value import check_count
from hush.training.checks.disjoint import check_distinct, check_public
from hush.training.checks.probe_batch import check_some_number, probe_batch
from hush.training.data import Batch, Data, Source, count, held_slots, occupied, prepare, same_slots
from hush.training.distributed.charge import charge_together
from hush.training.distributed.group import propagate_errors
from hush.training.distributed.handshake import (
    check_same_end,
    check_same_weights,
    check_state_advances,
)
from hush.training.distributed.streams import draw_shared
from hush.training.methods.selective import Trials
from hush.training.phases.noisy_mean import NoisyMeanStep
from hush.training.phases.private_gradient import set_gradients
from hush.training.phases.replay_choice import choose_replay
from hush.training.units import check_length


class PrivateStep(NoisyMeanStep):
    """Runs the steps of a plan on a model and charges each one.

    **Guarantee.** Everything that the steps on its ledger released (the weights, the optimizer's
    state, the ledger) satisfies `spent(delta)`, for neighbours of which one has an empty slot where the
    other has a record (zero-out): `records`, the number of slots, is public. Other relations are in
    docs/guarantees/neighbours.md, users with several records in units.md. Assumes that the model, the
    loss, the plan and the number of steps do not depend on the data, and that a kernel's result for one
    record is a function of that record and of shapes (docs/guarantees/tape.md). Noise is drawn exactly
    from a cryptographic stream and the rounding of sums is paid for (docs/guarantees/sampling.md); where
    that is not so, the guarantee says `arithmetic: assumed`. Proved in
    docs/guarantees/poisson-gaussian.md and ledger.md. Two steps on one model must share a ledger: the
    weights of another one's run are trained further with a `PrivacyWarning`.

    `step(batch)` runs five phases, methods to call and override one by one: `draw`, `clipped_sum` (by
    `clip_physical_batch`), `privatize`, `charge` and `apply`.

        step = hush.PrivateStep(model, loss, optimizer, plan, records=len(inputs))
        for batch in step.batches((inputs, targets), steps=100):
            step(batch)
        print(step.spent(delta=1e-5))
    """

    @cached_property
    def trials(self) -> Trials | None:
        """Trials of a selective plan; None where every step is released."""
        return Trials(self, self.plan.release) if isinstance(self.plan.release, Selective) else None

    def probe(self, data: Data) -> int:
        """Records to work on at once, after made-up ones have shown that the model will do.

        Args:
            data: only shapes and types count, unless the model does not take made-up records.

        Returns:
            Records a physical batch; raises if the model cannot be trained privately.
        """
        if self.processes is None:
            physical_batch, self.rounding_bounded = probe_batch(self, data)
            return physical_batch
        with propagate_errors(self.processes):
            if self.sharded is not None:
                check_some_number(data)  # before the ranks gather weights together
                self.sharded.check_records(held_slots(data))
            # a rank without records has nothing to try, and will have nothing to work on
            with self.gathering():
                held = held_slots(data) > 0
                physical_batch, bounded = probe_batch(self, data) if held else (1, True)
            changing = held and bool(self.probed.changing_buffers)
            said = self.processes.exchange("the probe", [bounded, held, changing])
            self.rounding_bounded = all(bounded for bounded, _, _ in said)
            check_state_advances(
                [held for _, held, _ in said], changing=any(each for _, _, each in said)
            )
        return physical_batch

    def batches(
        self,
        data: Data,
        steps: int | None = None,
        present: Tensor | None = None,
    ) -> Iterator[Batch]:
        """Draw one batch after another, each to be passed to this step once.

        Data that cannot be trained on is refused here, before the first is drawn. A batch whose step
        raised, or was not run, comes first, on this data: what was mended since is trained on.

        Args:
            data: inputs and targets, a row a slot, a map-style data set of such pairs, or a
                `hush.Source` that says how records are read: docs/data.md.
            steps: how many batches; None: without end. After a step that raised, those that are left.
            present: which slots hold a record. What is in an empty slot counts for nothing.

        Returns:
            Subsampled slots (sensitive); none may be left out.
        """
        with propagate_errors(self.processes):
            self.free_whole_weights()
            self.ledger.check_adjacency(self.adjacency)
            data = prepare(data, present, pin_memory=self.device.type == "cuda")
            held = held_slots(data) if self.shard else count(data)
            filled = occupied(data, present)
            if self.processes is not None:
                check_same_weights(self.model, self.optimizer, self.processes)
                self._adopted = False
            slots = held if self.processes is None else self.place_again(data, filled).slots
            check_length(slots, self.records, self.units, self.adjacency.neighbours)
            if isinstance(data, Source) and held and self.units is None:
                check_distinct(data)
            last = None
            if steps is not None:
                last = self.steps + check_count("steps", steps, "steps are counted")
            if self.processes is not None:
                check_same_end(steps, self.processes)
            if self.basis_schedule is not None and held:
                check_public(self.basis_schedule.public, data)
            physical_batch = self.probe(data)
            self._replay = choose_replay(self, data, physical_batch, steps)
            if isinstance(data, Source) and held:
                data.start_workers()
        return self._draw_until(last, Batch(torch.arange(0), data, physical_batch, filled))

    def _draw_until(self, last: int | None, empty: Batch) -> Iterator[Batch]:
        if self.pending_batch is not None and (last is None or self.steps < last):
            with propagate_errors(self.processes):
                # the same slots: with others, the draw would depend on what was wrong with a record
                self.pending_batch = same_slots(self.pending_batch, empty)
            yield self.pending_batch
        while last is None or self.steps < last:
            with propagate_errors(self.processes):
                self._check_nothing_pending()
                self.pending_batch = self.draw(empty)
            yield self.pending_batch

    def draw(self, like: Batch, sampling: Sampling | None = None) -> Batch:
        """Fresh subsample of the slots, or of the units that own them (sensitive).

        An override must draw each unit as charged, whoever is in it: coin i is of unit i.

        Args:
            like: batch of the same data.
            sampling: None: the plan's.
        """
        units = self.slots(like.data) if self.units is None else len(self.units)
        drawn = draw_shared(sampling or self.plan.sampling, units, self.generator)
        if self.units is None:
            return replace(like, indices=drawn)
        slots, counts = self.units.draw(drawn.cpu(), self.generator)
        return replace(like, indices=slots, counts=counts)

    def __call__(self, batch: Batch) -> bool:
        """Update the model from a batch that `batches` has just drawn.

        Args:
            batch: the last one drawn. A step that raised has charged nothing and takes the same batch
                again; `batches` of mended data begins with it.

        Returns:
            Whether the model moved: not if a selective plan rejected the proposal. A learning-rate
            schedule should move only when the model did.
        """
        with propagate_errors(self.processes):
            return self._run(batch)

    def _run(self, batch: Batch) -> bool:
        if batch is None or batch is not self.pending_batch:
            raise DataError(
                "this batch was not drawn by `step.batches`, or was used before: the charge is for a "
                "fresh draw. Loop `for batch in step.batches(data): step(batch)`."
            )
        self.free_whole_weights()
        self.ledger.check_adjacency(self.adjacency)  # another run may have been charged since the draw
        self.update = None  # its memory holds the bare clipped sum until noise is added
        self._reading = None
        if self._replay is None or self.processes is not None or self.trials is not None:
            self._check_model()
        if self.trials is not None:
            self._weights.check(self.ledger, self._reading)
            with self._say_how_to_go_on():
                moved = self.trials(batch)
        else:
            with self._say_how_to_go_on():
                update = self.private_gradient(batch)
            # compared when the GPU is waited for anyway: nothing leaves the step before it is charged
            self._weights.check(self.ledger, self._check_model())
            self.charge(self.release_name(update))
            self.apply(update)
            moved = True
        self.advance_state(batch.data)
        return moved

    @contextmanager
    def _say_how_to_go_on(self) -> Iterator[None]:
        """Context that adds the way out to an error that stops a step before its charge."""
        try:
            yield
        except Exception as error:
            if self.pending_batch is not None and not isinstance(error, (Unsupported, ProcessFailed)):
                error.add_note(
                    "The step stopped before it was charged, and its batch is the next one all the "
                    "same: leaving it out would make the sampling depend on the records. If a record "
                    "stopped it (which one is private), check every record against the model, mend "
                    "those that do not fit each by itself, and loop on with step.batches(mended): it "
                    "begins with this batch. A run of hush.train with a directory goes on with "
                    "resume=True."
                )
            raise

    def charge(self, release: str) -> None:
        """Put the step on the ledger, on disk: only from here on may its release be used.

        Not to be overridden: once a step, after its draws and before its release.

        Args:
            release: name or fingerprint of the release; it must not tell more than the release.
        """
        charge = self.ledger.charge
        if self.processes is not None:
            charge = partial(charge_together, self.processes, self.ledger)
        charge(
            self.plan,
            run=self.run,
            step=self.steps + 1,
            release=release,
            dimension=self.dimension,
            arithmetic=self.arithmetic,
            randomness=self.secrecy,
            records=self.records,
            adjacency=self.adjacency,
        )
        self.steps += 1
        self.charged_run = self.run
        self.pending_batch = None

    def apply(self, update: Tensor) -> None:
        """Move the model by the optimizer's rule for a private gradient that was charged.

        No gradient is left behind: whoever calls the optimizer next would apply it again. An override
        may look at released values alone.

        Args:
            update: of `private_gradient` or `privatize`.
        """
        parameters = list(self.trainable().values())
        if self.sharded is None:
            set_gradients(parameters, update)
        else:
            self.sharded.set_gradients(parameters, update)
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        self.update = update
        self._weights.applied(self.ledger)

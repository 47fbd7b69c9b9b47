"""One step of differentially private training: draw, clip, add noise, charge on disk, move the model."""

import os
import secrets
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.epsilon import rdp
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import DataError, PrivacyWarning, ProcessFailed, Unsupported
from hush.core.guarantee import Arithmetic, Guarantee, Neighbours, Secrecy, check_delta
from hush.core.parts import ClippedSum, CoordinateMask, Sampling
from hush.core.plan import Plan
from hush.core.randomness import SystemSource, cryptographic, derive_source, source_for
from hush.core.value import check_count, check_kind, with_article
from hush.gradients.models import check_model, check_optimizer, is_sharded, trainable
from hush.gradients.public_basis import PublicBasis
from hush.gradients.tree import Views
from hush.training.checkpoint import load_state, settings_of, state_of
from hush.training.clipped_gradients import ClippedGradients
from hush.training.data import Batch, Data, held_slots, occupied, prepare, ragged, same_slots
from hush.training.disjoint import check_alone, check_distinct, check_public
from hush.training.distributed.process_group import reducer_of
from hush.training.methods.public_bases import basis_schedule
from hush.training.noisy_mean import NoisyMean
from hush.training.options import Distributed, Execution, Randomness, Units
from hush.training.reducer import Local, StepStreams
from hush.training.release import rule_of
from hush.training.replay_choice import check_replay, choose_replay
from hush.training.source import Source
from hush.training.units import adjacency_of, check_length, public_count, units_of
from hush.training.weights_guard import WeightsGuard

_RECOVERY = (
    "The step stopped before it was charged. Its batch comes next: leaving it out would make the "
    "sampling depend on the records. If a record stopped it (which is private), fix each invalid record "
    "independently and loop over step.batches(fixed), or resume a run of hush.train."
)
_RANDOMNESS, _EXECUTION, _DISTRIBUTED = Randomness(), Execution(), Distributed()


class PrivateStep:
    """Runs the steps of a plan on a model and charges each one.

    **Guarantee.** All releases on its ledger (the weights, the optimizer's state, the ledger itself)
    satisfy `spent(delta)` under zero-out adjacency: one record is replaced by an empty slot, and
    `records`, the number of slots, is public. Other relations are in docs/guarantees/neighbours.md,
    user-level privacy in units.md. Assumes that the model, the loss, the plan and the number of steps do
    not depend on the data, and that a kernel's result for one record is a function of that record and of
    shapes (docs/guarantees/tape.md). Noise is exact, from a cryptographic stream, and covers the
    rounding of sums (docs/guarantees/sampling.md); otherwise the guarantee has `arithmetic: assumed`.
    Proofs: docs/guarantees/poisson-gaussian.md and ledger.md. Two steps on one model must share a
    ledger; training the result of a run on another ledger gives a `PrivacyWarning`.

    `step(batch)` runs five phases, which can be called and overridden one by one: `draw`, `clipped_sum`
    (with `clip_physical_batch`), `privatize`, `charge` and `apply`.

        step = hush.PrivateStep(model, loss, optimizer, plan, records=len(inputs))
        for batch in step.batches((inputs, targets), steps=100):
            step(batch)
        print(step.spent(delta=1e-5))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        records: int | None = None,
        units: Units | None = None,
        neighbours: Neighbours = Neighbours.ZERO_OUT,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        views: Views | None = None,
        public: Data | None = None,
        randomness: Randomness = _RANDOMNESS,
        execution: Execution = _EXECUTION,
        distributed: Distributed = _DISTRIBUTED,
    ) -> None:
        """A step on a model, before its first draw.

        Args:
            model: Module to train, in place; parameters may be frozen between steps.
            loss: Loss module or function of outputs and targets, one value per record.
            optimizer: Optimizer of the noisy gradients; it must hold the model's parameters alone.
            plan: Sampling, clipping, noise and release.
            records: Number of slots of the data, which is public: the divisor of the update. Under
                `ADD_REMOVE` a public constant near it. With `units`, the number of units; None: as many
                as own the records.
            units: Owners of the records, for user-level privacy; None: each record is a unit of privacy.
            neighbours: Adjacency relation that is charged: docs/guarantees/neighbours.md.
            ledger: Ledger to charge, or the path of one of this plan alone; None: one in memory. Earlier
                charges on a path give a `PrivacyWarning`, unless a checkpoint is loaded.
            views: Function from the inputs of one record to several views of it, along a new first
                dimension; the record's gradient is their mean, before it is clipped.
            public: Records that need no protection, for `Subspaces(bases=Principal(...))`; no private
                ones among them.
            randomness: Source of sampling and noise.
            execution: Size of physical batches and use of CUDA graphs.
            distributed: Process group whose ranks run the step together.
        """
        check_kind("model", model, nn.Module)
        check_kind("distributed", distributed, Distributed)
        self.reducer: Local = reducer_of(distributed, sharded=is_sharded(model), users=units is not None)
        """This process alone, or the ranks that run the step together."""
        with self.reducer.propagate_errors():
            self.plan = check_kind("plan", plan, Plan)
            generator = check_kind("randomness", randomness, Randomness).generator
            relation = Neighbours(neighbours)
            self.units = units_of(units, relation)
            """Owners of the records; None: each record is a unit of privacy."""
            reduction = None if self.units is None else self.units.reduction
            self.gradients = ClippedGradients(
                model, loss, views, plan, execution, self.reducer, reduction
            )
            self.model, self.device = model, self.gradients.device
            self.dimension = self.gradients.dimension
            self.optimizer = check_kind("optimizer", optimizer, torch.optim.Optimizer)
            check_optimizer(optimizer, model)
            self.optimizer_settings = settings_of(optimizer)
            """Settings of the optimizer when the step was made; a resumed run begins with the same."""
            self.adjacency = adjacency_of(self.units, relation)
            self.records = public_count(records, self.units, relation)
            """Number of units of privacy, or a public constant near it."""
            # raise for blocks of another model, and for a plan that cannot be charged
            plan.clipping.sensitivity(self.dimension)
            rdp(plan, [2.0], self.dimension if grows_with_dimension(plan) else None)
            self.rule = rule_of(self)
            self.basis_schedule = basis_schedule(model, self.gradients.loss, public, plan.clipping)
            """Public bases in which gradients are clipped; None: the basis of the parameters."""
            self.generator = source_for(
                self.device, generator, secure=randomness.secure, arithmetic=randomness.arithmetic
            )
            check_replay(self)
            self.reducer = self.gradients.reducer = self.reducer.joined(self, generator)
            self.ledger = self.reducer.open_ledger(ledger, plan, self.adjacency)
            self.earlier = 0 if isinstance(ledger, Ledger) else sum(self.ledger.counts.values())
            """Number of earlier charges on a ledger passed as a path, until they are reported."""
            self.generator = derive_source(self.generator, self.ledger.stream_label())
            self.secrecy: Secrecy = "secret" if generator is None else "seeded"
            """Whether the key of the stream came from the operating system or from a given seed."""
            self.run = self._share_randomness()
            self.charged_run = self.run
            """Run of the last charge: another one right after `reseed`."""
            self._expected = self.records, plan.sampling.expected(self.records)
            self._coordinates = plan.sampling.coordinate_participation < 1
            self.steps = 0
            """Number of charged steps."""
            self.accepted = 0
            """Number of steps that moved the model."""
            self.update: Tensor | None = None
            """Private gradient of the last step; valid until the next step."""
            self.pending_batch: Batch | None = None
            """Batch that was drawn and not yet used (sensitive)."""
            self.rounding_bounded = False
            """Whether rounding is within its slack, from public shapes: known after `probe`."""
            self._streams: StepStreams | None = None
            self._checked: tuple[Any, ...] | None = None
            gradients = self.gradients  # a guard that referred to the step would keep it in memory
            self._guard = WeightsGuard(
                model, optimizer, self.ledger, lambda: gradients.probed.changing_buffers
            )

    def __repr__(self) -> str:
        ledger = self.ledger.path or "in memory"
        return f"{type(self).__name__}({self.plan}, steps={self.steps}, ledger={ledger})"

    # state

    @property
    def arithmetic(self) -> Arithmetic:
        """Whether all steps so far rounded within their slack, under noise that was drawn exactly."""
        if self.pending_batch is not None and ragged(self.pending_batch.data):
            return "assumed"
        exact = self.rounding_bounded and self.plan.noise.exact and cryptographic(self.generator)
        # with one record less, others are computed at other places, and may round otherwise
        placed = self.adjacency.neighbours is not Neighbours.ADD_REMOVE
        return "proved" if exact and placed else "assumed"

    @property
    def rounding(self) -> float:
        """Relative rounding slack on the sensitivity of the clipped sum."""
        return self.gradients.layout().rounding

    @property
    def skipped(self) -> int:
        """Number of records left out because their gradient was not finite, so far (sensitive)."""
        return self.gradients.skipped

    @property
    def size(self) -> int:
        """Number of parameters that are trainable now, entry by entry."""
        return sum(parameter.numel() for parameter in self.trainable().values())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters to train, by name; they may change between steps."""
        return trainable(self.model)

    def spent(
        self, delta: float | None = None, *, group: int = 1, neighbours: Neighbours | None = None
    ) -> Guarantee:
        """(epsilon, delta) guarantee of all charges on the ledger.

        Args:
            delta: Delta of the guarantee; None: the one stored on the ledger, as `train` does.
            group: Number of units of privacy that change together.
            neighbours: Adjacency relation; None: the one that is charged.

        Raises:
            LedgerError: Weights or buffers were changed outside of the step.

        Warns:
            PrivacyWarning: Some of the weights were also trained on another ledger.
        """
        self.check_weights()
        self._guard.warn_of_other_ledgers()
        checked = None if delta is None else check_delta(delta, self.records, self.adjacency.unit)
        return self.ledger.epsilon(checked, group=group, neighbours=neighbours, uncharged=self.adjacency)

    def check_weights(self) -> None:
        """Raise `LedgerError` if weights or buffers were changed outside of the step."""
        self.reducer.free_whole_weights()
        self._guard.check(self.ledger)

    def adopt_weights(self) -> None:
        """Declare that weights or buffers were set outside of this step without looking at the records.

        This holds for all steps on the model that share the ledger. For weights that were loaded,
        averaged or clamped: functions of earlier releases, or of public data.
        """
        self.reducer.free_whole_weights()
        self._guard.adopt(self.ledger)
        self.reducer.adopt_weights()

    def reseed(self) -> None:
        """Draw new randomness from here on; steps taken again are then charged again.

        In a process group, all ranks call it.
        """
        if not isinstance(self.generator, SystemSource):
            kind: Arithmetic = "proved" if cryptographic(self.generator) else "assumed"
            self.generator = source_for(self.generator.device, arithmetic=kind)
        self.secrecy = "secret"
        self.run = self._share_randomness()

    def _share_randomness(self) -> str:
        """Name of a new run, after every rank has rank 0's source of shared draws."""
        self.generator = self.reducer.shared_source(self.generator)
        run: str = self.reducer.broadcast("the name of the run", partial(secrets.token_hex, 8))
        return run

    def state_dict(self) -> dict[str, Any]:
        """Checkpoint to continue from exactly (secret)."""
        self.check_nothing_pending()
        self.reducer.check_whole("state_dict()")
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, on the ledger that was charged for it.

        Args:
            state: Result of `state_dict` for the same plan, data, optimizer, views and kind of
                randomness. In a process group the one of rank 0 is loaded on all ranks.
        """
        with self.reducer.propagate_errors():
            self.check_nothing_pending()
            self.reducer.check_whole("load_state_dict()")
            load_state(self, self.reducer.broadcast("the checkpoint", lambda: state))
            self.adopt_weights()

    def check_nothing_pending(self) -> None:
        """Raise if a batch was drawn and not used."""
        if self.pending_batch is not None:
            raise DataError(
                "a batch was drawn and not used: leaving out a draw after seeing it would make the "
                "sampling depend on the records. Pass every batch to the step; one whose step "
                "raised comes again, first of a new step.batches(data)."
            )

    def overrides(self, *phases: str) -> bool:
        """Whether the class of this step overrides one of the phases.

        Args:
            phases: Names of methods.
        """
        own = type(self)
        return own is not PrivateStep and any(
            getattr(own, name) is not getattr(PrivateStep, name) for name in phases
        )

    # before the first draw

    def probe(self, data: Data) -> int:
        """Physical batch size, after a probe of the model on synthetic records.

        Args:
            data: Only shapes and types count, unless the model does not accept synthetic records.

        Raises:
            Unsupported: The model cannot be trained privately.
        """
        unchanged = self._guard.unchanged()
        with self.reducer.propagate_errors(), self.reducer.probing(data):
            # a rank without records neither probes nor processes any
            physical, bounded, held = 1, True, held_slots(data) > 0
            if held:
                per_unit = 1 if self.units is None else self.units.per_unit
                slots = self.reducer.place(data).slots
                physical, bounded = self.gradients.probe(data, slots, per_unit, self.rule.probe)
            changing = held and bool(self.gradients.probed.changing_buffers)
            said = self.reducer.exchange("the probe", [bounded, held, changing])
            all_bounded, all_held, all_changing = zip(*said, strict=True)
            self.rounding_bounded = all(all_bounded)
            if any(all_changing) and not all(all_held):
                raise DataError(
                    f"rank {all_held.index(False)} has no records, and forward passes change buffers: a "
                    "pass over a synthetic record advances them in every step, and needs a record's "
                    "shapes. Give every rank some records, or keep no state in the model."
                )
        if unchanged:  # the probe restored all values
            self._guard.accept_writes(self.ledger)
        return physical

    def batches(
        self, data: Data, steps: int | None = None, present: Tensor | None = None
    ) -> Iterator[Batch]:
        """Draw batches, each to be passed to this step once.

        Invalid data raise here, before the first draw. A batch whose step raised or was not run comes
        first, with the present content of its slots.

        Args:
            data: Inputs and targets, a row per slot, a map-style data set of such pairs, or a
                `hush.Source`: docs/data.md.
            steps: Number of batches; None: no end. After a step that raised, the number that is left.
            present: Whether each slot holds a record; the content of an empty slot is ignored.

        Returns:
            Subsampled slots (sensitive); none may be left out.
        """
        with self.reducer.propagate_errors():
            if self.earlier and self.ledger.path is not None:
                warnings.warn(
                    f"the ledger {self.ledger.path} already holds {self.earlier} charges, and they "
                    "count. Pass another path for an unrelated run, call load_state_dict() to resume "
                    "one, or pass ledger=hush.Ledger(path) to add runs up.",
                    PrivacyWarning,
                    stacklevel=2,
                )
                self.earlier = 0
            self.reducer.free_whole_weights()
            self.ledger.check_adjacency(self.adjacency)
            self._checked = None
            self._check_model()
            data = prepare(data, present)
            filled, held = occupied(data, present), held_slots(data) > 0
            slots = self.reducer.begin(self, data, filled, steps)
            check_length(slots, self.records, self.units, self.adjacency.neighbours)
            if isinstance(data, Source) and held:
                check_alone(data)
                if self.units is None:
                    check_distinct(data)
            last = None
            if steps is not None:
                last = self.steps + check_count("steps", steps, "steps are counted")
            if self.basis_schedule is not None and held:
                check_public(self.basis_schedule.public, data)
            physical_batch = self.probe(data)
            self.gradients.replay = choose_replay(self, data, physical_batch, steps)
            if isinstance(data, Source) and held:
                data.loader.start()
        return self._draw_until(last, Batch(torch.arange(0), data, physical_batch, filled))

    def _draw_until(self, last: int | None, empty: Batch) -> Iterator[Batch]:
        if self.pending_batch is not None and (last is None or self.steps < last):
            with self.reducer.propagate_errors():
                # the same slots: with others, the draw would depend on what was wrong with a record
                self.pending_batch = same_slots(self.pending_batch, empty)
            yield self.pending_batch
        while last is None or self.steps < last:
            with self.reducer.propagate_errors():
                self.check_nothing_pending()
                self.pending_batch = self.draw(empty)
            yield self.pending_batch

    def _check_model(self) -> None:
        """Check the model and the optimizer, if modules, modes or trained parameters have changed."""
        groups: list[int] = []
        for group in self.optimizer.param_groups:
            groups += map(id, group["params"])
        now = self.gradients.structure(), groups
        if now != self._checked:
            check_model(self.model, sharded=bool(self.reducer.processes))
            check_optimizer(self.optimizer, self.model)
            self._checked = now

    # one step

    def __call__(self, batch: Batch) -> bool:
        """Update the model from a batch that `batches` has just drawn.

        Args:
            batch: Last batch drawn. A step that raised has made no charge and takes the same batch
                again; `batches` begins with it.

        Returns:
            Whether the model moved: not if a selective plan rejected the proposal. A learning-rate
            schedule should move only when the model did.
        """
        with self.reducer.propagate_errors():
            if batch is None or batch is not self.pending_batch:
                what = "this batch was used before, or drawn by another step"
                if not isinstance(batch, Batch):
                    what = f"{with_article(type(batch).__name__)} is not a batch of `step.batches`"
                raise DataError(
                    f"{what}: the charge is for a fresh draw. Loop `for batch in step.batches(data): "
                    "step(batch)`."
                )
            self.update = None  # its memory holds the bare clipped sum until noise is added
            self.reducer.free_whole_weights()
            self._check_model()
            self._guard.check(self.ledger)
            self.ledger.check_adjacency(self.adjacency)  # another run may have been charged since
            try:
                moved = self.rule.run(batch)
            except Exception as error:
                if self.pending_batch is not None and not isinstance(error, Unsupported | ProcessFailed):
                    error.add_note(_RECOVERY)
                raise
            self.accepted += moved
            self.advance(batch.data)
            return moved

    def draw(self, like: Batch, sampling: Sampling | None = None) -> Batch:
        """Fresh subsample of the slots, or of the units that own them (sensitive).

        An override must draw each unit as charged: coin i belongs to unit i.

        Args:
            like: Batch of the same data.
            sampling: Sampling; None: the plan's.
        """
        slots = self.reducer.place(like.data).slots if self.units is None else len(self.units)
        indices = (sampling or self.plan.sampling).draw(slots, self.generator)
        counts = None
        if self.units is not None:
            indices, counts = self.units.draw(indices.cpu(), self.generator)
        return Batch(indices, like.data, like.physical, like.present, counts)

    def clipped_sum(self, batch: Batch) -> Tensor:
        """Sum of the clipped per-sample gradients of a batch (sensitive).

        One record moves it by (1 + `rounding`) times its sensitivity set at most. The charge assumes
        that, and an override must keep it.

        Args:
            batch: Slots drawn under the plan.

        Returns:
            Flat vector in double precision, block after block; the next sum overwrites it. In a process
            group the sum over the shares of all ranks; of sharded parameters, this rank's shards of it.
        """
        with self.reducer.propagate_errors():
            return self.reducer.whole_sum(self._share_sum(batch, self._mean(begin=True)))

    def _mean(self, *, begin: bool = False) -> NoisyMean:
        """Noise of a step; `begin` makes its sources of masks and noise."""
        schedule, basis = self.basis_schedule, None
        if schedule is not None:
            before = schedule.current
            basis = schedule.at(self.steps, self.generator)
            if basis is not before:
                # computed by other kernels it may round differently, and weights would part
                self.reducer.copy_of_first("the public basis", [group.basis for group in basis.groups])
        if begin or (self.reducer.processes and self._streams is None):
            self._streams = self.reducer.streams(self.generator)
        source = self._streams.noise if self._streams and self.reducer.processes else self.generator
        if self._expected[0] != self.records:
            self._expected = self.records, self.plan.sampling.expected(self.records)
        layout, expected = self.gradients.layout(), self._expected[1]
        return NoisyMean(self.plan, layout, basis, expected, self._coordinates, source, self.device)

    def _share_sum(self, batch: Batch, mean: NoisyMean) -> Tensor:
        """Clipped sum of this rank's share of a batch."""
        assert self._streams is not None
        compute = partial(
            self.gradients.sum,
            size=sum(mean.layout.block_sizes),
            masks=self._streams.masks,
            clip=self.clip_physical_batch,
            basis=mean.basis,
        )
        return self.reducer.sum_share(self, batch, compute)

    def clip_physical_batch(
        self,
        inputs: Any,
        targets: Any,
        basis: PublicBasis | None,
        present: Tensor | None,
        counts: Tensor | None,
    ) -> ClippedSum:
        """Clipped sum of one physical batch, on the model's device (sensitive).

        A subclass may override it, as the audit does to insert canaries. Its contribution of a slot, or
        of all slots of a unit together, must depend on these, the weights and its own randomness alone,
        lie in the plan's sensitivity set, and be exactly zero if they are empty.

        Args:
            inputs: Inputs of the slots drawn, a row per slot.
            targets: Their targets.
            basis: Public basis in which gradients are clipped; None: the basis of the parameters.
            present: Whether each slot holds a record; None: all do.
            counts: Number of slots of each unit, one after another; None: one each.

        Returns:
            Sum by parameter or block, and the number of records (or units) skipped.
        """
        assert self._streams is not None
        mask = self.coordinate_mask()
        generator = self.generator if mask and isinstance(self.generator, torch.Generator) else None
        return self.gradients.clip(
            *(inputs, targets, basis, present, counts),
            masks=self._streams.masks,
            mask=mask,
            generator=generator,
        )

    def coordinate_mask(self) -> CoordinateMask | None:
        """Mask of the coordinates that take part, fresh at every call; None: all of them do."""
        if not self._coordinates:
            return None
        local = self._streams is None or not self.reducer.processes
        source = self.generator if local or self._streams is None else self._streams.coordinates
        return partial(self.plan.sampling.mask_coordinates, generator=source)

    def private_gradient(self, batch: Batch) -> Tensor:
        """Noisy mean of the clipped per-sample gradients of a batch, to be charged before it is used.

        It equals `privatize(clipped_sum(batch))`; the noise is drawn during the computation of gradients
        if that is faster and neither is overridden. An override must release no more.

        Args:
            batch: Slots drawn under the plan.

        Returns:
            Flat vector in double precision, the trainable parameters one after another; of sharded
            parameters, this rank's shards.
        """
        if self.overrides("clipped_sum", "privatize"):
            return self.privatize(self.clipped_sum(batch))
        mean = self._mean(begin=True)
        compute = partial(self.reducer.noisy_mean, partial(self._share_sum, batch, mean), mean)
        replay = self.gradients.replay
        if replay is None or self.reducer.processes or self.overrides("clip_physical_batch"):
            return compute()
        assert self._streams is not None
        return self.gradients.verified_later(replay, self._streams.masks, compute)

    def privatize(self, total: Tensor) -> Tensor:
        """Noisy mean from a clipped sum; not to be used before it is charged.

        Args:
            total: Result of `clipped_sum`; it is overwritten.

        Returns:
            Flat vector in double precision, the trainable parameters one after another.
        """
        return self.reducer.privatize(total, self._mean())

    def charge(self, release: str) -> None:
        """Put the step on the ledger, on disk; its release may be used only afterwards.

        Not to be overridden: once a step, after its draws and before its release.

        Args:
            release: Name or fingerprint of the release; it must not tell more than the release.
        """
        self.reducer.charge(
            self.ledger,
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

        No gradient is left behind: the next caller of the optimizer would apply it again. An override
        may look at released values alone.

        Args:
            update: Result of `private_gradient` or `privatize`.
        """
        parameters = self.gradients.laid_out
        self.reducer.set_gradients(parameters, update)
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        self.update = update
        self._guard.adopt(self.ledger, parameters)

    def advance(self, data: Data) -> None:
        """Advance the buffers that forward passes change by one pass, once a step for any draw.

        Args:
            data: Data of the step, for the shapes and types of a synthetic record.
        """
        if self._streams is not None:
            self.gradients.advance(data, self._streams.masks)

"""One step of differentially private training: draw, clip, add noise, charge, update the model."""

import os
import secrets
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.epsilon import check_relation, rdp
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.clipping import Quantile
from hush.core.errors import DataError, InvalidValue, PrivacyWarning, ProcessFailed, Unsupported
from hush.core.guarantee import Arithmetic, Budget, Guarantee, Neighbours, Secrecy, check_delta
from hush.core.parts import ClippedSum, CoordinateMask, Sampling
from hush.core.plan import Plan
from hush.core.randomness import derive_source, source_for
from hush.core.value import check_count, check_kind, with_article
from hush.gradients.models import check_model, check_optimizer, is_sharded, trainable
from hush.gradients.public_basis import PublicBasis
from hush.gradients.tree import Views
from hush.training.checkpoint import load_state, settings_of, state_of
from hush.training.clipped_gradients import ClippedGradients
from hush.training.data import Batch, Data, occupied, prepare, ragged, same_slots
from hush.training.disjoint import check_alone, check_distinct, check_public
from hush.training.distributed.process_group import reducer_of
from hush.training.end import last_step
from hush.training.methods.public_bases import basis_schedule
from hush.training.noisy_mean import NoisyMean, PastNoise
from hush.training.options import Distributed, Execution, Randomness, Units
from hush.training.reducer import Local, StepStreams
from hush.training.release import rule_of
from hush.training.replay_choice import check_replay, choose_replay
from hush.training.source import Source
from hush.training.units import adjacency_of, check_length, public_count, units_of
from hush.training.weights_guard import WeightsGuard

_RECOVERY = (
    "The step stopped before it was charged, and its batch comes again: skipping it would make the "
    "sampling depend on the records. If a record caused the error (which is private), fix each invalid "
    "record independently and loop over step.batches(fixed), or resume the run of hush.train."
)
_RANDOMNESS, _EXECUTION, _DISTRIBUTED = Randomness(), Execution(), Distributed()


class PrivateStep:
    """Trains a model with private steps, and charges each step to a ledger.

    **Guarantee.** All releases on the ledger (the weights, the optimizer state, the ledger itself)
    satisfy `spent(delta)` under zero-out adjacency: one record is replaced by an empty slot, and
    `records`, the number of slots, is public. See docs/guarantees/neighbours.md for other relations and
    units.md for user-level privacy. The guarantee assumes that the model, the loss, the plan and the
    number of steps do not depend on the data. It also assumes that the result of a kernel for a record
    depends only on that record and on shapes (docs/guarantees/tape.md). Noise is exact, comes from a
    cryptographic stream, and covers the rounding of sums (docs/guarantees/sampling.md); otherwise the
    guarantee has `arithmetic: assumed`. docs/guarantees/poisson-gaussian.md and ledger.md have the
    proofs. All steps on one model must share a ledger; weights from a run on another ledger raise a
    `PrivacyWarning`.

    A step has five phases, which can be called and overridden: `draw`, `clipped_sum` (with
    `clip_physical_batch`), `privatize`, `charge` and `apply`.

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
        """Create a step; `batches` probes the model before the first draw.

        Args:
            model: Module to train, in place; parameters may be frozen between steps.
            loss: Loss module or function of outputs and targets, with one value per record.
            optimizer: Optimizer of exactly the model's parameters; it receives the noisy gradients.
            plan: Sampling, clipping, noise and release.
            records: Public number of slots, by which the update is divided; a public estimate under
                `ADD_REMOVE`. With `units`, this is the number of users, and by default the number of
                distinct user ids.
            units: User ids of the records, for user-level privacy; None for record-level privacy.
            neighbours: Adjacency relation; see docs/guarantees/neighbours.md.
            ledger: Ledger, or the path of a ledger for this plan alone; by default a ledger in memory.
                Earlier charges at a path raise a `PrivacyWarning`, unless a checkpoint is loaded.
            views: Function that returns several augmented views of a record's inputs, along a new first
                dimension. Their mean gradient is clipped.
            public: Public records for `Subspaces(bases=Principal(...))`, disjoint from the private
                records.
            randomness: Random source for sampling and noise.
            execution: Physical batch size and use of CUDA graphs.
            distributed: Process group that runs the step.
        """
        check_kind("model", model, nn.Module)
        check_kind("distributed", distributed, Distributed)
        self.reducer: Local = reducer_of(distributed, sharded=is_sharded(model))
        """Operations that differ between one and several ranks, such as sums and noise."""
        with self.reducer.propagate_errors():
            self.plan = check_kind("plan", plan, Plan)
            generator = check_kind("randomness", randomness, Randomness).generator
            relation = Neighbours(neighbours)
            self.units = units_of(units, relation)
            """Users and their records; None for record-level privacy."""
            reduction = None if self.units is None else self.units.reduction
            self.gradients = ClippedGradients(
                model, loss, views, plan, execution, self.reducer, reduction
            )
            self.model, self.device = model, self.gradients.device
            self.dimension = self.gradients.dimension
            self.optimizer = check_kind("optimizer", optimizer, torch.optim.Optimizer)
            check_optimizer(optimizer, model)
            self.optimizer_settings = settings_of(optimizer)
            """Initial settings of the optimizer, which must be equal when a run resumes."""
            self.adjacency = adjacency_of(self.units, relation)
            self.records = public_count(records, self.units, relation)
            """Public number of records or users, or a public estimate."""
            # raise if the blocks do not fit the model, or the plan has no proof
            plan.clipping.sensitivity(self.dimension)
            rdp(plan, [2.0], self.dimension if grows_with_dimension(plan) else None)
            check_relation(plan, relation)
            plan.sampling.check_slots(self.records)
            self.rule = rule_of(self)
            self.basis_schedule = basis_schedule(model, self.gradients.loss, public, plan.clipping)
            """Public bases for clipping; None: the standard basis."""
            self.generator = source_for(self.device, generator)
            check_replay(self)
            self.reducer = self.gradients.reducer = self.reducer.joined(self, generator)
            self.ledger = self.reducer.open_ledger(ledger, plan, self.adjacency)
            self.earlier = 0 if isinstance(ledger, Ledger) else sum(self.ledger.counts.values())
            """Number of earlier charges on a ledger passed as a path; 0 after the warning about them."""
            self.generator = derive_source(self.generator, self.ledger.stream_label())
            self.secrecy: Secrecy = "secret" if generator is None else "seeded"
            """`seeded` if the random stream has a given seed."""
            self.run = self._share_randomness()
            self.charged_run = self.run
            """Run of the last charge, which differs from `run` after `reseed`."""
            self._expected = self.records, plan.sampling.expected(self.records)
            correlation = plan.noise.correlation
            self.past_noise = PastNoise(correlation) if len(correlation) > 1 else None
            """Noise of past steps, for correlated noise (secret); None for independent noise."""
            self._coordinates = plan.sampling.coordinate_participation < 1
            self.steps = 0
            """Number of charged steps."""
            self.planned: int | None = None
            """Last step of the current call of `batches`; None without a limit."""
            self.accepted = 0
            """Number of accepted updates."""
            self.update: Tensor | None = None
            """Noisy gradient of the last step; valid until the next step."""
            self.pending_batch: Batch | None = None
            """Drawn batch that was not yet used (sensitive)."""
            self.rounding_bounded = False
            """Whether rounding errors are within their slack for the public shapes, set by `probe`."""
            self._streams: StepStreams | None = None
            self._checked: tuple[Any, ...] | None = None
            gradients = self.gradients  # a reference to the step would keep it in memory
            self._guard = WeightsGuard(
                model, optimizer, self.ledger, lambda: gradients.probed.changing_buffers
            )

    def __repr__(self) -> str:
        ledger = self.ledger.path or "in memory"
        return f"{type(self).__name__}({self.plan}, steps={self.steps}, ledger={ledger})"

    # state

    @property
    def arithmetic(self) -> Arithmetic:
        """`proved` if noise is exact and rounding errors are within their slack; else `assumed`."""
        if self.pending_batch is not None and ragged(self.pending_batch.data):
            return "assumed"
        exact = self.rounding_bounded and self.plan.noise.exact
        # removing a record changes the positions of other records, which may then round differently
        placed = self.adjacency.neighbours is not Neighbours.ADD_REMOVE
        return "proved" if exact and placed else "assumed"

    @property
    def clip_norm(self) -> float | None:
        """Current clipping norm of `Quantile`, which is public; None for other clipping rules."""
        current = self.gradients.clip_norm
        return None if current is None else float(current)

    @property
    def rounding(self) -> float:
        """Relative rounding slack on the sensitivity of the clipped sum."""
        return self.gradients.layout().rounding

    @property
    def skipped(self) -> int:
        """Number of records skipped so far because their gradients are not finite (sensitive)."""
        return self.gradients.skipped

    @property
    def size(self) -> int:
        """Current number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.trainable().values())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Currently trainable parameters, by name."""
        return trainable(self.model)

    def spent(
        self, delta: float | None = None, *, group: int = 1, neighbours: Neighbours | None = None
    ) -> Guarantee:
        """(epsilon, delta) guarantee of all charges on the ledger.

        Args:
            delta: Delta of the guarantee; by default the delta stored on the ledger by `train`.
            group: Group size, for group privacy.
            neighbours: Adjacency relation; by default the relation of the charges.

        Raises:
            LedgerError: Weights or buffers were changed outside of the step.

        Warns:
            PrivacyWarning: Some weights were also trained on another ledger.
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
        """Accept weights or buffers that were changed outside of the step, independently of the records.

        Call this method after loading, averaging or clamping weights as a function of earlier releases
        or public data. It applies to all steps on the model that share the ledger.
        """
        self.reducer.free_whole_weights()
        self._guard.adopt(self.ledger)
        self.reducer.adopt_weights()

    def reseed(self) -> None:
        """Replace the random source; repeated steps are then charged again.

        In a process group, all ranks must call this method.

        Raises:
            DataError: A batch is pending. It was drawn from the old randomness, and a second release of
                the same draw would cost more than two draws.
        """
        if self.pending_batch is not None:
            raise DataError(
                "a batch is pending, which was drawn from the old randomness: a second release of the "
                "same draw costs more than it is charged. Make the step again, load its checkpoint, and "
                "call reseed() before step.batches."
            )
        self.generator = source_for(self.device)
        self.secrecy = "secret"
        self.run = self._share_randomness()
        if self.past_noise is not None:
            # past sums in new releases would be charged twice: docs/guarantees/correlated-noise.md, 4
            self.past_noise.clear()

    def _share_randomness(self) -> str:
        """Share the random source of rank 0 with all ranks; return the name of the new run."""
        self.generator = self.reducer.shared_source(self.generator)
        run: str = self.reducer.broadcast("the name of the run", partial(secrets.token_hex, 8))
        return run

    def state_dict(self) -> dict[str, Any]:
        """State of the step for a checkpoint (secret); a step that loads it continues exactly.

        With correlated noise or sharded parameters, all ranks must call this method. With sharded
        parameters, rank 0 returns the whole state, and the other ranks return an empty state.
        """
        with self.reducer.propagate_errors():
            self.check_nothing_pending()
            self.reducer.free_whole_weights()
            return self.reducer.whole_state(state_of(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, with the ledger of its run.

        Args:
            state: Output of `state_dict` of a step with the same plan, data, optimizer, views and random
                source. In a process group, all ranks load the state of rank 0.
        """
        with self.reducer.propagate_errors():
            self.check_nothing_pending()
            self.reducer.free_whole_weights()
            load_state(self, self.reducer.broadcast("the checkpoint", lambda: state))
            self.adopt_weights()

    def check_nothing_pending(self) -> None:
        """Raise if there is a pending batch."""
        if self.pending_batch is not None:
            raise DataError(
                "a batch was drawn and not used: skipping a draw would make the sampling depend on "
                "the records. Pass every batch to the step. If a step raised, its batch comes first in "
                "the next step.batches(data)."
            )

    def overrides(self, *phases: str) -> bool:
        """Whether a subclass overrides one of the phases.

        Args:
            phases: Method names.
        """
        own = type(self)
        return own is not PrivateStep and any(
            getattr(own, name) is not getattr(PrivateStep, name) for name in phases
        )

    # before the first draw

    def probe(self, data: Data) -> int:
        """Probe the model on synthetic records, and return the physical batch size.

        Args:
            data: Data of the step. Only its shapes and types are used, unless the model rejects
                synthetic records.

        Raises:
            Unsupported: The model cannot be trained privately.
        """
        unchanged = self._guard.unchanged()
        with self.reducer.propagate_errors(), self.reducer.probing(data):
            per_unit = 1 if self.units is None else self.units.per_unit
            slots = self.reducer.slots(data)
            physical, bounded = self.gradients.probe(data, slots, per_unit, self.rule.probe)
            self.rounding_bounded = all(self.reducer.exchange("the probe", bounded))
        if unchanged:  # the probe restores all values
            self._guard.accept_writes(self.ledger)
        return physical

    def batches(
        self,
        data: Data,
        steps: int | None = None,
        present: Tensor | None = None,
        *,
        budget: Budget | None = None,
    ) -> Iterator[Batch]:
        """Draw batches; pass each batch to this step once.

        Invalid data raises an error before the first draw. If a step raised or did not run, its batch
        comes first, with the current content of its slots.

        Args:
            data: Inputs and targets with one row per slot, a map-style data set of pairs, or a
                `hush.Source`. See docs/data.md.
            steps: Number of batches, including a pending batch; by default as many as the budget allows,
                or unlimited without a budget.
            present: Mask of non-empty slots; the content of empty slots is ignored.
            budget: Maximum privacy cost of all charges on the ledger. The iterator ends before a step
                that would exceed it. `planned` is the number of the last step. The delta of the budget
                is stored for `spent()`.

        Returns:
            Iterator over batches of subsampled slots (sensitive); no batch may be skipped.
        """
        with self.reducer.propagate_errors():
            if self.earlier and self.ledger.path is not None:
                warnings.warn(
                    f"the ledger {self.ledger.path} already has {self.earlier} charges, which the "
                    "guarantee includes. Pass another path for an unrelated run, call "
                    "load_state_dict() to resume, or pass ledger=hush.Ledger(path) to combine runs.",
                    PrivacyWarning,
                    stacklevel=2,
                )
                self.earlier = 0
            self.reducer.free_whole_weights()
            self.ledger.check_adjacency(self.adjacency)
            self._checked = None
            self._check_model()
            if steps is not None:
                steps = check_count("steps", steps, "steps are counted")
            if budget is not None:
                check_delta(
                    check_kind("budget", budget, Budget).delta, self.records, self.adjacency.unit
                )
                wanted = None if steps is None else self.steps + steps
                steps = last_step(self, budget, wanted)[0] - self.steps
            data = prepare(data, present)
            filled = occupied(data, present)
            slots = self.reducer.begin(self, data, filled, steps)
            check_length(slots, self.records, self.units, self.adjacency.neighbours)
            if isinstance(data, Source):
                check_alone(data)
                if self.units is None:
                    check_distinct(data)
            if self.basis_schedule is not None:
                check_public(self.basis_schedule.public, data)
            physical_batch = self.probe(data)
            self.gradients.replay = choose_replay(self, data, physical_batch, steps)
            if isinstance(data, Source):
                data.loader.start()
            if budget is not None:
                self.ledger.store_delta(budget.delta)
            self.planned = last = None if steps is None else self.steps + steps
        return self._draw_until(last, Batch(torch.arange(0), data, physical_batch, filled))

    def stop(self) -> None:
        """Charge all planned steps of `batches`; call it before stopping early because of results.

        **Guarantee.** `spent()` then covers any stopping rule that depends on releases, e.g. on the
        accuracy of the weights: docs/guarantees/ledger.md, 13. Further steps are not charged again until
        the planned number is reached.

        Raises:
            InvalidValue: `batches` has neither `steps` nor a budget, so no number of steps was planned.
        """
        if self.planned is None:
            raise InvalidValue(
                "the run has no planned number of steps: stopping because of results has no finite "
                "privacy cost. Pass steps= or budget= to step.batches."
            )
        self.ledger.charge_planned(self.plan, self.run, self.planned)

    def _draw_until(self, last: int | None, empty: Batch) -> Iterator[Batch]:
        if self.pending_batch is not None and (last is None or self.steps < last):
            with self.reducer.propagate_errors():
                # keep the drawn slots, so the draw does not depend on the invalid record
                self.pending_batch = same_slots(self.pending_batch, empty)
            yield self.pending_batch
        while last is None or self.steps < last:
            with self.reducer.propagate_errors():
                self.check_nothing_pending()
                self.pending_batch = self.draw(empty)
            yield self.pending_batch

    def _check_model(self) -> None:
        """Check the model and the optimizer again if modules, modes or parameters have changed."""
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
        """Run one step on the current batch of `batches`.

        Args:
            batch: Current batch. If the step raises an error, it is not charged, and `batches` returns
                its batch again.

        Returns:
            Whether the update was applied: False if a selective plan rejected it. Advance a
            learning-rate scheduler only after applied updates.
        """
        with self.reducer.propagate_errors():
            if batch is None or batch is not self.pending_batch:
                what = "this batch was used before, or drawn by another step"
                if not isinstance(batch, Batch):
                    what = f"{with_article(type(batch).__name__)} is not a batch of `step.batches`"
                raise DataError(
                    f"{what}: each step needs a new draw. Loop `for batch in step.batches(data): "
                    "step(batch)`."
                )
            self.update = None  # during the step, its memory contains the sum without noise
            self.reducer.free_whole_weights()
            self._check_model()
            self._guard.check(self.ledger)
            self.ledger.check_adjacency(self.adjacency)  # another run may have charged the ledger
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
        """Subsample the slots or users (sensitive).

        An override must draw each record or user independently at the plan's rate.

        Args:
            like: Batch of the same data.
            sampling: Sampling rule; by default the sampling rule of the plan.
        """
        slots = self.reducer.slots(like.data) if self.units is None else len(self.units)
        indices = (sampling or self.plan.sampling).draw(slots, self.generator, self.steps)
        counts = None
        if self.units is not None:
            indices, counts = self.units.draw(indices.cpu(), self.generator)
        return Batch(indices, like.data, like.physical, like.present, counts)

    def clipped_sum(self, batch: Batch) -> Tensor:
        """Sum of the clipped per-sample gradients of a batch (sensitive).

        The contribution of one record lies in (1 + `rounding`) times the sensitivity set. An override
        must preserve this bound.

        Args:
            batch: Slots drawn under the plan.

        Returns:
            Flat vector in double precision, in the order of the blocks. The next sum overwrites it. In a
            process group, it is the sum over all ranks; with sharded parameters, it contains this rank's
            shards.
        """
        with self.reducer.propagate_errors():
            return self.reducer.whole_sum(self._share_sum(batch, self._mean(begin=True)))

    def _mean(self, *, begin: bool = False) -> NoisyMean:
        """Noisy mean of the current step; `begin` creates the random sources of a new step."""
        schedule, basis = self.basis_schedule, None
        if schedule is not None:
            before = schedule.current
            basis = schedule.at(self.steps, self.generator)
            if basis is not before:
                # ranks may round the basis differently, and their weights would diverge
                self.reducer.copy_of_first("the public basis", [group.basis for group in basis.groups])
        if begin or (self.reducer.processes and self._streams is None):
            self._streams = self.reducer.streams(self.generator)
        source = self._streams.noise if self._streams and self.reducer.processes else self.generator
        if self._expected[0] != self.records:
            self._expected = self.records, self.plan.sampling.expected(self.records)
        layout, expected = self.gradients.layout(), self._expected[1]
        return NoisyMean(self.plan, layout, basis, expected, source, self.past_noise, self.steps)

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

        A subclass may override this method; the audit does so to insert canaries. The contribution of a
        slot (or of all slots of a user) must depend only on these slots, the weights and independent
        randomness. It must lie in the sensitivity set of the plan, and be exactly zero for empty slots.

        Args:
            inputs: Inputs, one row per drawn slot.
            targets: Targets, one row per drawn slot.
            basis: Public basis for clipping; None: the standard basis.
            present: Mask of non-empty slots; None if no slot is empty.
            counts: Number of consecutive slots of each user; None for record-level privacy.

        Returns:
            Sum by parameter or block, and the number of skipped records (or users).
        """
        assert self._streams is not None
        parts = inputs, targets, basis, present, counts
        return self.gradients.clip(*parts, masks=self._streams.masks, mask=self.coordinate_mask())

    def coordinate_mask(self) -> CoordinateMask | None:
        """Draw a mask for coordinate sampling; None without coordinate sampling."""
        if not self._coordinates:
            return None
        local = self._streams is None or not self.reducer.processes
        source = self.generator if local or self._streams is None else self._streams.coordinates
        return partial(self.plan.sampling.mask_coordinates, generator=source)

    def private_gradient(self, batch: Batch) -> Tensor:
        """Noisy mean of the clipped per-sample gradients of a batch; charge it before using it.

        The result equals `privatize(clipped_sum(batch))`. An override must not release anything else.

        Args:
            batch: Slots drawn under the plan.

        Returns:
            Flat vector of the trainable parameters in order, in double precision. With sharded
            parameters, it contains this rank's shards.
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
        """Noisy mean of a clipped sum; charge it before using it.

        Args:
            total: Output of `clipped_sum`, which is overwritten.

        Returns:
            Flat vector of the trainable parameters in order, in double precision.
        """
        return self.reducer.privatize(total, self._mean())

    def charge(self, release: str) -> None:
        """Charge the step to the ledger; its release may be used only afterwards.

        The method is called once per step, after the draws and before the release. Do not override it.

        Args:
            release: Label or fingerprint of the release; it must be a function of the release.
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
        """Update the model by an optimizer step with a charged private gradient.

        Gradients are cleared afterwards, so another optimizer step does not apply them again. An
        override may use only released values.

        Args:
            update: Output of `private_gradient` or `privatize`.
        """
        parameters, clipping, gradient = self.gradients.laid_out, self.plan.clipping, update
        if isinstance(clipping, Quantile) and self.gradients.clip_norm is not None:
            gradient, self.gradients.clip_norm = clipping.update_of(update, self.gradients.clip_norm)
            self.reducer.copy_of_first("the clipping norm", [self.gradients.clip_norm])
        self.reducer.set_gradients(parameters, gradient)
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        self.update = update
        self._guard.adopt(self.ledger, parameters)

    def advance(self, data: Data) -> None:
        """Update the buffers that forward passes change, once per step and independently of the draw.

        Args:
            data: Data of the step; only its shapes and types are used.
        """
        if self._streams is not None:
            self.gradients.advance(data, self._streams.masks)

"""State of a private step: model, ledger, randomness and counters."""

import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hush.accounting.epsilon import rdp
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import Arithmetic, Guarantee, Neighbours, Secrecy, check_delta, check_neighbours
from hush.core.parts import Clipping, SensitivitySet
from hush.core.plan import Plan
from hush.core.randomness import SystemSource, cryptographic, derive_source, source_for
from hush.core.release import Selective
from hush.core.value import SingleOwner, check_count, check_kind
from hush.gradients.cuda_graph import Replay
from hush.gradients.losses import per_sample_loss
from hush.gradients.models import (
    ModuleTree,
    check_materialized,
    check_model,
    check_optimizer,
    is_sharded,
)
from hush.gradients.probe import Probed
from hush.gradients.tree import Views
from hush.training.checkpoint import settings_of
from hush.training.checks.released_weights import WeightsGuard, warn_of_other_ledger
from hush.training.data import Batch, Data, ragged
from hush.training.distributed.charge import open_ledger_for
from hush.training.distributed.group import propagate_errors
from hush.training.distributed.handshake import check_same_step, sharded_parameters
from hush.training.distributed.process_group import process_group
from hush.training.distributed.shares import Placement, check_shard
from hush.training.distributed.streams import StepStreams, shared_source
from hush.training.methods.public_bases import basis_schedule
from hush.training.methods.selective import check_release
from hush.training.options import Distributed, Execution, Randomness, Units
from hush.training.phases.replay_choice import check_replay
from hush.training.units import adjacency_of, public_count, units_of

if TYPE_CHECKING:
    from hush.training.distributed.sharded import ShardedParameters

_RANDOMNESS, _EXECUTION, _DISTRIBUTED = Randomness(), Execution(), Distributed()


class StepState(SingleOwner):
    """Everything that a `PrivateStep` holds; that class adds the phases of a step."""

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
            model: module to train, in place; parameters may be frozen between steps.
            loss: loss module or function of outputs and targets, one value a record.
            optimizer: takes the noisy gradients; must hold the model's parameters alone.
            plan: sampling, clipping, noise and release.
            records: number of slots of the data, which is public: the divisor of the update. Under
                `ADD_REMOVE` a public constant near it. With `units`, the number of units; None: as many
                as own the records.
            units: owners of the records, for user-level privacy; None: each record is a unit of privacy.
            neighbours: relation that is charged: docs/guarantees/neighbours.md.
            ledger: ledger to charge, or the path of one of this plan alone; None: one in memory.
            views: turns the inputs of one record into several views of it, along a new first dimension;
                its gradient is their mean, before it is clipped (hush.data.views has some for images).
            public: records that need no protection, for `Subspaces(bases=Principal(...))`; no private
                ones among them.
            randomness: source of sampling and noise.
            execution: size of physical batches and use of CUDA graphs.
            distributed: process group whose ranks run the step together.
        """
        check_kind("model", model, nn.Module)
        check_kind("distributed", distributed, Distributed)
        self.processes = process_group(distributed.processes, sharded=is_sharded(model))
        """Ranks that run the step together; None: this process alone."""
        with propagate_errors(self.processes):
            check_kind("plan", plan, Plan)
            generator = check_kind("randomness", randomness, Randomness).generator
            physical_batch = check_kind("execution", execution, Execution).physical_batch
            self._tree = ModuleTree(model)
            check_materialized(model)
            check_model(self._tree, sharded=self.processes is not None)
            check_optimizer(check_kind("optimizer", optimizer, torch.optim.Optimizer), self._tree)
            self.loss = per_sample_loss(loss)
            self.probed = Probed()
            """Properties of the model and the loss, known after `probe`."""
            self.optimizer = optimizer
            self.optimizer_settings = settings_of(optimizer)
            """Settings of the optimizer when the step was made; a resumed run begins with the same."""
            self.plan = plan
            relation = check_neighbours(neighbours)
            self.units = units_of(units, relation)
            """Owners of the records; None: each record is a unit of privacy."""
            self.adjacency = adjacency_of(self.units, relation)
            self.records = public_count(records, self.units, relation)
            """Number of units of privacy, or a public constant near it."""
            self.device = next(iter(self.trainable().values())).device
            self.dimension = self.size
            """Parameters that are trained: what a charge that grows with the dimension is for."""
            # raise for blocks of another model, and for a plan that cannot be charged
            plan.clipping.sensitivity(self.dimension)
            rdp(plan, [2.0], self.dimension if grows_with_dimension(plan) else None)
            check_release(plan, self.records)
            self.physical_batch = (
                None
                if physical_batch is None
                else check_count("physical_batch", physical_batch, "it is a number of records", 1)
            )
            """Records to work on at once; None: to be found when the data is known."""
            if views is not None and not callable(views):
                raise InvalidValue(
                    f"views={views!r} cannot be called: it is to turn one record's inputs into several. "
                    "Pass e.g. hush.data.views.flips_and_shifts(4)."
                )
            self.views = views
            self.basis_schedule = basis_schedule(model, self.loss, public, plan.clipping)
            """Public bases that gradients are clipped in; None: those of the parameters."""
            self.generator = source_for(
                self.device, generator, secure=randomness.secure, arithmetic=randomness.arithmetic
            )
            self.sharded: ShardedParameters | None = None
            """Parameters that are split over the ranks; None: every rank holds the whole model."""
            self.replay = execution.replay
            """Whether physical batches are replayed as CUDA graphs; None: where that is faster."""
            self.replayed: bool | None = None
            """Whether they are, where that was left open: known after `batches` or a checkpoint."""
            check_replay(self)
            self._replay: Replay | None = None
            self.shard = check_shard(distributed.shard, self.processes, self.units)
            """Whether each rank holds a part of the data of its own."""
            self._placed: tuple[Data, Placement] | None = None
            if self.processes is not None:
                check_same_step(self, self.processes, generator)
                self.sharded = sharded_parameters(self, self.processes)
            self.ledger = open_ledger_for(ledger, plan, self.adjacency, self.processes)
            if self.processes is not None:
                self.processes.ledger = self.ledger
            self.generator = derive_source(self.generator, self.ledger.stream_label())
            self.secrecy: Secrecy = "secret" if generator is None else "seeded"
            """Whether the stream's key came from the operating system or from a seed that was given."""
            self.run = self._share_randomness()
            self.charged_run = self.run
            """Run that the last step was charged to: another one right after `reseed`."""
            self.steps = 0
            """Steps that were charged."""
            self.accepted_trials = 0
            """Proposals that were accepted, under a selective plan."""
            self._skipped: int | Tensor = 0
            self._streams: StepStreams | None = None
            """Sources of the masks and the noise of the step at hand."""
            self._kept_sensitivity: tuple[Clipping, int, Sequence[SensitivitySet]] | None = None
            self.update: Tensor | None = None
            """Private gradient that the last step released; valid until the next step."""
            self.pending_batch: Batch | None = None
            """Batch that was drawn and not yet used (sensitive)."""
            self.rounding_bounded = False
            """Whether rounding is within what is paid for, by what is public: known after `probe`."""
            self._adopted = False
            """Whether weights were set outside of the step since ranks last compared theirs."""
            self._weights = WeightsGuard(model)
            warn_of_other_ledger(self._weights.norms, self.ledger)

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self._tree.model

    @property
    def skipped(self) -> int:
        """Records that added nothing because their gradient was not finite, so far (sensitive)."""
        return int(self._skipped)  # counted on the device: only who asks waits for it

    @skipped.setter
    def skipped(self, number: int) -> None:
        self._skipped = number

    @property
    def accepted(self) -> int:
        """Steps that moved the model."""
        return self.accepted_trials if isinstance(self.plan.release, Selective) else self.steps

    @property
    def arithmetic(self) -> Arithmetic:
        """Whether what ran so far rounded within what is paid for, under noise drawn exactly."""
        exact = cryptographic(self.generator) and self.plan.noise.exact and self.rounding_bounded
        if self.pending_batch is not None and ragged(self.pending_batch.data):
            return "assumed"
        # with one record less, others are computed at other places, and may round otherwise
        placed = self.adjacency.neighbours is not Neighbours.ADD_REMOVE
        return "proved" if exact and placed else "assumed"

    @property
    def size(self) -> int:
        """Number of trainable parameters, entry by entry, as of now."""
        return sum(parameter.numel() for parameter in self.trainable().values())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters to train, by name; which ones they are may change between steps."""
        return self._tree.trainable()

    def to_device(self, value: Tensor) -> Tensor:
        """A tensor where the model is."""
        # what comes from the CPU is on its way: the GPU is not waited for, which may be at work
        return value.to(self.device, non_blocking=self.device.type == "cuda")

    def spent(
        self, delta: float | None = None, *, group: int = 1, neighbours: Neighbours | None = None
    ) -> Guarantee:
        """(epsilon, delta) guarantee of everything on the ledger so far.

        Args:
            delta: of the guarantee; None: the one stored on the ledger, as `train` does.
            group: number of units of privacy that change together.
            neighbours: adjacency relation; None: the one that is charged.

        Returns:
            The guarantee. Raises if weights or buffers were changed outside of the step since then.
        """
        self.free_whole_weights()
        self._weights.check(self.ledger)
        checked = None if delta is None else check_delta(delta, self.records, self.adjacency.unit)
        return self.ledger.epsilon(checked, group=group, neighbours=neighbours, uncharged=self.adjacency)

    def adopt_weights(self) -> None:
        """Declare that weights or buffers were set outside of this step without looking at the records.

        It holds for all steps on the model that share the ledger. For weights that were
        loaded, averaged or clamped: functions of what was released before, or of public data.
        """
        self.free_whole_weights()
        self._weights.adopt(self.ledger)
        self._adopted = True

    def free_whole_weights(self) -> None:
        """Leave of sharded weights this rank's shards: evaluating a model keeps some of them whole."""
        if self.sharded is not None:
            self.sharded.modules.release()

    def reseed(self) -> None:
        """Draw new randomness from here on; steps taken again are then charged again.

        Of several ranks, all of them call it.
        """
        if not isinstance(self.generator, SystemSource):
            kind: Arithmetic = "proved" if cryptographic(self.generator) else "assumed"
            self.generator = source_for(self.generator.device, arithmetic=kind)
        self.secrecy = "secret"
        self.run = self._share_randomness()

    def _share_randomness(self) -> str:
        """Name of a new run, after every rank has rank 0's source of shared draws."""
        if self.processes is None:
            return secrets.token_hex(8)
        self.generator = shared_source(self.generator, self.processes)
        run: str = self.processes.broadcast_message("the name of the run", partial(secrets.token_hex, 8))
        return run

    def _check_nothing_pending(self) -> None:
        if self.pending_batch is not None:
            raise DataError(
                "a batch was drawn and not used: leaving out a draw after seeing it would make the "
                "sampling depend on the records. Pass every batch to the step; one whose step "
                "raised comes again, first of a new step.batches(data)."
            )

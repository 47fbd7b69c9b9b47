"""One private step: draw, clip, add noise, put the charge on disk, and only then move the model."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.charge import rdp
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import CheckpointError, DataError, LedgerError, Unsupported
from hush.core.guarantee import Guarantee
from hush.core.number import check_count
from hush.core.plan import Plan
from hush.core.randomness import Randomness, SystemSource, fresh_generator, random_bits, source_for
from hush.gradients.admissible import check_model, check_optimizer, per_record
from hush.gradients.per_example import record
from hush.training.batch import Batch
from hush.training.fingerprint import fingerprint
from hush.training.records import Data, count

_FACTS = {
    "plan": "plan",
    "records": "so many records,",
    "kind": "optimizer",
    "secure": "secure randomness",
}

_GRADIENT_MEMORY = 2**28
"""How many per-example gradient entries may live at once when no physical batch size is given."""


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
    ) -> None:
        check_model(model)
        check_optimizer(optimizer, model)
        self.model = model
        self.loss = per_record(loss)
        self.optimizer = optimizer
        self.plan = plan
        self.records = check_count(
            "records", records, "the divisor of the update is a public number of records", 1
        )
        self._device = next(iter(self._trainable().values())).device
        self.dimension = self._size()
        """How many numbers are trained: what a charge that grows with the dimension is for."""
        # raises for a plan that cannot be charged
        rdp(plan, [2.0], self.dimension if grows_with_dimension(plan) else None)
        self.physical_batch = (
            max(1, _GRADIENT_MEMORY // self.dimension)
            if physical_batch is None
            else check_count("physical_batch", physical_batch, "it is a number of records", 1)
        )
        self.generator = source_for(self._device, generator, secure=secure)
        self.ledger = _ledger_of(ledger, plan)
        self.run = secrets.token_hex(8)
        self.steps = 0
        self.skipped = 0
        """How many records added nothing because their gradient was not finite (sensitive)."""
        self._drawn: Batch | None = None

    def batches(self, data: Data, steps: int | None = None) -> Iterator[Batch]:
        """Draw one batch after another, each to be passed to this step once."""
        if count(data) != self.records:
            raise DataError(
                f"the data has {count(data)} records and the step was made for records="
                f"{self.records}: the divisor and the charge are for that number. Pass the same data."
            )
        last = None if steps is None else self.steps + check_count("steps", steps, "steps are counted")
        while last is None or self.steps < last:
            self._nothing_drawn()
            indices = self.plan.sampling.draw(self.records, self.generator)
            self._drawn = Batch(indices, data, self.physical_batch)
            yield self._drawn

    def __call__(self, batch: Batch) -> None:
        """Update the model from a batch that `batches` has just drawn."""
        if batch is not self._drawn:
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
        update = self._noisy_mean(batch)
        self.ledger.charge(
            self.plan,
            run=self.run,
            step=self.steps + 1,
            release=fingerprint(update.values()),
            dimension=self.dimension,
        )
        self.steps += 1
        self._drawn = None
        for name, parameter in self._trainable().items():
            parameter.grad = update[name].to(parameter.dtype)
        self.optimizer.step()

    def spent(self, delta: float) -> Guarantee:
        """The guarantee for everything on the ledger so far."""
        return self.ledger.epsilon(delta)

    def state_dict(self) -> dict[str, Any]:
        """All that a step needs to go on exactly as it would have."""
        self._nothing_drawn()
        return {
            "plan": self.plan.digest,
            "kind": type(self.optimizer).__name__,
            "records": self.records,
            "run": self.run,
            "steps": self.steps,
            "skipped": self.skipped,
            "secure": self._secure,
            "generator": None
            if isinstance(self.generator, SystemSource)
            else self.generator.get_state(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, on the ledger that was charged for it."""
        self._nothing_drawn()
        ours = {
            "plan": self.plan.digest,
            "records": self.records,
            "kind": type(self.optimizer).__name__,
            "secure": self._secure,
        }
        for name in ours:
            if state[name] != ours[name]:
                raise CheckpointError(
                    f"the checkpoint is of a run with {_FACTS[name]} {state[name]} and this one has "
                    f"{ours[name]}: it would not go on as it began. Resume with the same plan, data, "
                    "optimizer and source of randomness."
                )
        if self.ledger.last_step(state["run"]) < state["steps"]:
            raise LedgerError(
                f"the checkpoint has taken {state['steps']} steps of run {state['run']} and the ledger "
                f"{self.ledger.path} knows of {self.ledger.last_step(state['run'])}: charges are "
                "missing. Use the ledger that was written beside the checkpoint."
            )
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint is of another model: {error}") from None
        self.optimizer.load_state_dict(state["optimizer"])
        self.run, self.steps, self.skipped = state["run"], state["steps"], state["skipped"]
        if isinstance(self.generator, SystemSource):
            self.reseed()
        else:
            self.generator.set_state(state["generator"])

    def reseed(self) -> None:
        """Draw new randomness from here on; steps taken again are then charged again."""
        if not isinstance(self.generator, SystemSource):
            self.generator = fresh_generator(self.generator.device)
        self.run = secrets.token_hex(8)

    @property
    def _secure(self) -> bool:
        return isinstance(self.generator, SystemSource)

    def _nothing_drawn(self) -> None:
        """Raise while a batch is drawn and not yet used."""
        if self._drawn is not None:
            raise DataError(
                "a batch was drawn and not used: leaving out a draw after seeing it would make the "
                "sampling depend on the records. Pass every batch to the step."
            )

    def _trainable(self) -> dict[str, nn.Parameter]:
        """The parameters to train; which ones they are may change between steps."""
        return {k: v for k, v in self.model.named_parameters() if v.requires_grad}

    def _size(self) -> int:
        """How many numbers there are to train."""
        return sum(parameter.numel() for parameter in self._trainable().values())

    def _noisy_mean(self, batch: Batch) -> dict[str, Tensor]:
        total = {
            name: torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for name, parameter in self._trainable().items()
        }
        with own_randomness(self.generator):
            for inputs, targets in batch:
                tape = record(self.model, self.loss, inputs.to(self._device), targets.to(self._device))
                clipped = self.plan.clipping.clip(tape)
                self.skipped += int(clipped.skipped)
                for name, part in clipped.total.items():
                    total[name] += part
        divisor = self.plan.sampling.expected(self.records)
        return {
            name: self.plan.noise.around(
                held, norm=self.plan.clipping.unit, generator=self.generator
            ).div_(divisor)
            for name, held in total.items()
        }


@contextmanager
def own_randomness(generator: Randomness) -> Iterator[None]:
    """Let dropout and its like draw from a seed of this source instead of torch's global state."""
    seed = int(random_bits(1, generator)) & 2**62 - 1
    with torch.random.fork_rng(devices=[generator.device] if generator.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


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

"""Trials of a selective plan: propose, test both models on one fresh batch, keep or take back."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hush.core.errors import InvalidValue
from hush.core.randomness import random_bits
from hush.core.release import Selective
from hush.gradients.checks.isolation import indices_not_shown
from hush.gradients.recording import per_record_losses
from hush.gradients.tree import tree_leaves, tree_map
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.data import Batch
from hush.training.fingerprint import fingerprint
from hush.training.randomness import own_randomness
from hush.training.resume import Snapshot

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

# More hidden trials for one update than this and a run may never end.
_MOST_HIDDEN = 1_000_000
Parts = list[tuple[Any, Any, Tensor | None]]


class Trials:
    """The trials of a private step whose plan is selective.

    **Guarantee.** docs/guarantees/selective.md. A trial's charge is on disk before its test. After a
    rejection nothing is left of the proposal: weights, buffers, gradients and optimizer state are those
    before it. The work and the random numbers drawn are the same whatever the verdict.
    """

    def __init__(self, step: "PrivateStep", release: Selective) -> None:
        self._step = step
        self._release = release
        self._sampling = Poisson(rate=release.rate)
        self._noise = Gaussian(multiplier=release.multiplier)
        self.accepted = 0
        """How many proposals were accepted."""
        least, most = release.acceptance(self._sampling.expected(step.records))
        if release.most_trials > _MOST_HIDDEN:
            raise InvalidValue(
                f"a proposal is accepted with a chance between m={least:.3g} and M={most:.3g}, so that "
                f"an update could take more than {_MOST_HIDDEN:g} hidden trials: it must end with a "
                "probability that is charged. Raise the threshold or the noise of the test, or use "
                'accounting="per-trial".',
                key="threshold",
            )

    def __call__(self, batch: Batch) -> bool:
        """Run one step of the plan; return whether the model moved."""
        step = self._step
        for number in range(int(self._release.most_trials)):
            batch = step.draw(batch) if number else batch
            update = step.private_gradient(batch)
            # taken once: both models must see the very same records
            parts = [tree_map(part, step.to_device) for part in self.draw_test(batch)]
            name = self._masked_name(update, parts)
            if not number:
                step.charge(name)
            if self._kept(update, parts):
                self.accepted += 1
                return True
        return False

    def draw_test(self, batch: Batch) -> Batch:
        """Batch of slots that both models are tested on, drawn independently of the training batch."""
        drawn = self._sampling.draw(self._step.records, self._step.generator)
        return Batch(drawn, batch.data, batch.physical, batch.present)

    def _masked_name(self, update: Tensor, parts: Parts) -> str:
        """A name for the trial on the ledger that tells nothing of a proposal which may be rejected.

        The mask is uniform and used once. A trial that is repeated has the same mask, so that another
        proposal or other records under the same noise are still noticed.
        """
        mask = int(random_bits(1, self._step.generator)) % 2**64
        return f"{int(fingerprint([update, *tree_leaves(parts)]), 16) ^ mask:016x}"

    def _kept(self, update: Tensor, parts: Parts) -> bool:
        """Move the model, test it against where it was, and leave it at one of the two places."""
        step = self._step
        before = Snapshot(step.model, step.optimizer)
        try:
            step.apply(update)
            after = Snapshot(step.model, step.optimizer)
            new = self._losses(parts)
            before.restore()
            old = self._losses(parts)
            accepted = self.passes(self._number(new, old))
        except BaseException:
            before.restore()
            step.adopt_weights()
            raise
        (after if accepted else before).restore()
        step.adopt_weights()
        step.update = update if accepted else None
        return accepted

    def probe(self, inputs: Any, targets: Any) -> None:
        """Raise if the model keeps something of a record when it is evaluated."""
        with _evaluating(self._step.model):
            losses = partial(per_record_losses, self._step.model, self._step.loss)
            self._step.module_state.probe(losses, inputs, targets)

    @torch.no_grad()
    def _losses(self, parts: Parts) -> Tensor:
        """The loss of each record, in double precision, without dropout."""
        step = self._step
        step.module_state.begin()
        with _evaluating(step.model), indices_not_shown():
            values = [self._each_loss(*part) for part in parts]
        step.module_state.check()
        nothing = torch.zeros(0, dtype=torch.float64, device=step.device)
        return torch.cat([nothing, *(value.double().reshape(-1) for value in values)])

    def _each_loss(self, inputs: Any, targets: Any, present: Tensor | None) -> Tensor:
        """Loss of each record, worked out as on the tape; 0 of an empty slot, before and after."""
        with own_randomness(self._step.generator, self._step.device):
            losses = per_record_losses(self._step.model, self._step.loss, inputs, targets)
        return losses if present is None else losses.where(present, torch.zeros_like(losses))

    def _number(self, new: Tensor, old: Tensor) -> Tensor:
        """What is tested: how much the loss rose, bounded. A loss that is not finite is the worst."""
        worst = torch.full_like(new, torch.inf)
        new, old = torch.where(new.isfinite(), new, worst), torch.where(old.isfinite(), old, worst)
        rises = torch.where(new == old, torch.zeros_like(new), new - old)
        clip = self._release.clip
        if self._release.test == "summed":
            return rises.clamp(-clip, clip).sum()
        mean = rises.sum() / self._sampling.expected(self._step.records)
        # both a loss that became infinite and one that ceased to be: worst
        return torch.where(mean.isnan(), torch.full_like(mean, clip), mean).clamp(-clip, clip)

    def passes(self, number: Tensor) -> bool:
        """Noisy verdict on a bounded rise of the loss: whether the proposal is accepted."""
        release = self._release
        # more than rounding of the losses' sum, in double precision, adds to what a record may move
        unit = release.clip * (2 if release.test == "mean" else 1) * (1 + 2.0**-20)
        noisy = self._noise.privatize(number.reshape(1), norm=unit, generator=self._step.generator)
        return bool(noisy < release.threshold * release.clip)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and then the modes as they were."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_possible(release: Selective, records: int, trials: int) -> None:
    """Raise if even the best proposals would most likely all be rejected."""
    least, most = release.acceptance(release.rate * records)
    if (1 - most) ** trials > 0.5 and release.accounting == "per-trial":
        raise InvalidValue(
            f"threshold={release.threshold:g} with noise {release.multiplier:g} accepts a proposal with "
            f"a chance between m={least:.3g} and M={most:.3g}: in {trials} trials, all there "
            "are, most likely none would be accepted, and the privacy would be spent on nothing. Raise "
            "the threshold, or change the noise of the test.",
            key="threshold",
        )

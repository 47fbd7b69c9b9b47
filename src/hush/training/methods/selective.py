"""Selective release: test the model on a fresh batch before and after a proposed update."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hush.core.errors import InvalidValue
from hush.core.randomness import random_bits
from hush.core.release import Selective
from hush.gradients.probe import Probed, buffers_restored, probe
from hush.gradients.recording import per_sample_losses
from hush.gradients.tree import tree_leaves, tree_map
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.data import Batch, own_randomness
from hush.training.evaluate import evaluation_mode
from hush.training.fingerprint import fingerprint
from hush.training.rehearsal import Snapshot
from hush.training.release import EveryUpdate

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_MAX_HIDDEN_TRIALS = 1_000_000  # maximum number of hidden trials per update; more may take too long
PhysicalBatches = Sequence[tuple[Any, Any, Tensor | None, Tensor | None]]


class Trials(EveryUpdate):
    """Trials of a selective plan (DPSUR): propose an update, test it, and accept or revert it.

    **Guarantee.** See docs/guarantees/selective.md. The computation and the random draws do not depend
    on whether the update is accepted.
    """

    def __init__(self, step: "PrivateStep") -> None:
        release = step.plan.release
        assert isinstance(release, Selective)
        if release.most_trials > _MAX_HIDDEN_TRIALS:
            lowest, highest = release.acceptance(Poisson(rate=release.rate).expected(step.records))
            raise InvalidValue(
                f"a proposal is accepted with a probability between m={lowest:.3g} and M={highest:.3g}, "
                f"so an update could take more than {_MAX_HIDDEN_TRIALS:g} hidden trials. Raise the "
                'threshold or the noise of the test, or use accounting="per-trial".',
                key="threshold",
            )
        super().__init__(step)
        self.release = release
        self.sampling = Poisson(rate=release.rate)
        """Subsampling of the test batch."""
        self._noise = Gaussian(multiplier=release.multiplier)
        self._probed = Probed()
        """Properties of the model in evaluation mode."""

    def run(self, batch: Batch) -> bool:
        step = self.step
        for number in range(int(self.release.most_trials)):
            batch = step.draw(batch) if number else batch
            update = step.private_gradient(batch)
            # read the records once, to test both models on the same records
            test_batch = self.draw_test(batch)
            source = step.reducer.own_source(step.generator, "records of the test")
            drawn = step.reducer.share(test_batch).physical_batches(source)
            tested = [tree_map(part, step.gradients.to_device) for part in drawn]
            label = self.masked_fingerprint(update, tested)
            if not number:
                step.charge(label)
            before = Snapshot(step.model, step.optimizer)
            try:
                step.apply(update)
                after = Snapshot(step.model, step.optimizer)
                new = self.losses(tested)
                before.restore()
                accepted = self.noisy_verdict(self.bounded_rise(new, self.losses(tested)))
                (after if accepted else before).restore()
            except BaseException:
                before.restore()
                raise
            finally:
                step.adopt_weights()
            step.update = update if accepted else None
            if accepted:
                return True
        return False

    def draw_test(self, batch: Batch) -> Batch:
        """Draw the test batch for both models, independently of the training batch."""
        return self.step.draw(batch, self.sampling)

    def masked_fingerprint(self, update: Tensor, tested: PhysicalBatches) -> str:
        """Label of the trial on the ledger; a uniform mask hides a proposal that may be rejected.

        Each trial has a fresh mask. A repeated trial has the same mask, so the ledger still detects a
        different proposal, or different records, under the same noise.
        """
        mask = int(random_bits(1, self.step.generator)) % 2**64
        own = fingerprint([update, *tree_leaves(tested)])
        return f"{int(self.step.reducer.trial_name(update, own), 16) ^ mask:016x}"

    def probe(self, inputs: Any, targets: Any) -> None:
        with evaluation_mode(self.step.model):
            self._probed = probe(self.step.model, self.step.gradients.loss, inputs, targets)

    @torch.no_grad()
    def losses(self, tested: PhysicalBatches) -> Tensor:
        """Losses at the current weights, in double precision, without dropout (sensitive).

        There is one loss per record, which is 0 for an empty slot. For user-level privacy, there is one
        mean loss per user.
        """
        step, probed = self.step, (self.step.gradients.probed, self._probed)
        source = step.reducer.own_source(step.generator, "losses of the test")
        model, loss = step.gradients.model, step.gradients.loss
        one_by_one = any(each.one_by_one for each in probed)
        changing = {name for each in probed for name in each.changing_buffers}
        values = [torch.zeros(0, dtype=torch.float64, device=step.device)]
        with buffers_restored(step.model, tuple(changing)), evaluation_mode(step.model):
            for inputs, targets, present, counts in tested:
                with own_randomness(source, step.device):
                    losses = per_sample_losses(model, loss, inputs, targets, one_by_one=one_by_one)
                filled = torch.ones_like(losses, dtype=torch.bool) if present is None else present
                losses = losses.double().where(filled, 0.0)
                if counts is not None:
                    sizes = counts.tolist()
                    pairs = zip(losses.split(sizes), filled.split(sizes), strict=True)
                    losses = torch.stack([own.sum() / kept.sum().clamp(min=1) for own, kept in pairs])
                values.append(losses.reshape(-1))
        return torch.cat(values)

    def bounded_rise(self, new: Tensor, old: Tensor) -> Tensor:
        """Clipped increase of the loss over all ranks (sensitive); the maximum increase if it is NaN."""
        new, old = (losses.where(losses.isfinite(), torch.inf) for losses in (new, old))
        rises = (new - old).where(new != old, 0.0)
        clip = self.release.clip
        own = rises.clamp(-clip, clip).sum() if self.release.test == "summed" else rises.sum()
        shares = self.step.reducer.exchange("the test", float(own))
        # sum in the order of ranks, to get equal results on all ranks
        total = own.new_tensor(math.fsum(shares) if all(map(math.isfinite, shares)) else sum(shares))
        if self.release.test == "summed":
            return total
        mean = total / self.sampling.expected(self.step.records)
        # NaN (sum of infinite increases and decreases) counts as the largest increase
        return mean.where(~mean.isnan(), clip).clamp(-clip, clip)

    def noisy_verdict(self, rise: Tensor) -> bool:
        """Whether the noisy clipped increase of the loss is below the threshold."""
        release = self.release
        # the slack covers the rounding of the sum in double precision
        sensitivity = release.clip * (2 if release.test == "mean" else 1) * (1 + 2.0**-20)
        noisy = self._noise.privatize(rise.reshape(1), norm=sensitivity, generator=self.step.generator)
        return bool(noisy < release.threshold * release.clip)

    def check_possible(self, steps: int) -> None:
        release = self.release
        lowest, highest = release.acceptance(release.rate * self.step.records)
        if (1 - highest) ** steps > 0.5 and release.accounting == "per-trial":
            raise InvalidValue(
                f"threshold={release.threshold:g} with noise {release.multiplier:g} accepts a proposal "
                f"with a probability between m={lowest:.3g} and M={highest:.3g}: {steps} trials "
                "would most likely all be rejected. Raise the threshold, or change the noise of the "
                "test.",
                key="threshold",
            )

    def describe(self) -> dict[str, int]:
        return {"accepted": self.step.accepted} if self.release.accounting == "per-trial" else {}

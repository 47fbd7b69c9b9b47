"""Checks that the noise of a private step has the law that is charged: exact p-values, for a test suite.

Each takes a step as it is and data that need no protection: nothing here is charged for as a release.
A check that passes says that nothing was found at this size; docs/guarantees/audit.md says what can be.
Beside it: `draws` checks subsampling, `step` sensitivity and charges, `selective` its trials.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hush.audit.checks import p_values
from hush.audit.checks.p_values import Array
from hush.audit.checks.units import batch_of_units, number_of_units, public_divisor
from hush.clipping import Subspaces
from hush.core.errors import Unsupported
from hush.core.parts import Noise
from hush.core.randomness import SystemSource
from hush.core.release import Selective
from hush.core.value import check_count
from hush.training.checks.rehearsal import rehearsal
from hush.training.data import Batch, Data
from hush.training.step import PrivateStep

LEVEL = 1e-6
"""A check fails below this p-value: of a million that should pass, one fails by chance."""
_REPEATS = 8


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of a check: its p-value if the step does what is charged."""

    name: str
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= LEVEL


@dataclass(frozen=True, kw_only=True)
class ObservedNoise:
    """Noise in each noisy sum of some steps, in units of its scale."""

    noise: Array
    """A row for each step."""
    exponent: float
    """Its density is proportional to exp(-|x|^exponent)."""


@dataclass(frozen=True, kw_only=True)
class NoiseLaw:
    """Law of the noise that is added to a clipped sum: density ~ exp(-(|x| / scale)^exponent)."""

    exponent: float
    scales: Array
    """One for each coordinate."""


def observe(step: PrivateStep, data: Data, steps: int) -> ObservedNoise:
    """Noise of some steps, in units of its scale; the model moves as it would.

    Args:
        step: as it is. One whose randomness has no state (`secure`) must draw nothing but records and
            noise.
        data: as many records as the step is for, that need no protection.
        steps: to run, two at least.
    """
    check_count("steps", steps, "one step says nothing of another", at_least=2)
    law = noise_of(step)
    if isinstance(step.plan.release, Selective):
        raise Unsupported(
            "a selective step shows accepted proposals only, whose noise is not that of all of them. "
            "Check its noise with noise_at_any_size."
        )
    noise = []
    for batch in step.batches(data, steps=steps):
        total = sum_before_noise(step, batch)
        step(batch)
        assert step.update is not None
        noise.append(_noise(step, batch, step.update, total, law))
    return ObservedNoise(noise=np.array(noise), exponent=law.exponent)


def observe_proposals(step: PrivateStep, batches: list[Batch]) -> ObservedNoise:
    """Noise of the private gradients of some batches; nothing is charged, and nothing moves.

    Args:
        step: as it is.
        batches: of data that need no protection.
    """
    law, noise = noise_of(step), []
    with rehearsal(step):
        for batch in batches:
            total = sum_before_noise(step, batch)
            noise.append(_noise(step, batch, step.private_gradient(batch), total, law))
    return ObservedNoise(noise=np.array(noise), exponent=law.exponent)


def noise_scale(observed: ObservedNoise) -> Check:
    """Whether the noise scale is the one charged: the sum of |x|^exponent has a gamma law, exactly.

    Args:
        observed: noise of some steps.
    """
    total = float((np.abs(observed.noise) ** observed.exponent).sum())
    return Check(
        name="noise scale", p_value=p_values.gamma_tails(total, observed.noise.size, observed.exponent)
    )


def noise_at_any_size(
    step: PrivateStep, data: Data, repeats: int = _REPEATS, sizes: Sequence[int] | None = None
) -> Check:
    """Whether the noise scale is the one charged at any batch size: `noise_scale` at each.

    Args:
        step: as it is; nothing is charged, and nothing moves.
        data: of as many records as the step is for.
        repeats: private gradients at each size.
        sizes: numbers of units drawn; nobody, one, half of them and all by default.
    """
    check_count("repeats", repeats, "they are counted", at_least=1)
    units, by_size = number_of_units(step, data), []
    with rehearsal(step):
        physical = step.probe(data)
        for size in (0, 1, units // 2, units) if sizes is None else sizes:
            batch = batch_of_units(step, torch.arange(size), data, physical)
            by_size.append(noise_scale(observe_proposals(step, [batch] * repeats)).p_value)
    return Check(name="noise at any batch size", p_value=p_values.bonferroni(np.array(by_size)))


def noise_law(observed: ObservedNoise) -> Check:
    """Whether the noise has the law that is charged, in each coordinate and together.

    Args:
        observed: noise of some steps.
    """
    totals = (np.abs(observed.noise) ** observed.exponent).sum(0)
    law = stats.gamma(len(observed.noise) / observed.exponent)
    by_coordinate = p_values.bonferroni(np.minimum(1.0, 2 * np.minimum(law.cdf(totals), law.sf(totals))))
    pooled = float(stats.kstest(observed.noise.ravel(), stats.gennorm(observed.exponent).cdf).pvalue)
    return Check(name="law of the noise", p_value=p_values.bonferroni(np.array([by_coordinate, pooled])))


def noise_fresh(observed: ObservedNoise) -> Check:
    """Whether the noise is independent across coordinates and steps, at every distance.

    Args:
        observed: noise of some steps; a repeat after k steps shows in more than k of them.
    """
    return Check(name="fresh noise", p_value=p_values.repeats(observed.noise))


def sum_before_noise(step: PrivateStep, batch: Batch) -> Tensor:
    """Clipped sum that the next private gradient of this batch adds noise to, on the CPU.

    The step's randomness is put back, so that dropout, coins and masks are those of the step.
    """
    source = step.generator
    if isinstance(source, SystemSource):
        return _whole(step, step.clipped_sum(batch))
    state, skipped = source.get_state(), step.skipped
    total = _whole(step, step.clipped_sum(batch))
    source.set_state(state)
    step.skipped = skipped
    return total


def observable(step: PrivateStep) -> bool:
    """Whether the noise of a step is the difference of what it releases and a clipped sum."""
    return not _in_bases(step) and all(noise.exponential_power(1.0) for noise, _ in _noises(step))


def noise_of(step: PrivateStep) -> NoiseLaw:
    """Law of the noise on a clipped sum; raises where noise is not added to one."""
    if _in_bases(step):
        raise Unsupported(
            "with public bases a sum is not in the coordinates that are released, so that the noise is "
            "not their difference. Check the plan with hush.audit.mechanisms.whole_steps.audit_steps."
        )
    exponents, scales = set(), []
    blocks = step.plan.clipping.sensitivity(step.size)
    for block, (noise, norm) in zip(blocks, _noises(step), strict=True):
        law = noise.exponential_power(1.0)
        if law is None:
            raise Unsupported(
                f"{type(noise).__name__} is not added to the sum, so there is no noise to look at "
                "apart from it. Check the plan with hush.audit.mechanisms.distinguisher.audit."
            )
        exponents.add(law[0])
        # what rounding may add to a record's share is hidden by as much more noise
        scales.append(np.full(block.dimension or step.size, law[1] * norm / (1 - step.rounding)))
    return NoiseLaw(exponent=exponents.pop(), scales=np.concatenate(scales))


def _noises(step: PrivateStep) -> list[tuple[Noise, float]]:
    """Noise and norm of each block of the clipping."""
    clipping = step.plan.clipping
    return step.plan.noise.per_block(clipping.sensitivity(step.size), clipping.reference_norm)


def _whole(step: PrivateStep, vector: Tensor) -> Tensor:
    """A copy of a step's vector on the CPU; of shards, those of all ranks one after another."""
    if step.sharded is None:
        return vector.cpu().clone()
    assert step.processes is not None
    return torch.cat(step.processes.gather("the shards of a vector", vector.cpu()))


def _in_bases(step: PrivateStep) -> bool:
    clipping = step.plan.clipping
    return isinstance(clipping, Subspaces) and clipping.bases is not None


def _noise(step: PrivateStep, batch: Batch, update: Tensor, total: Tensor, law: NoiseLaw) -> Array:
    noisy = _whole(step, update) * public_divisor(step, batch.data)
    return np.asarray((noisy - total).numpy() / law.scales)

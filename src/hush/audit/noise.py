"""Checks that the noise of a private step has the law that is charged: docs/guarantees/audit.md."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hush.audit.draws import Array, Check, batch_of_units, bonferroni, number_of_units
from hush.clipping import Subspaces
from hush.core.errors import Unsupported
from hush.core.guarantee import Neighbours
from hush.core.randomness import SystemSource
from hush.core.release import Selective
from hush.training.data import Batch, Data
from hush.training.rehearsal import rehearsal
from hush.training.step import PrivateStep

_REPEATS = 8
_EXTREME = 1000


@dataclass(frozen=True, kw_only=True)
class ObservedNoise:
    """Noise in the noisy sums of some steps, in units of its scale."""

    noise: Array
    """A row for each step."""
    exponent: float
    """Its density is proportional to exp(-|x|^exponent)."""


def observe(step: PrivateStep, data: Data, steps: int) -> ObservedNoise:
    """Run some steps, and measure the noise in units of its scale; the model moves as usual.

    Args:
        step: Private step. With `secure`, it must draw no random numbers but records and noise.
        data: Records that the step is for, which need no protection.
        steps: Number of steps, at least two.
    """
    if isinstance(step.plan.release, Selective):
        raise Unsupported(
            "A selective step shows accepted proposals only, whose noise has another law. Check its "
            "noise with noise_at_any_size."
        )

    def update(batch: Batch) -> Tensor:
        step(batch)
        assert step.update is not None
        return step.update

    return _observed(step, step.batches(data, steps=steps), update)


def observe_proposals(step: PrivateStep, batches: list[Batch]) -> ObservedNoise:
    """Measure the noise of the private gradients of some batches; the step is left unchanged."""
    with rehearsal(step):
        return _observed(step, batches, step.private_gradient)


def _observed(
    step: PrivateStep, batches: Iterable[Batch], update: Callable[[Batch], Tensor]
) -> ObservedNoise:
    """Difference of the noisy sum that follows from each update and the sum before noise."""
    exponent, scales = _noise_law_of(step)
    private, rows = step.adjacency.neighbours is Neighbours.ADD_REMOVE, []
    for batch in batches:
        # a public number of units is counted here, so a step with another divisor fails
        units = step.records if private else number_of_units(step, batch.data)
        total = sum_before_noise(step, batch)
        noisy = _whole(step, update(batch)) * step.plan.sampling.expected(units)
        rows.append((noisy - total).numpy() / scales)
    return ObservedNoise(noise=np.array(rows), exponent=exponent)


def noise_scale(observed: ObservedNoise) -> Check:
    """Check the noise scale: the sum of |x|^exponent has a gamma law, exactly."""
    total = float((np.abs(observed.noise) ** observed.exponent).sum())
    law = stats.gamma(observed.noise.size / observed.exponent)
    return Check(name="noise scale", p_value=bonferroni([law.cdf(total), law.sf(total)]))


def noise_at_any_size(
    step: PrivateStep, data: Data, repeats: int = _REPEATS, sizes: Sequence[int] | None = None
) -> Check:
    """Check the noise scale at several numbers of units drawn; None: none, one, half of them and all."""
    units, by_size = number_of_units(step, data), []
    with rehearsal(step):
        physical = step.probe(data)
        for size in (0, 1, units // 2, units) if sizes is None else sizes:
            batch = batch_of_units(step, size, data, physical)
            by_size.append(noise_scale(observe_proposals(step, [batch] * repeats)).p_value)
    return Check(name="noise at any batch size", p_value=bonferroni(by_size))


def noise_law(observed: ObservedNoise) -> Check:
    """Check the law of the noise, for each coordinate and for all together."""
    totals = (np.abs(observed.noise) ** observed.exponent).sum(0)
    law = stats.gamma(len(observed.noise) / observed.exponent)
    by_coordinate = bonferroni([law.cdf(totals), law.sf(totals)])
    pooled = float(stats.kstest(observed.noise.ravel(), stats.gennorm(observed.exponent).cdf).pvalue)
    return Check(name="law of the noise", p_value=bonferroni([by_coordinate, pooled]))


def noise_fresh(observed: ObservedNoise) -> Check:
    """Check that the noise is independent across coordinates and steps, at every distance.

    For any symmetric law the products of signs of entries at one distance, along a step and between
    steps, are independent fair coins. A repeat after k steps shows in more than k of them.
    """
    noise = observed.noise
    steps, numbers = noise.shape
    # a Fourier transform computes all distances at once; zeros keep it from wrapping around
    shape = 2 * steps, 2 * numbers
    spectrum = np.fft.rfft2(np.where(noise < 0, -1.0, 1.0), shape)
    products = np.fft.irfft2(np.abs(spectrum) ** 2, shape)[:steps]
    lag = np.arange(2 * numbers)
    along = np.minimum(lag, 2 * numbers - lag)
    pairs = np.maximum(steps - np.arange(steps)[:, None], 0) * np.maximum(numbers - along, 0)
    pairs[0, 0] = 0  # each number with itself
    pairs[0, numbers:] = 0  # within a row a distance and its opposite are the same pairs
    compared = pairs > 0
    excess, thrown = products[compared].round(), pairs[compared]
    # exact p-values of the most extreme distances; the others count in the correction
    extreme = np.argsort(excess**2 / thrown)[-_EXTREME:]
    heads, law = (excess + thrown)[extreme] / 2, stats.binom(thrown[extreme], 0.5)
    tail = np.minimum(law.cdf(heads), law.sf(heads - 1)).min(initial=0.5)
    return Check(name="fresh noise", p_value=min(1.0, float(2 * thrown.size * tail)))


def sum_before_noise(step: PrivateStep, batch: Batch) -> Tensor:
    """Clipped sum to which the next private gradient of this batch adds noise, on the CPU.

    Restores the state of the randomness, so the step repeats dropout, coins and masks.
    """
    source = step.generator
    if isinstance(source, SystemSource):
        return _whole(step, step.clipped_sum(batch))
    state, skipped = source.get_state(), step.skipped
    total = _whole(step, step.clipped_sum(batch))
    source.set_state(state)
    step.gradients.skipped = skipped
    return total


def observable(step: PrivateStep) -> bool:
    """Whether the noise of a step is the difference of its release and a clipped sum."""
    try:
        return bool(_noise_law_of(step))
    except Unsupported:
        return False


def _noise_law_of(step: PrivateStep) -> tuple[float, Array]:
    """Exponent and scales of the density exp(-(|x| / scale)^exponent) of noise added to a sum."""
    if isinstance(step.plan.clipping, Subspaces) and step.plan.clipping.bases is not None:
        raise Unsupported(
            "With public bases the clipped sum is not in the coordinates of the release, so their "
            "difference is not the noise. hush_recipes.audit.whole_steps.attack_steps audits such plans."
        )
    exponents, scales, clipping = set(), [], step.plan.clipping
    blocks = clipping.sensitivity(step.size)
    noises = step.plan.noise.per_block(blocks, clipping.reference_norm)
    for block, (noise, norm) in zip(blocks, noises, strict=True):
        law = noise.exponential_power(1.0)
        if law is None:
            raise Unsupported(
                f"{type(noise).__name__} is not added to the sum, so it cannot be separated from it. "
                "`hush_recipes.audit.distinguisher.audit` audits such plans."
            )
        exponents.add(law[0])
        # more noise covers the rounding of a record's share
        scales.append(np.full(block.dimension or step.size, law[1] * norm / (1 - step.rounding)))
    return exponents.pop(), np.concatenate(scales)


def _whole(step: PrivateStep, vector: Tensor) -> Tensor:
    """Copy of a step's vector on the CPU, with the shards of all ranks."""
    if step.reducer.modules.sharded:
        return torch.cat(step.reducer.gather("the shards of a vector", vector.cpu()))
    return vector.cpu().clone()

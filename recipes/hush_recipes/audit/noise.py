"""Checks of the noise of a private step: docs/guarantees/audit.md."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hush.clipping import Subspaces
from hush.core.errors import Unsupported
from hush.core.guarantee import Neighbours
from hush.core.release import Selective
from hush.training.data import Batch, Data
from hush.training.rehearsal import rehearsal
from hush.training.step import PrivateStep
from hush_recipes.audit.draws import Array, Check, batch_of_units, bonferroni, number_of_units

_REPEATS = 8
_EXTREME = 1000


@dataclass(frozen=True, kw_only=True)
class ObservedNoise:
    """Noise of several steps, in units of its scale."""

    noise: Array
    """A row per step."""
    exponent: float
    """Exponent of the density, which is proportional to exp(-|x|^exponent)."""


def observe(step: PrivateStep, data: Data, steps: int) -> ObservedNoise:
    """Run several steps and measure their noise; the model is updated.

    Args:
        step: Private step.
        data: Records without protection, with which the step was made.
        steps: Number of steps, at least two.
    """
    if isinstance(step.plan.release, Selective):
        raise Unsupported(
            "A selective step releases accepted proposals only, which changes the law of the noise. "
            "Use noise_at_any_size."
        )

    def update(batch: Batch) -> Tensor:
        step(batch)
        assert step.update is not None
        return step.update

    return _observed(step, step.batches(data, steps=steps), update)


def observe_proposals(step: PrivateStep, batches: list[Batch]) -> ObservedNoise:
    """Measure the noise of the private gradients of batches; the step is unchanged."""
    with rehearsal(step):
        return _observed(step, batches, step.private_gradient)


def _observed(
    step: PrivateStep, batches: Iterable[Batch], update: Callable[[Batch], Tensor]
) -> ObservedNoise:
    """Difference between the noisy sum of each update and the sum before noise."""
    exponent, scales = _noise_law_of(step)
    private, rows = step.adjacency.neighbours is Neighbours.ADD_REMOVE, []
    for batch in batches:
        # counts the data, so that a step with a wrong divisor fails
        units = step.records if private else number_of_units(step, batch.data)
        total = sum_before_noise(step, batch)
        carried = torch.zeros_like(total)
        if step.past_noise is not None and step.past_noise.vectors.numel():
            carried = step.past_noise.carried(step.steps).cpu()
        noisy = _whole(step, update(batch)) * step.plan.sampling.expected(units)
        # correlated noise w_t as the independent z_t = c_0 w_t + c_1 w_{t-1} + ...
        own = step.plan.noise.correlation[0] * (noisy - total) + carried / (1 - step.rounding)
        rows.append(own.numpy() / scales)
    return ObservedNoise(noise=np.array(rows), exponent=exponent)


def noise_scale(observed: ObservedNoise) -> Check:
    """Check the noise scale: the sum of |x|^exponent has a gamma law, exactly."""
    total = float((np.abs(observed.noise) ** observed.exponent).sum())
    law = stats.gamma(observed.noise.size / observed.exponent)
    return Check(name="noise scale", p_value=bonferroni([law.cdf(total), law.sf(total)]))


def noise_at_any_size(
    step: PrivateStep, data: Data, repeats: int = _REPEATS, sizes: Sequence[int] | None = None
) -> Check:
    """Check the noise scale at several batch sizes (by default 0, 1, half and all records)."""
    units, by_size = number_of_units(step, data), []
    with rehearsal(step):
        physical = step.probe(data)
        for size in (0, 1, units // 2, units) if sizes is None else sizes:
            batch = batch_of_units(step, size, data, physical)
            by_size.append(noise_scale(observe_proposals(step, [batch] * repeats)).p_value)
    return Check(name="noise at any batch size", p_value=bonferroni(by_size))


def noise_law(observed: ObservedNoise) -> Check:
    """Check the distribution of the noise, by coordinate and pooled."""
    totals = (np.abs(observed.noise) ** observed.exponent).sum(0)
    law = stats.gamma(len(observed.noise) / observed.exponent)
    by_coordinate = bonferroni([law.cdf(totals), law.sf(totals)])
    pooled = float(stats.kstest(observed.noise.ravel(), stats.gennorm(observed.exponent).cdf).pvalue)
    return Check(name="noise distribution", p_value=bonferroni([by_coordinate, pooled]))


def noise_fresh(observed: ObservedNoise) -> Check:
    """Check that the noise is independent across coordinates and steps, at every distance.

    For symmetric noise, the products of signs at a fixed distance, within a step and between steps, are
    independent fair coins. Noise that repeats after k steps changes many of them.
    """
    noise = observed.noise
    steps, numbers = noise.shape
    # all distances by FFT, with zero padding against wrap-around
    shape = 2 * steps, 2 * numbers
    spectrum = np.fft.rfft2(np.where(noise < 0, -1.0, 1.0), shape)
    products = np.fft.irfft2(np.abs(spectrum) ** 2, shape)[:steps]
    lag = np.arange(2 * numbers)
    along = np.minimum(lag, 2 * numbers - lag)
    pairs = np.maximum(steps - np.arange(steps)[:, None], 0) * np.maximum(numbers - along, 0)
    pairs[0, 0] = 0  # pairs of a number with itself
    pairs[0, numbers:] = 0  # within a row, opposite distances give the same pairs
    compared = pairs > 0
    excess, thrown = products[compared].round(), pairs[compared]
    # exact p-values of the most extreme distances, corrected for all distances
    extreme = np.argsort(excess**2 / thrown)[-_EXTREME:]
    heads, law = (excess + thrown)[extreme] / 2, stats.binom(thrown[extreme], 0.5)
    tail = np.minimum(law.cdf(heads), law.sf(heads - 1)).min(initial=0.5)
    return Check(name="noise independence", p_value=min(1.0, float(2 * thrown.size * tail)))


def sum_before_noise(step: PrivateStep, batch: Batch) -> Tensor:
    """Clipped sum behind the next private gradient of this batch, on the CPU.

    Restores the random state, so that the step repeats dropout, coins and masks.
    """
    source = step.generator
    state, skipped = source.get_state(), step.skipped
    total = _whole(step, step.clipped_sum(batch))
    source.set_state(state)
    step.gradients.skipped = skipped
    return total


def observable(step: PrivateStep) -> bool:
    """Whether the noise of a step is the difference between its release and a clipped sum."""
    try:
        return bool(_noise_law_of(step))
    except Unsupported:
        return False


def _noise_law_of(step: PrivateStep) -> tuple[float, Array]:
    """Exponent and scales of the density exp(-(|x| / scale)^exponent) of noise added to a sum."""
    if isinstance(step.plan.clipping, Subspaces) and step.plan.clipping.bases is not None:
        raise Unsupported(
            "With public bases the clipped sum and the release have different coordinates, so the "
            "noise is unknown. hush_recipes.audit.whole_steps.attack_steps audits such plans."
        )
    if step.past_noise is not None and step.reducer.size > 1:
        raise Unsupported(
            "With correlated noise each rank has the past noise of its own slice. Audit the plan in one "
            "process."
        )
    exponents, scales, clipping = set(), [], step.plan.clipping
    blocks = clipping.sensitivity(step.size)
    noises = step.plan.noise.per_block(blocks, clipping.reference_norm)
    for block, (noise, norm) in zip(blocks, noises, strict=True):
        law = noise.exponential_power(1.0)
        if law is None:
            raise Unsupported(
                f"{type(noise).__name__} is not additive, so it cannot be separated from the sum. "
                "`hush_recipes.audit.distinguisher.audit` audits such plans."
            )
        exponents.add(law[0])
        # additional noise covers the rounding of sums
        scales.append(np.full(block.dimension or step.size, law[1] * norm / (1 - step.rounding)))
    return exponents.pop(), np.concatenate(scales)


def _whole(step: PrivateStep, vector: Tensor) -> Tensor:
    """Copy of a step's vector on the CPU, with the shards of all ranks."""
    if step.reducer.modules.sharded:
        return torch.cat(step.reducer.gather("the shards of a vector", vector.cpu()))
    return vector.cpu().clone()

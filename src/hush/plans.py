"""Named plans: published methods, with the hyperparameters of their papers as defaults.

Keyword arguments override hyperparameters, and `hush.calibrate` computes the noise for a budget. Default
sampling rates are the papers' batch sizes divided by their numbers of records.

>>> from hush import plans
>>> print(plans.NAMES["dpsgd"].summary)
DP-SGD: Poisson sampling, l2 clipping, Gaussian noise.
>>> plans.dpsgd(rate=0.02).sampling
Poisson(rate=0.02)
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hush.clipping import L2, L2Linf, Linf, Lp, Principal, Subspaces
from hush.core.errors import InvalidValue
from hush.core.parts import Sampling
from hush.core.plan import Plan
from hush.core.release import Accounting, Selective, Test
from hush.noise import Banded, Gaussian, GeneralizedGaussian, Rectified, StochasticSign, Truncated
from hush.sampling import CyclicPoisson, FullBatch, Poisson, Twice


@dataclass(frozen=True, kw_only=True)
class NamedPlan:
    """Function that returns a plan, and the reference for its method."""

    make: Callable[..., Plan]
    paper: str

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.make) or "").partition("\n")[0]


_RANKS = (250, 500, 1000, 1500)
_ABADI = (
    "M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang, Deep Learning "
    "with Differential Privacy, CCS 2016, arXiv 1607.00133"
)
_DPSUR = (
    "J. Fu, Q. Ye, H. Hu, Z. Chen, L. Wang, K. Wang, X. Ran, DPSUR: Accelerating Differentially Private "
    "Stochastic Gradient Descent Using Selective Update and Release, VLDB 2024, arXiv 2311.14056"
)
_TWICE = (
    "H. Xiao, J. Wan, S. Devadas, Geometry of Sensitivity: Twice Sampling and Hybrid Clipping in "
    "Differential Privacy with Optimal Gaussian Noise and Application to Deep Learning, CCS 2023, arXiv "
    "2309.02672"
)
_BETA = (
    "R. Rinberg, I. Shumailov, V. Singhal, R. Cummings, N. Papernot, Beyond Laplace and Gaussian: "
    "Exploring the Generalized Gaussian Mechanism for Private Machine Learning, arXiv 2506.12553 "
    "(version 1, 2025; version 2, April 2026, limits DP-SGD to beta in [1, 2])"
)
_BOUNDED = (
    "S. Hu, S. Mahloujifar, V. Smith, K. Chaudhuri, C. Guo, Privacy Amplification for the Gaussian "
    "Mechanism via Bounded Support, 2024, arXiv 2403.05598"
)
_BANDED = (
    "C. A. Choquette-Choo, A. Ganesh, R. McKenna, H. B. McMahan, K. Rush, A. Thakurta, Z. Xu, "
    "(Amplified) Banded Matrix Factorization: A unified approach to private training, NeurIPS 2023, "
    "arXiv 2306.08153"
)
_SIGN = (
    "R. Jin, Y. Huang, X. He, H. Dai, T. Wu, Stochastic-Sign SGD for Federated Learning with "
    f"Theoretical Guarantees, 2020, arXiv 2002.10940; accounting: {_BOUNDED}"
)


def dpsgd(*, rate: float = 0.01, clip_norm: float = 4.0, multiplier: float = 4.0) -> Plan:
    """DP-SGD: Poisson sampling, l2 clipping, Gaussian noise.

    Defaults: MNIST, lots of 600 of 60,000 records, medium noise (Abadi et al. 2016, section 5.2).

    Args:
        rate: Sampling rate.
        clip_norm: l2 clipping norm.
        multiplier: Noise multiplier.
    """
    return Plan(sampling=_sampling(rate), clipping=L2(clip_norm), noise=Gaussian(multiplier))


def dpsur(
    *,
    rate: float = 2048 / 60_000,
    clip_norm: float = 0.1,
    multiplier: float = 2.15,
    test_rate: float = 256 / 60_000,
    test_clip: float = 0.001,
    test_multiplier: float = 0.8,
    threshold: float = -1.0,
    test: Test = "mean",
    accounting: Accounting = "per-trial",
) -> Plan:
    """DPSUR: release an update if a noisy test accepts it; every trial is accounted for.

    Defaults: Fashion-MNIST at epsilon 3 (Fu et al. 2024, section 6.1.3 and Table 1; batch size and
        training noise as in the authors' runs). The paper tests the mean loss; the summed test needs
        less noise. See `Selective` for the arguments of the test.

    Args:
        rate: Sampling rate of training.
        clip_norm: l2 clipping norm.
        multiplier: Noise multiplier of training.
    """
    release = Selective(
        rate=test_rate,
        clip=test_clip,
        multiplier=test_multiplier,
        threshold=threshold,
        test=test,
        accounting=accounting,
    )
    clipping, noise = L2(clip_norm), Gaussian(multiplier)
    return Plan(sampling=_sampling(rate), clipping=clipping, noise=noise, release=release)


def dpsur_published(
    *,
    rate: float = 2048 / 60_000,
    clip_norm: float = 0.1,
    multiplier: float = 2.15,
    test_rate: float = 256 / 60_000,
    test_clip: float = 0.001,
    test_multiplier: float = 0.8,
    threshold: float = -1.0,
) -> Plan:
    """DPSUR with the paper's accounting, which ignores rejected updates; not a guarantee.

    A step is an accepted update. The arguments are those of `dpsur`.

    Args:
        rate: Sampling rate of training.
        clip_norm: l2 clipping norm.
        multiplier: Noise multiplier of training.
    """
    return dpsur(
        rate=rate,
        clip_norm=clip_norm,
        multiplier=multiplier,
        test_rate=test_rate,
        test_clip=test_clip,
        test_multiplier=test_multiplier,
        threshold=threshold,
        accounting="published",
    )


def twice(
    *,
    rate: float = 0.06,
    coordinate_rate: float = 1 / 3,
    clip_norm: float = 1.0,
    cap: float | None = None,
    multiplier: float = 1.61,
) -> Plan:
    """Twice sampling: sampling of records and of coordinates, with clipping in two norms.

    Defaults: ResNet22 on CIFAR-10 at epsilon 2 in 1,500 steps (Xiao et al. 2023, Table 1, first row;
    norms from section 6). The noise is calibrated by hush.

    Args:
        rate: Sampling rate of records.
        coordinate_rate: Sampling rate of coordinates, rounded to a multiple of 1/256.
        clip_norm: l2 clipping norm.
        cap: Bound on each entry, in the same unit as `clip_norm`; by default a tenth of `clip_norm`.
        multiplier: Noise multiplier.
    """
    cap = clip_norm / 10 if cap is None else cap
    clipping, noise = L2Linf(l2=clip_norm, linf=cap), Gaussian(multiplier)
    return Plan(sampling=_sampling(rate, coordinate_rate), clipping=clipping, noise=noise)


def subspaces(
    *,
    parameters: int = 291_898,
    public: int | None = None,
    ranks: Sequence[int] | None = None,
    rate: float = 0.02,
    coordinate_rate: float = 1 / 2,
    clip_norm: float = 1.0,
    shares: Sequence[float] | None = None,
    cap: float | None = None,
    groups: int = 4,
    every: int = 100,
    multiplier: float = 0.637,
) -> Plan:
    """Hybrid clipping: a clipping norm per principal subspace of public gradients, with twice sampling.

    Defaults: ResNet22 on CIFAR-10 at epsilon 8 in 5,000 steps (Xiao et al. 2023, Table 2, last row, with
    ranks 250, 500, 1000 and 1500 from section 6). For small models, the ranks are scaled down to a
    quarter of the parameters. The paper measures the shares on public gradients and fits the noise, as
    `hush train` does with `hush.public_thresholds` and `hush.fit_noise`. This function uses equal shares
    and isotropic noise. Proof: docs/guarantees/twice-sampling.md and public-basis.md.

    Args:
        parameters: Number of trained parameters.
        public: Number of public records, if known. `hush.public_thresholds` computes the bases from 60%
            of them, which limits the sum of the ranks.
        ranks: Dimensions of the principal subspaces; the last subspace is their complement. By default
            the ranks of the paper, scaled down for small models and few public records.
        rate: Sampling rate of records.
        coordinate_rate: Sampling rate of coordinates; 1 to sample only records.
        clip_norm: Bound on the l2 norm of the whole gradient.
        shares: Relative clipping norm of each subspace and of the complement; equal by default.
        cap: Bound on each coefficient, in the same unit as `clip_norm`; None for no bound.
        groups: Number of parameter groups with separate bases.
        every: Number of steps between updates of the bases.
        multiplier: Noise multiplier.
    """
    if ranks is None:
        total = min(sum(_RANKS), parameters // 4, parameters if public is None else public * 3 // 5)
        scaled = [rank * total // sum(_RANKS) for rank in _RANKS]
        ranks = [rank for rank in scaled if rank] or [1]
    if sum(ranks) >= parameters:
        raise InvalidValue(
            f"ranks={tuple(ranks)} have the sum {sum(ranks)}, which must be below parameters="
            f"{parameters}: the last subspace is the complement of the principal ones. Leave it out."
        )
    relative = [1.0] * (len(ranks) + 1) if shares is None else shares
    length = sum(share**2 for share in relative) ** 0.5
    norms = [clip_norm * share / length for share in relative]
    clipping = Subspaces(
        ranks=(*ranks, parameters - sum(ranks)),
        l2=norms,
        linf=None if cap is None else [cap] * len(norms),
        bases=Principal(groups=groups, every=every),
    )
    noise = Gaussian(multiplier)
    return Plan(sampling=_sampling(rate, coordinate_rate), clipping=clipping, noise=noise)


def beta(
    *, beta: float = 1.5, rate: float = 256 / 50_000, clip_norm: float = 0.1, multiplier: float = 1.5
) -> Plan:
    """beta-DP-SGD: noise of density exp(-|x|^beta), between Laplace (1) and Gaussian (2).

    Defaults: CIFAR-10 (arXiv 2506.12553, Appendix E.2, from the values searched). Gradients are clipped
        in the l_beta norm, and for beta above 2 in the l2 norm, because the paper's accounting is not
        valid for beta above 2.

    Args:
        beta: Exponent of the density, at least 1.
        rate: Sampling rate.
        clip_norm: Clipping norm.
        multiplier: Scale s of exp(-(|x| / s)^beta), in units of `clip_norm`.
    """
    noise = GeneralizedGaussian(beta=beta, multiplier=multiplier)
    clipping = Lp(p=noise.beta, norm=clip_norm) if noise.beta <= 2 else L2(clip_norm)
    return Plan(sampling=_sampling(rate), clipping=clipping, noise=noise)


def rectified(
    *,
    rate: float = 1.0,
    clip_norm: float = 1.0,
    linf: float | None = None,
    multiplier: float = 10.0,
    bound: float = 0.5,
) -> Plan:
    """Rectified Gaussian noise: the noisy sum is clamped to [-bound, bound].

    Sums far from 0 have a lower per-instance cost. The paper trains a linear layer on features of 50,000
    images with `Linf(0.002)`, standard deviation 4 and bound 32 (Hu et al. 2024, Appendix G, Table 1).
    Use a smaller bound for fewer records: a bound that exceeds the sums has no effect.

    Args:
        rate: Sampling rate; 1 for full batches.
        clip_norm: l2 clipping norm.
        linf: l-infinity clipping norm, as in the paper, instead of `clip_norm`.
        multiplier: Standard deviation, in units of the clipping norm.
        bound: End of the support of the noisy sum, in standard deviations.
    """
    clipping = L2(clip_norm) if linf is None else Linf(linf)
    scale = multiplier * clipping.reference_norm
    noise = Rectified(scale=scale, bound=bound * scale)
    return Plan(sampling=_sampling(rate), clipping=clipping, noise=noise)


def truncated(
    *,
    rate: float = 1.0,
    clip_norm: float = 1.0,
    linf: float | None = None,
    multiplier: float = 10.0,
    bound: float = 1.0,
) -> Plan:
    """Truncated Gaussian noise: the noisy sum is conditioned on an interval.

    The defaults are those of `rectified`, with bound 1.

    Args:
        rate: Sampling rate; 1 for full batches.
        clip_norm: l2 clipping norm.
        linf: l-infinity clipping norm, as in the paper, instead of `clip_norm`.
        multiplier: Standard deviation before truncation, in units of the clipping norm.
        bound: End of the support of the noisy sum, in standard deviations before truncation.
    """
    clipping = L2(clip_norm) if linf is None else Linf(linf)
    scale = multiplier * clipping.reference_norm
    noise = Truncated(scale=scale, bound=bound * scale)
    return Plan(sampling=_sampling(rate), clipping=clipping, noise=noise)


def sign(*, rate: float = 1.0, clip_norm: float = 0.002, multiplier: float = 2000.0) -> Plan:
    """Stochastic sign: one bit per coordinate of the noisy sum, with the paper's defaults.

    Args:
        rate: Sampling rate; 1 for full batches.
        clip_norm: l-infinity clipping norm.
        multiplier: Standard deviation of the noise, in units of `clip_norm`.
    """
    noise = StochasticSign(multiplier * clip_norm)
    return Plan(sampling=_sampling(rate), clipping=Linf(clip_norm), noise=noise)


def banded(
    *,
    rate: float = 0.01,
    clip_norm: float = 1.0,
    multiplier: float = 1.0,
    bands: int = 8,
    steps: int = 2000,
    momentum: float = 0.0,
) -> Plan:
    """Correlated noise: cyclic Poisson sampling, l2 clipping, banded Gaussian noise.

    Args:
        rate: Expected batch size divided by the number of records; at most 1 / `bands`.
        clip_norm: l2 clipping norm.
        multiplier: Noise multiplier.
        bands: Number of coefficients of the noise, and of groups of records.
        steps: Number of steps that the coefficients are optimized for.
        momentum: Momentum of the optimizer.
    """
    if not rate * bands <= 1:
        raise InvalidValue(
            f"rate={rate:g} with bands={bands} samples the records of a group with probability "
            f"{rate * bands:g}, which is not a probability. Pass at most bands={int(1 / rate)}.",
            key="rate",
        )
    noise = Banded.optimal(bands=bands, multiplier=multiplier, steps=steps, momentum=momentum)
    sampling = CyclicPoisson(rate=rate * bands, cycle=bands)
    return Plan(sampling=sampling, clipping=L2(clip_norm), noise=noise)


def _sampling(rate: float, coordinate_rate: float = 1.0) -> Sampling:
    if coordinate_rate != 1:
        return Twice(rate=rate, coordinate_rate=coordinate_rate)
    return FullBatch() if rate == 1 else Poisson(rate)


NAMES: dict[str, NamedPlan] = {
    "dpsgd": NamedPlan(make=dpsgd, paper=_ABADI),
    "dpsur": NamedPlan(make=dpsur, paper=_DPSUR),
    "dpsur-published": NamedPlan(make=dpsur_published, paper=_DPSUR),
    "twice": NamedPlan(make=twice, paper=_TWICE),
    "subspaces": NamedPlan(make=subspaces, paper=_TWICE),
    "beta": NamedPlan(make=beta, paper=_BETA),
    "rectified": NamedPlan(make=rectified, paper=_BOUNDED),
    "truncated": NamedPlan(make=truncated, paper=_BOUNDED),
    "sign": NamedPlan(make=sign, paper=_SIGN),
    "banded": NamedPlan(make=banded, paper=_BANDED),
}
"""Named plans, by their names on the command line."""

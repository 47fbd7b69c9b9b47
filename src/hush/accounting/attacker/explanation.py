"""What a guarantee means to someone who is in the data: an attack's rates, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from hush.accounting.attacker.attacker import ApproximateDP, AttackBounds, Attacker
from hush.accounting.attacker.privacy_profile import PrivacyProfile, privacy_profile
from hush.accounting.attacker.trade_off import TradeOffCurve, trade_off_curve
from hush.accounting.epsilon import Dimension
from hush.core.guarantee import RECORD, Adjacency, Guarantee
from hush.core.plan import Plan

FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
EVEN_PRIOR = 0.5
PRIORS = tuple(percent / 100 for percent in range(1, 100))
"""Probabilities of membership beforehand at which the chance of a right guess is given."""


@dataclass(frozen=True, kw_only=True)
class AttackRates:
    """Upper bounds on what the best membership attack achieves.

    Args:
        advantage: Largest true positive rate less false positive rate.
        posterior: Chance that a guess is right, from even odds.
        true_positive_rates: The largest at false positive rates of 10%, 1% and 0.1%, in this order.
    """

    advantage: float
    posterior: float
    true_positive_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A guarantee in terms of attacks, with the curves behind it.

    Args:
        attack: Rates that hold of the composition, from its privacy profile.
        from_epsilon: Rates that follow from its epsilon and delta alone: never smaller.
        posteriors: Chance that a guess is right, at each of `PRIORS`.
        profile: Delta at each epsilon, with both ends.
        trade_off: Trade-off curve with both ends, and mu of Gaussian DP with its regret.
    """

    attack: AttackRates
    from_epsilon: AttackRates
    posteriors: tuple[float, ...]
    profile: PrivacyProfile
    trade_off: TradeOffCurve


def explain(
    guarantee: Guarantee,
    counts: Mapping[Plan, int],
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> Explanation:
    """What a guarantee of a composition of plans means to an attacker.

    Args:
        guarantee: Epsilon and delta of the composition.
        counts: Number of steps of each plan.
        dimension: Number of parameters, where the charge depends on it.
        adjacency: What neighbours differ in.

    Returns:
        Rates, curves and mu, all certified: docs/guarantees/risk.md.
    """
    own = (guarantee.epsilon.upper, guarantee.delta)
    profile = privacy_profile(counts, dimension, adjacency)
    implied = ApproximateDP([own, *zip(profile.epsilons, profile.upper, strict=True)])
    return Explanation(
        attack=_smaller(attack_rates(Attacker(counts, dimension, adjacency)), attack_rates(implied)),
        from_epsilon=attack_rates(ApproximateDP([own])),
        posteriors=tuple(implied.posteriors(PRIORS)),
        profile=profile,
        trade_off=trade_off_curve(profile),
    )


def attack_rates(attack: AttackBounds) -> AttackRates:
    """Bounds on the rates of the best attack.

    Args:
        attack: Bounds on every test of what was released.
    """
    return AttackRates(
        advantage=attack.advantage,
        posterior=attack.posterior(EVEN_PRIOR),
        true_positive_rates=tuple(attack.true_positive_rate(rate) for rate in FALSE_POSITIVE_RATES),
    )


def _smaller(first: AttackRates, second: AttackRates) -> AttackRates:
    """The smaller of two bounds on each rate.

    A profile may be loose near epsilon 0 alone; then its other points say more: risk.md, 6.
    """
    rates = zip(first.true_positive_rates, second.true_positive_rates, strict=True)
    return AttackRates(
        advantage=min(first.advantage, second.advantage),
        posterior=min(first.posterior, second.posterior),
        true_positive_rates=tuple(map(min, rates)),
    )

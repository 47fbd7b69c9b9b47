"""Likelihood-ratio distinguisher: a lower bound on epsilon of what a plan runs, against the charge."""

import math

import numpy as np
import torch

from hush.accounting.epsilon import epsilon
from hush.accounting.per_instance.bounded import individual_rdp
from hush.accounting.rdp.conversion import ORDERS, rdp_to_epsilon
from hush.audit.lower_bound import Array, Audit, Draws, epsilon_lower_bound
from hush.audit.mechanisms import copies
from hush.core.plan import Plan
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense

DELTA = 0.01
"""Large, so that what it leaves out can be counted: docs/guarantees/audit.md."""


def audit(
    plan: Plan,
    *,
    touched: int = 1,
    dimension: int | None = None,
    steps: int = 1,
    runs: int = 10_000,
    others: int = 0,
    at_hand: bool = False,
    delta: float = DELTA,
    confidence: float = 0.95,
    seed: int = 0,
    secure: bool = False,
) -> Audit:
    """An attack on `steps` steps of `plan` by a record that fills the clipping in `touched` numbers.

    The steps are those of `PrivateStep`; the attacker sees every noisy update, knows everything but
    whether the record is there, and scores by the likelihood ratio. `others` as in `copies.released`;
    `at_hand` holds the result against the charge for the records at hand (a bounded law, one step).

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> found = audit(plan, confidence=0.999)
    >>> found.holds, found.tightness > 0.5
    (True, True)
    """
    outputs = copies.released(
        plan, touched=touched, runs=runs, steps=steps, others=others, seed=seed, secure=secure
    )
    shift = clipped(plan, touched)
    around = others * shift
    scores = Draws(
        present=log_ratio(plan, outputs.present, shift, around),
        absent=log_ratio(plan, outputs.absent, shift, around),
    )
    if at_hand:
        charge = _at_hand(plan, around, shift, delta)
    else:
        charge = epsilon(plan, steps, delta, dimension=dimension).epsilon.upper
    lower = epsilon_lower_bound(scores, delta, confidence)
    return Audit(lower=lower, charge=charge, delta=delta, confidence=confidence, runs=runs // 2)


def clipped(plan: Plan, touched: int) -> Array:
    """What the record adds to a sum, if all of it takes part."""
    bare = torch.full((1, touched), copies.STRENGTH, dtype=torch.float64)
    tape = GradientTape(terms={"rows": Dense(bare)}, device=bare.device)
    return np.asarray(plan.clipping.clip(tape).total["rows"].numpy())


def log_ratio(plan: Plan, outputs: Array, shift: Array, around: Array) -> Array:
    """Log-likelihood ratio of each row of outputs, with the record over without: the optimal score.

    For noise on a fixed support, that of the whole normal law; any score makes a valid audit.
    """
    rate, coordinate_rate = plan.sampling.participation, plan.sampling.coordinate_participation
    powers, scales = _law(plan, len(shift))
    centred = outputs.reshape(len(outputs), -1, len(shift)) - around
    each = (np.abs(centred) ** powers - np.abs(centred - shift) ** powers) / scales**powers
    if coordinate_rate < 1:
        each = np.logaddexp(math.log1p(-coordinate_rate), math.log(coordinate_rate) + each)
    whole = each.sum(2)
    if rate < 1:
        whole = np.logaddexp(math.log1p(-rate), math.log(rate) + whole)
    return np.asarray(whole.sum(1))


def _law(plan: Plan, touched: int) -> tuple[Array, Array]:
    """The exponent and scale of the noise at each number: its density is exp(-|x / scale|^exponent)."""
    found = []
    for width, (noise, norm) in zip(
        copies.widths(plan, touched),
        plan.noise.per_block(plan.clipping.sensitivity(touched), plan.clipping.reference_norm),
        strict=True,
    ):
        dominating = noise.dominating_noise(1.0)
        law = noise.exponential_power(norm) if dominating is None else dominating.exponential_power(1.0)
        assert law is not None
        found += [law] * width
    powers, scales = np.array(found).T
    return powers, scales


def _at_hand(plan: Plan, around: Array, shift: Array, delta: float) -> float:
    """The charge for the records at hand, with the record or without: each must cover both."""
    found = [individual_rdp(plan, place, ORDERS) for place in (around, around + shift)]
    at_worst = epsilon(plan, 1, delta, dimension=len(shift)).epsilon.upper
    return min(at_worst, *(rdp_to_epsilon(each, ORDERS, delta) for each in found))

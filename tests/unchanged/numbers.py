"""Numbers of the accountants for one plan, through the public functions."""

import numpy as np
import numpy.typing as npt

import hush
from hush.accounting.attacker import Attacker
from hush.accounting.calibrate import max_steps
from tests.unchanged.entry import Entries, asked, entries
from tests.unchanged.plans import DIMENSION, Question

WHOLE, FRACTIONAL = (2.0, 3.0, 8.0, 32.0), (1.25, 2.5)
_BUDGET = hush.Budget(epsilon=2.0, delta=1e-5)
_COMMON_RATE = 1e-3
"""Searches over plans whose records take part more rarely are slow, and say nothing new."""


def answers(question: Question) -> Entries:
    """All numbers of one question; searches and attacks, which are slower, of every tenth."""
    plan, size = question.plan, question.dimension
    delta = question.case.delta
    at = _location(question)
    numbers = {
        **entries("plan", plan),
        **entries("digest", plan.digest),
        **entries("steps", question.steps),
        **asked("rdp whole", hush.rdp, plan, WHOLE, size),
        **asked("rdp fractional", hush.rdp, plan, FRACTIONAL, size),
        **asked("epsilon", hush.epsilon, plan, question.steps, delta, size),
        **asked("individual", hush.individual_rdp, plan, at, WHOLE),
        **asked("individual change", hush.individual_rdp, plan, at, WHOLE, -at / 3),
        **asked("fisher", hush.fisher, plan, at),
    }
    if question.seed % 10 == 0:
        numbers |= _searches(question)
    return {f"plan {question.seed}: {name}": text for name, text in numbers.items()}


def combined(name: str, plan: hush.Plan) -> Entries:
    """The divergence at order 2 and the epsilon of 20 steps of a combination, or how it is refused."""
    numbers = asked(f"{name}: rdp", hush.rdp, plan, [2.0], DIMENSION)
    if any(text.startswith("refused") for text in numbers.values()):
        return numbers
    return numbers | asked(f"{name}: epsilon", hush.epsilon, plan, 20, 1e-5, DIMENSION)


def _searches(question: Question) -> Entries:
    plan, size, delta = question.plan, question.dimension, question.case.delta
    numbers = asked("in one dimension", hush.epsilon, plan, 3, delta, 1)
    if min(getattr(part, "rate", 1.0) for part in (plan.sampling, plan.release)) < _COMMON_RATE:
        return numbers
    attacker = Attacker({plan: 3}, size)
    numbers |= {
        **asked("calibrate", hush.calibrate, plan, _BUDGET, 20, size),
        **asked("calibrate after", hush.calibrate, plan, _BUDGET, 20, size, spent={_PAID: 2}),
        **asked("steps within", max_steps, plan, _BUDGET, dimension=size),
        **asked("advantage", getattr, attacker, "advantage"),
    }
    if question.seed % 30 == 0:
        numbers |= {
            **asked("fit noise", hush.fit_noise, plan, _BUDGET, 20, size),
            **asked("false negatives", attacker.false_negative_rate, 0.01),
        }
    return numbers


_PAID = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(9.0))


def _location(question: Question) -> npt.NDArray[np.float64]:
    """A sum of clipped gradients to ask about: some units of the noise's size, either side of zero."""
    drawn = np.random.default_rng(question.seed).normal(size=question.case.dimension)
    scale = getattr(question.plan.noise, "scale", 1.0)
    return np.asarray(2 * scale * drawn)

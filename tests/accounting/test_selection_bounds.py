"""Bounds on a selection against the exact law of what it releases."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator

from hush.accounting.selection import (
    Profile,
    TruncatedNegativeBinomial,
    TruncatedPoisson,
    selection_profile,
    selection_rdp,
    trial_count,
)
from hush.core.release import BestOf
from tests.accounting import selection_oracle as oracle
from tests.accounting.selection_oracle import Array, Law

LAWS = [
    ("negative-binomial", 0.0, 3.0),
    ("negative-binomial", 0.5, 8.0),
    ("negative-binomial", 1.0, 2.0),
    ("negative-binomial", 1.0, 10.0),
    ("negative-binomial", 4.0, 20.0),
    ("poisson", 1.0, 2.0),
    ("poisson", 1.0, 15.0),
]
EPSILONS = (0.0, 0.05, 0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)


Charge = Callable[[Profile], Callable[[float], float]]
"""Upper bound on delta at an epsilon, from the profile of one trial."""


def charged_law(kind: str, shape: float, mean: float) -> TruncatedNegativeBinomial | TruncatedPoisson:
    return trial_count(BestOf(steps=1, mean=mean, law=kind, shape=shape))  # type: ignore[arg-type]


def exact_profile(first: Array, second: Array) -> Profile:
    epsilons = np.linspace(0, 8, 200)
    scaled = np.exp(epsilons)[:, None]
    ways = [np.maximum(p - scaled * q, 0).sum(axis=1) for p, q in ((first, second), (second, first))]
    return Profile(epsilons, np.maximum(*ways))


def trials(pick: Generator) -> tuple[Array, Array]:
    """Two laws of one trial on a few outcomes, the best one last: randomised response and others."""
    size = int(pick.integers(2, 7))
    kind = int(pick.integers(4))
    first, second = pick.dirichlet(np.full(size, 0.7), 2) + 1e-9
    if kind == 0:
        first, second = np.full(size, 1.0), np.full(size, 1.0)
        first[pick.integers(size)] = math.exp(pick.uniform(0.1, 2))
        second[pick.integers(size)] = math.exp(pick.uniform(0.1, 2))
    elif kind == 1:
        second = first * np.exp(pick.uniform(-1, 1, size) * pick.uniform(0.05, 1))
    elif kind == 2:
        # nearly the same but for rare outcomes
        second = first + np.eye(size)[pick.integers(size)] * pick.uniform(1e-5, 1e-2)
    return first / first.sum(), second / second.sum()


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_the_profile_is_never_below_the_exact_one(kind: str, shape: float, mean: float) -> None:
    pick, number = np.random.default_rng(1), oracle.law(kind, shape, mean)
    closest = 0.0
    for _ in range(40):
        first, second = trials(pick)
        bound = selection_profile(exact_profile(first, second), charged_law(kind, shape, mean))
        for epsilon in EPSILONS:
            exact = oracle.delta(oracle.best(first, number), oracle.best(second, number), epsilon)
            assert exact <= bound(epsilon) + 1e-12
            closest = max(closest, exact / bound(epsilon) if exact > 1e-9 else 0.0)
    assert closest > 0.5, "some selection comes near the bound: it is not one that says nothing"


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_the_rdp_is_never_below_the_exact_one(kind: str, shape: float, mean: float) -> None:
    pick, number = np.random.default_rng(2), oracle.law(kind, shape, mean)
    orders = np.array([1.2, 2.0, 5.0, 16.0])
    for _ in range(20):
        first, second = trials(pick)
        law = charged_law(kind, shape, mean)
        profile = selection_profile(exact_profile(first, second), law)

        def rdp(orders: Array, first: Array = first, second: Array = second) -> Array:
            return np.array([oracle.renyi(first, second, order) for order in orders])

        bounds = selection_rdp(orders, rdp, profile, law)
        pair = oracle.best(first, number), oracle.best(second, number)
        for order, bound in zip(orders, bounds, strict=True):
            assert oracle.renyi(*pair, order) <= bound + 1e-9


def excess(charge: Charge, number: Law) -> float:
    """How far the exact delta of some selection is above a charge for it, at most."""
    pick, worst = np.random.default_rng(3), -math.inf
    for _ in range(60):
        first, second = trials(pick)
        pair = oracle.best(first, number), oracle.best(second, number)
        bound = charge(exact_profile(first, second))
        worst = max([worst, *(oracle.delta(*pair, epsilon) - bound(epsilon) for epsilon in EPSILONS)])
    return worst


def test_charges_that_forget_something_are_caught() -> None:
    number, law = oracle.law("negative-binomial", 1.0, 10.0), charged_law("negative-binomial", 1.0, 10.0)

    def right(trial: Profile) -> Callable[[float], float]:
        return selection_profile(trial, law)

    def of_one_trial(trial: Profile) -> Callable[[float], float]:
        return lambda epsilon: float(trial(np.array(epsilon)))

    def without_shifts(trial: Profile) -> Callable[[float], float]:
        return lambda epsilon: law.mean * float(trial(np.array(epsilon)))

    def of_fewer_trials(trial: Profile) -> Callable[[float], float]:
        return selection_profile(trial, charged_law("negative-binomial", 1.0, 5.0))

    assert excess(right, number) <= 1e-12
    for wrong in (of_one_trial, without_shifts, of_fewer_trials):
        assert excess(wrong, number) > 1e-3, wrong
    assert excess(right, oracle.law("fixed", 0.0, 10.0)) > 1e-2, "a fixed number of trials costs more"

"""Epsilon of sampled Gaussians: hush beside dp-accounting, prv-accountant and Opacus, in one run.

Run: .venv/bin/python benchmarks/accounting.py

Peers that are not installed are left out. To have them all:
     .venv/bin/pip install --no-deps prv-accountant opacus opt-einsum
"""

import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from hush.accounting import calibrate
from hush.accounting.pld import accountant as pld
from hush.accounting.pld import lattice
from hush.accounting.rdp.profile import CoordinateRDP
from hush.accounting.steps import SampledGaussian
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson

DELTA = 1e-5
SETTINGS = ((0.6, 0.001, 100_000), (1.0, 0.01, 10_000), (4.0, 0.2, 2_000), (10.0, 1.0, 500))
REPEATS = 5

Answer = tuple[float | None, float]  # a lower end, if there is one, and an upper end


def hush_answer(sigma: float, rate: float, steps: int) -> Answer:
    lattice.pessimistic.cache_clear()
    lattice.optimistic.cache_clear()
    bound = pld.epsilon({SampledGaussian(rate, sigma): steps}, DELTA)
    return bound.lower, bound.upper


def dp_accounting_answer(sigma: float, rate: float, steps: int) -> Answer:
    from dp_accounting.pld import privacy_loss_distribution

    single_step = privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=rate)
    return None, single_step.self_compose(steps).get_epsilon_for_delta(DELTA)


def prv_answer(sigma: float, rate: float, steps: int) -> Answer:
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    prv = PoissonSubsampledGaussianMechanism(noise_multiplier=sigma, sampling_probability=rate)
    accountant = PRVAccountant(
        prvs=[prv], max_self_compositions=[steps], eps_error=0.01, delta_error=DELTA / 1000
    )
    low, _, high = accountant.compute_epsilon(DELTA, [steps])
    return low, high


def opacus_answer(sigma: float, rate: float, steps: int) -> Answer:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    return None, accountant.get_epsilon(DELTA)


ANSWERS: dict[str, tuple[str, Callable[[float, float, int], Answer]]] = {
    "hush": ("hush", hush_answer),
    "dp-accounting": ("dp_accounting", dp_accounting_answer),
    "prv-accountant": ("prv_accountant", prv_answer),
    "Opacus": ("opacus", opacus_answer),
}


def main() -> None:
    warnings.simplefilter("ignore")
    present = {name: answer for name, (module, answer) in ANSWERS.items() if find_spec(module)}
    print(
        "| sigma, rate, steps | accountant | epsilon, lower | epsilon, upper | median ms | times hush |"
    )
    print("|---|---|---|---|---|---|")
    for sigma, rate, steps in SETTINGS:
        times: dict[str, list[float]] = {name: [] for name in present}
        answers: dict[str, str] = {}
        for _ in range(REPEATS):
            for name, answer in present.items():
                start = time.perf_counter()
                try:
                    lower, upper = answer(sigma, rate, steps)
                    answers[name] = f"{'-' if lower is None else f'{lower:.5f}'} | {upper:.5f}"
                except (ValueError, RuntimeError) as error:  # a peer that fails is shown, not hidden
                    answers[name] = f"- | {type(error).__name__}"
                times[name].append(time.perf_counter() - start)
        ours = statistics.median(times["hush"])
        for name in present:
            spent = statistics.median(times[name])
            print(
                f"| {sigma:g}, {rate:g}, {steps} | {name} | {answers[name]} | {1e3 * spent:.1f} "
                f"| {spent / ours:.1f} |"
            )
    print("\n| calibrate to epsilon 2 at | multiplier | epsilon, upper | ms | evaluations' cost |")
    print("|---|---|---|---|---|")
    for sigma, rate, steps in SETTINGS:
        sampling = FullBatch() if rate == 1 else Poisson(rate=rate)
        plan = Plan(sampling=sampling, clipping=L2(norm=1.0), noise=Gaussian(multiplier=sigma))
        start = time.perf_counter()
        meeting = calibrate.calibrate(plan, Budget(epsilon=2.0, delta=DELTA), steps)
        spent = time.perf_counter() - start
        multiplier = meeting.noise.to_plain()["multiplier"]
        start = time.perf_counter()
        _, upper = hush_answer(multiplier, rate, steps)
        once = time.perf_counter() - start
        print(
            f"| {rate:g}, {steps} | {multiplier:.4f} | {upper:.5f} | {1e3 * spent:.0f} "
            f"| {spent / once:.1f} |"
        )
    orders, shifts = np.arange(2.0, 62.0), np.array([[1.0]])
    spans = []
    for repeat in range(REPEATS):
        law = CoordinateRDP(beta=1.5 + 1e-9 * repeat, scale=2.0)  # never seen before, so not cached
        start = time.perf_counter()
        law(orders, shifts)
        spans.append(time.perf_counter() - start)
    print(f"\na generalized Gaussian profile at 60 orders: {1e3 * statistics.median(spans):.1f} ms")


if __name__ == "__main__":
    main()

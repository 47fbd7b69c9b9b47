"""Runs side by side have the law of one run; the score is the likelihood ratio."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

import hush
from hush.core.parts import Clipping, Noise, Sampling
from hush_recipes.audit import copies
from hush_recipes.audit.distinguisher import clipped, log_ratio

RUNS = 1000


def plan(clipping: Clipping, noise: Noise, sampling: Sampling | None = None) -> hush.Plan:
    return hush.Plan(sampling=sampling or hush.FullBatch(), clipping=clipping, noise=noise)


@pytest.mark.parametrize(
    ("chosen", "touched", "deviations", "shift"),
    [
        (plan(hush.L2(2.0), hush.Gaussian(0.5)), 2, [1, 1], [2**0.5, 2**0.5]),
        (
            plan(hush.Box(bounds=(0.8, 0.6)), hush.BlockGaussian(multipliers=(1.0, 2.0))),
            2,
            [0.8, 1.2],
            [0.8, 0.6],
        ),
        (
            plan(
                hush.Subspaces(ranks=(2, 1), l2=(1.0, 3.0)), hush.BlockGaussian(multipliers=(1.0, 2.0))
            ),
            3,
            [1, 1, 6],
            [0.5**0.5, 0.5**0.5, 3],
        ),
        (plan(hush.Linf(0.5), hush.Gaussian(2.0)), 2, [1, 1], [0.5, 0.5]),
    ],
    ids=["L2", "Box", "Subspaces", "Linf"],
)
def test_a_row_is_a_run_of_the_plan(
    chosen: hush.Plan, touched: int, deviations: list[float], shift: list[float]
) -> None:
    draws = copies.released(chosen, touched=touched, runs=RUNS)
    assert clipped(chosen, touched) == pytest.approx(np.array(shift), rel=1e-6)
    for column, (deviation, moved) in enumerate(zip(deviations, shift, strict=True)):
        for rows, place in ((draws.present, moved), (draws.absent, 0.0)):
            law = stats.norm(place, deviation)
            assert stats.kstest(rows[:, column], law.cdf).pvalue > 1e-4
            assert stats.kstest(rows[:, column], stats.norm(place, 1.4 * deviation).cdf).pvalue < 1e-4
    together = np.corrcoef(np.concatenate([draws.present[:-1], draws.present[1:]], 1).T)
    assert np.abs(together - np.eye(len(together))).max() < 5 / RUNS**0.5, "rows tell nothing of others"


def test_the_score_against_a_sum_over_all_masks() -> None:
    sampling = hush.Twice(rate=0.3, coordinate_rate=0.25)
    chosen = plan(hush.L2Linf(l2=1.0, linf=0.6), hush.Gaussian(0.7), sampling)
    shift, noise = clipped(chosen, 2), stats.norm(0, 0.7)
    outputs = np.random.default_rng(0).normal(size=(5, 4))

    def density(step: np.ndarray) -> float:
        total = 0.7 * float(np.prod(noise.pdf(step)))
        for mask in itertools.product((0, 1), repeat=2):
            chance = math.prod(0.25 if included else 0.75 for included in mask)
            total += 0.3 * chance * float(np.prod(noise.pdf(step - mask * shift)))
        return total

    expected = [
        sum(math.log(density(step) / float(np.prod(noise.pdf(step)))) for step in row.reshape(2, 2))
        for row in outputs
    ]
    assert log_ratio(chosen, outputs, shift, np.zeros(2)) == pytest.approx(expected)

"""The table of methods, against independent calibrations and the measured recommendation."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hush
from hush import plans
from hush.accounting.compare import Row, Setting, compare, recommendation

BUDGET = hush.Budget(epsilon=2.0, delta=1e-5)
SETTING = Setting(
    records=50_000, rate=0.02, steps=1500, dimension=291_898, budget=BUDGET, cap=0.1, acceptance=0.75
)
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.method: row for row in compare(SETTING)}


def multiplier(plan: hush.Plan, steps: int, dimension: int | None = None) -> float:
    return float(hush.calibrate(plan, BUDGET, steps, dimension).noise.to_plain()["multiplier"])


def test_every_system_has_its_rows(rows: dict[str, Row]) -> None:
    names = {row.name for row in rows.values()}
    others = {"subspaces", "dpsur", "beta", "rectified", "truncated", "pate"}
    assert names == {"dpsgd", "banded", "twice", *others}
    assert names - set(plans.NAMES) == {"pate"}
    for row in rows.values():
        for page in row.measured.partition(": ")[2].split(", "):
            assert (RESULTS / page).is_file(), page


def test_plans_keep_the_budget(rows: dict[str, Row]) -> None:
    for row in rows.values():
        assert row.plan is not None
        size = None if row.name == "pate" else SETTING.dimension
        spent = hush.epsilon(row.plan, steps=row.steps, delta=1e-5, dimension=size).epsilon.upper
        assert 1.99 <= spent <= 2.0, row.method


def test_plain_noise_and_a_larger_batch(rows: dict[str, Row]) -> None:
    plain, larger = rows["plain DP-SGD"], rows["DP-SGD, larger batch"]
    expected = multiplier(plans.dpsgd(rate=0.02), 1500) / 1000
    assert plain.deviation == pytest.approx(expected)
    assert (plain.variance, plain.gradients) == (1.0, 1.0)
    ratio = 256 / 85
    assert larger.gradients == pytest.approx(ratio)
    expected = multiplier(plans.dpsgd(rate=0.02 * ratio), 1500) / (1000 * ratio)
    assert larger.deviation == pytest.approx(expected)
    twice = rows["twice sampling"]
    assert larger.deviation < twice.deviation < plain.deviation
    plan = plans.twice(rate=0.02 * ratio, clip_norm=1.0, cap=0.1)
    assert twice.deviation == pytest.approx(multiplier(plan, 1500) / 1000)


def test_correlated_noise_is_compared_by_the_error_of_the_weights(rows: dict[str, Row]) -> None:
    deviations = []
    for bands in (4, 16):
        plan = plans.banded(rate=0.02, bands=bands, steps=1500)
        series = np.zeros(1500)  # of the inverse of the matrix, summed up
        strategy = np.array(plan.noise.correlation)
        for k in range(1500):
            past = strategy[1 : k + 1] @ series[max(0, k - bands + 1) : k][::-1]
            series[k] = ((k == 0) - past) / strategy[0]
        error = np.sqrt((np.arange(1500, 0, -1) @ series.cumsum() ** 2) / (1500 * 1501 / 2))
        deviations.append(multiplier(plan, 1500) * error / 1000)
    (row,) = [row for row in rows.values() if row.name == "banded"]
    assert row.deviation == pytest.approx(min(deviations), rel=1e-6)
    assert row.gradients == pytest.approx(1.0)
    epochs = replace(SETTING, steps=50, budget=hush.Budget(8.0, 1e-5))
    (few,) = [row for row in compare(epochs) if row.name == "banded"]
    assert few.variance < 0.6 < row.variance, "it helps most in one epoch at a large epsilon"
    assert compare(replace(SETTING, rate=1.0))[1].plan is None


def test_subspaces_have_the_variance_of_the_closed_form(rows: dict[str, Row]) -> None:
    """Theorem 4.6: (sum of c_j sqrt(r_j))^2 over the dimension; equal norms of total length 1."""
    ranks = np.array([250, 500, 1000, 1500, 288_648])
    expected = np.sqrt(ranks / 5).sum() ** 2 / 291_898
    assert rows["subspaces, optimal noise"].variance == pytest.approx(expected, rel=0.01)
    shaped = replace(SETTING, subspaces=((1000, 2.5), (290_898, 1.0)))
    row = next(row for row in compare(shaped) if row.name == "subspaces")
    assert 1 / row.variance == pytest.approx(5.5, abs=0.05)


def test_trials_of_selective_release_are_charged(rows: dict[str, Row]) -> None:
    row = rows["DPSUR, summed test"]
    assert row.steps == 2000
    assert row.gradients == pytest.approx(1 / 0.75)
    test = hush.Selective(rate=256 / 50_000, clip=0.01, multiplier=8.0)
    plan = replace(plans.dpsgd(rate=0.02), release=test)
    assert row.deviation == pytest.approx(multiplier(plan, 2000) / 1000)
    # Phi((threshold + 1) / 2 multiplier) = 1/2: the mean test accepts no larger share
    mean = rows["DPSUR, mean test"]
    assert (mean.steps, mean.gradients) == (3000, 2.0)


@pytest.mark.parametrize(("name", "beta"), [("1.5", 1.5), ("3", 3.0)])
def test_generalized_noise_keeps_the_budget(rows: dict[str, Row], name: str, beta: float) -> None:
    p = min(beta, 2.0)
    normal = np.random.default_rng(0).standard_normal(SETTING.dimension)
    norm = float(np.sum(np.abs(normal / np.linalg.norm(normal)) ** p) ** (1 / p))
    spread = math.sqrt(math.gamma(3 / beta) / math.gamma(1 / beta))
    scale = 1000 * rows[f"beta-DP-SGD, beta {name}"].deviation / norm / spread
    plan = plans.beta(beta=beta, rate=0.02, clip_norm=norm, multiplier=scale)
    spent = hush.epsilon(plan, steps=1500, delta=1e-5, dimension=SETTING.dimension)
    assert spent.epsilon.upper == pytest.approx(2.0, rel=5e-3)


def test_bounded_support_costs_full_batches_and_less_at_one_location(rows: dict[str, Row]) -> None:
    plain = multiplier(plans.dpsgd(rate=1.0), 1500) / 50_000
    local = {}
    for name in ("rectified", "truncated"):
        row = rows[f"bounded support, {name}"]
        assert row.gradients == 50
        # truncated noise is charged by Rényi orders, whose conversion costs some percent
        assert plain * (1 - 1e-3) <= row.deviation <= plain * (1.001 if name == "rectified" else 1.1)
        assert row.plan is not None
        assert row.per_instance is not None
        local[name] = row.per_instance
        # the center of the support costs most; the location is near it
        orders = np.arange(2, 33)
        center = np.array([0.0])
        cost = hush.individual_rdp(row.plan, center, orders) * SETTING.dimension * SETTING.steps
        penalty = (np.log(1e5) - np.log(orders)) / (orders - 1) + np.log1p(-1 / orders)
        assert 0.95 * (cost + penalty).min() < row.per_instance < (cost + penalty).min() * 1.001
    assert local["rectified"] < local["truncated"] <= 2.0, "the truncated law has its least noise"
    assert all(row.per_instance is None for row in rows.values() if row.name not in local)


def test_votes(rows: dict[str, Row]) -> None:
    from hush.pate.argmax import NoisyMax, with_noise

    for kind, noise in (("Gaussian", hush.Gaussian(1.0)), ("Laplace", hush.Laplace(1.0))):
        vote = with_noise(NoisyMax.of_teachers(noise=noise), BUDGET, 200, 200)
        unit = 1.0 if kind == "Gaussian" else math.sqrt(2)
        expected = float(vote.vote.noise.to_plain()["multiplier"]) * unit
        assert rows[f"PATE, {kind} votes"].deviation == pytest.approx(expected, rel=2e-3)


def test_methods_that_do_not_fit_have_no_plan() -> None:
    setting = Setting(records=100, rate=1.0, steps=1, dimension=1, budget=hush.Budget(3.0, 1e-5))
    rows = {row.method: row for row in compare(setting)}
    for method in ("twice sampling", "subspaces, optimal noise"):
        assert rows[method].plan is None
        assert rows[method].deviation == math.inf
    assert rows["beta-DP-SGD, beta 1 (Laplace)"].variance < 1  # one number: Laplace noise is best


def test_the_recommendation_is_the_measured_one() -> None:
    plain = "Recommended: plain DP-SGD"
    public = replace(SETTING, budget=hush.Budget(8.0, 1e-5), public_records=2000)
    assert recommendation(SETTING).startswith(plain)
    assert recommendation(public).startswith("Recommended: subspaces")
    assert recommendation(replace(public, budget=BUDGET)).startswith(plain)
    assert recommendation(replace(public, public_records=0)).startswith(plain)
    # a network of 26,010 parameters loses by subspaces: docs/results/twice-sampling.md
    assert recommendation(replace(public, dimension=26_010)).startswith(plain)

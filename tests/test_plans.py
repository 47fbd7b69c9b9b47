"""Named plans: charged, written and read back, with the values that the papers print."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

import hush
from hush import plans
from hush.core.plan import proof_note, read_plan, write_plan

DIMENSION = 10_240
"""Parameters of a linear layer on 1,024 features: Linf clipping is charged for them."""
PROVED = sorted(set(plans.NAMES) - {"dpsur-published"})


def dimension(name: str) -> int | None:
    return DIMENSION if name in ("rectified", "truncated", "sign") else None


def charge(name: str, steps: int, delta: float = 1e-5) -> float:
    return float(hush.epsilon(plans.NAMES[name].make(), steps, delta, dimension=dimension(name)))


def test_the_names_are_those_of_the_methods() -> None:
    assert list(plans.NAMES) == [
        *("dpsgd", "dpsur", "dpsur-published", "twice", "subspaces"),
        *("beta", "rectified", "truncated", "sign", "banded"),
    ]
    for name, named in plans.NAMES.items():
        assert named.make is getattr(plans, name.replace("-", "_"))
        assert named.summary.endswith(".")
        assert len(named.summary) < 100
        assert "arXiv" in named.paper
        assert "Args:" in (named.make.__doc__ or "")


@pytest.mark.parametrize("name", plans.NAMES)
def test_a_named_plan_is_proved_on_its_page_and_survives_a_file(name: str, tmp_path: Path) -> None:
    plan = plans.NAMES[name].make()
    assert proof_note(plan)
    write_plan(plan, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize("name", PROVED)
def test_a_named_plan_has_an_epsilon_and_can_be_calibrated(name: str) -> None:
    plan = plans.NAMES[name].make()
    assert 0 < charge(name, 10) < math.inf
    budget = hush.Budget(1.0, 1e-5)
    chosen = hush.calibrate(plan, budget, 10, dimension=dimension(name))
    assert float(hush.epsilon(chosen, 10, 1e-5, dimension=dimension(name))) <= 1.0
    assert replace(chosen, noise=plan.noise) == plan


def test_the_published_accounting_says_that_it_is_no_guarantee() -> None:
    guarantee = hush.epsilon(plans.dpsur_published(), 646, 1e-5)
    assert guarantee.basis == "published"
    assert "not proved" in str(guarantee)


def test_the_budgets_that_the_papers_name_are_kept() -> None:
    """Abadi et al. 2016, Figure 2 (1.26 in 100 epochs); Xiao et al. 2023, Tables 1 and 2."""
    assert 0.9 < charge("dpsgd", 10_000) < 1.26
    assert 1.9 < charge("twice", 1500) <= 2
    assert 7.8 < charge("subspaces", 5000) <= 8


def test_the_settings_are_the_papers() -> None:
    # DPSUR, section 6.1.3 and Table 1, Fashion-MNIST at epsilon 3
    dpsur = plans.dpsur()
    release = dpsur.release
    assert isinstance(release, hush.Selective)
    assert (release.clip, release.threshold, release.multiplier) == (0.001, -1.0, 0.8)
    assert (release.rate, release.test, release.accounting) == (256 / 60_000, "mean", "per-trial")
    assert dpsur.sampling == hush.Poisson(2048 / 60_000)
    assert dpsur.clipping == hush.L2(0.1)
    # Geometry of Sensitivity, Table 1 and section 6: d0 = 100, so the cap is a tenth of the norm
    twice = plans.twice(clip_norm=2.0)
    assert twice.sampling == hush.Twice(rate=0.06, coordinate_rate=1 / 3)
    assert twice.clipping == hush.L2Linf(l2=2.0, linf=0.2)
    assert plans.twice(clip_norm=2.0, cap=0.1).clipping == hush.L2Linf(l2=2.0, linf=0.1)
    clipping = plans.subspaces().clipping
    assert isinstance(clipping, hush.Subspaces)
    assert clipping.ranks == (250, 500, 1000, 1500, 291_898 - 3250)
    assert clipping.reference_norm == pytest.approx(1.0)
    assert clipping.bases == hush.Principal(groups=4)
    # generalized Gaussian, Appendix E.2
    beta = plans.beta()
    assert beta.clipping == hush.Lp(p=1.5, norm=0.1)
    assert plans.beta(beta=3.0).clipping == hush.L2(0.1)
    # bounded support, Appendix G, Table 1: C and sigma / C
    assert plans.sign().noise == hush.StochasticSign(4.0)
    assert plans.sign().sampling == hush.FullBatch()


def test_bounds_are_in_standard_deviations() -> None:
    for plan in (plans.rectified(bound=2.0), plans.truncated(bound=2.0)):
        assert isinstance(plan.noise, hush.Rectified | hush.Truncated)
        assert plan.noise.bound == 2 * plan.noise.scale


def test_settings_can_be_replaced() -> None:
    assert plans.rectified(rate=0.1).sampling == hush.Poisson(0.1)
    assert plans.subspaces(coordinate_rate=1.0).sampling == hush.Poisson(0.02)
    clipping = plans.subspaces(parameters=100, ranks=(10,), shares=(4.0, 3.0), cap=0.5).clipping
    assert clipping == hush.Subspaces(
        ranks=(10, 90), l2=(0.8, 0.6), linf=(0.5, 0.5), bases=hush.Principal(groups=4, every=100)
    )
    release = plans.dpsur(test="summed", threshold=0.0).release
    assert isinstance(release, hush.Selective)
    assert (release.test, release.threshold) == ("summed", 0.0)


def test_the_published_plan_takes_the_options_of_dpsur() -> None:
    ours = plans.dpsur(rate=0.1, clip_norm=1.0, multiplier=3.0, test_rate=0.2, threshold=0.0)
    published = plans.dpsur_published(
        rate=0.1, clip_norm=1.0, multiplier=3.0, test_rate=0.2, threshold=0.0
    )
    assert isinstance(ours.release, hush.Selective)
    assert published == replace(ours, release=replace(ours.release, accounting="published"))


def test_ranks_that_leave_no_complement_raise() -> None:
    with pytest.raises(hush.errors.InvalidValue, match="sum 650, which must be below parameters=650"):
        plans.subspaces(parameters=650, ranks=(10, 30, 60, 550))


def test_the_banded_plan_has_the_batch_of_its_rate_and_fitted_coefficients() -> None:
    plan = plans.banded(rate=0.05, bands=4, steps=100, momentum=0.9)
    assert plan.sampling == hush.CyclicPoisson(rate=0.2, cycle=4)
    assert plan.sampling.expected(1000) == pytest.approx(50)
    assert plan.noise == hush.Banded.optimal(bands=4, multiplier=1.0, steps=100, momentum=0.9)
    with pytest.raises(hush.errors.InvalidValue, match="at most bands=3"):
        plans.banded(rate=0.3, bands=4)

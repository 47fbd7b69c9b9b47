"""Composition of steps: RDP or dominating pairs, groups and replacement, and questions that raise."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

import hush
from hush import plans
from hush.accounting import composition
from hush.accounting.attacker import Attacker
from hush.accounting.composition import epsilon_upper, requires_rdp
from hush.accounting.epsilon import compose, delta
from hush.accounting.numerics import Array
from hush.accounting.pld import accountant, analytic_gaussian
from hush.accounting.steps import ComposableStep, SampledGaussian, SampledNoise
from hush.core.errors import Unproved
from hush.core.guarantee import Adjacency

REPLACE = hush.Neighbours.REPLACE
POISSON = hush.Poisson(0.05)
GAUSSIAN = hush.Plan(sampling=POISSON, clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
VOTES = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.clipping.Entries(changed=2), noise=hush.Laplace(20.0)
)
MEAN_TEST = hush.Selective(rate=0.05, clip=0.01, multiplier=3.0, test="mean")


def plan(**parts: object) -> hush.Plan:
    return hush.Plan(**{**{name: getattr(GAUSSIAN, name) for name in _PARTS}, **parts})


_PARTS = ("sampling", "clipping", "noise", "release")
PLANS = [
    GAUSSIAN,
    plan(sampling=hush.FullBatch(), noise=hush.Gaussian(20.0)),
    plan(clipping=hush.Lp(p=1.0, norm=1.0), noise=hush.Laplace(2.0)),
    plan(clipping=hush.Lp(p=1.5, norm=1.0), noise=hush.GeneralizedGaussian(beta=1.5, multiplier=4.0)),
    plan(
        sampling=hush.FullBatch(),
        clipping=hush.Lp(p=1.5, norm=1.0),
        noise=hush.GeneralizedGaussian(beta=1.5, multiplier=60.0),
    ),
    plan(sampling=hush.Twice(rate=0.05, coordinate_rate=0.5), clipping=hush.L2Linf(l2=1.0, linf=0.1)),
    plan(noise=hush.Rectified(scale=1.0, bound=3.0)),
    plan(release=MEAN_TEST),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("charged", PLANS, ids=str)
def test_larger_changes_cost_more_and_bounds_agree(charged: hush.Plan) -> None:
    removed = [Adjacency(group=size) for size in (1, 2, 3)]
    changes = [*removed, *(Adjacency(group=size, neighbours=REPLACE) for size in (1, 2))]
    bounds = [compose({charged: 10}, 1e-5, None, change).epsilon for change in changes]
    for smaller, larger in ((0, 1), (1, 2), (0, 3), (3, 4), (1, 4)):
        assert bounds[smaller].lower <= bounds[larger].upper
        assert bounds[smaller].upper <= bounds[larger].upper * (1 + 1e-3)
    for change, bound in zip(changes, bounds, strict=True):
        assert math.isfinite(bound.upper)
        curve = delta({charged: 10}, bound.upper, None, change)
        assert curve.lower <= 1e-5
        assert curve.upper <= 1.1e-5


@pytest.mark.parametrize(
    ("change", "shift"), [(Adjacency(group=3), 3), (Adjacency(group=2, neighbours=REPLACE), 4)]
)
def test_without_sampling_the_shift_is_multiplied(change: Adjacency, shift: int) -> None:
    full = plan(sampling=hush.FullBatch(), noise=hush.Gaussian(20.0))
    exact = analytic_gaussian.epsilon(shift * math.sqrt(10) / 20.0, 1e-5)
    found = compose({full: 10}, 1e-5, None, change).epsilon
    assert found.upper == pytest.approx(exact.upper, rel=1e-9)
    assert found.lower == pytest.approx(exact.lower, rel=1e-9)


def test_the_group_property_bounds_what_is_known_exactly() -> None:
    one = {SampledGaussian(1.0, 10.0): 10}
    for changes in (2, 3, 5):
        exact = analytic_gaussian.epsilon(changes * math.sqrt(10) / 10, 1e-5).lower
        chained = composition.chained_epsilon(lambda d: accountant.epsilon(one, d).upper, changes, 1e-5)
        assert exact <= chained <= 2 * exact
        assert changes * accountant.epsilon(one, 1e-5).upper < exact, "m times epsilon is no bound"
        curve = composition.chained_delta(lambda e: accountant.delta(one, e).upper, changes, chained)
        assert curve <= 1e-5 * (1 + 1e-6)
        assert curve >= accountant.delta({SampledGaussian(1.0, 10.0 / changes): 10}, chained).lower


def test_guarantees_name_the_relation_and_the_group() -> None:
    assert "zero-out 5 records together" in str(hush.epsilon(GAUSSIAN, 3, 1e-5, group=5))
    replaced = hush.epsilon(GAUSSIAN, 3, 1e-5, neighbours=REPLACE)
    assert "replace one record" in str(replaced)
    assert hush.Guarantee.from_plain(replaced.to_plain()) == replaced


@pytest.mark.slow
def test_attackers_of_groups_do_better() -> None:
    counts = {GAUSSIAN: 20}
    one, five = Attacker(counts), Attacker(counts, adjacency=Adjacency(group=5))
    swapped = Attacker(counts, adjacency=Adjacency(group=1, neighbours=REPLACE))
    assert one.advantage < swapped.advantage < five.advantage
    assert one.true_positive_rate(0.01) < five.true_positive_rate(0.01)
    assert "5 records together took part" in str(five)
    assert "which of two records took part" in str(swapped)


def test_ledgers_charge_groups_and_know_how_many_records_there_are() -> None:
    ledger = hush.Ledger()
    ledger.charge(GAUSSIAN, run="run", step=1, release="0" * 64, records=50)
    assert ledger.epsilon(1e-5, group=3).epsilon == hush.epsilon(GAUSSIAN, 1, 1e-5, group=3).epsilon
    swapped = ledger.epsilon(1e-5, neighbours=REPLACE)
    assert swapped.neighbours is REPLACE
    assert swapped.records == 50
    with pytest.raises(Unproved, match="number of slots, which is public here"):
        ledger.epsilon(1e-5, neighbours=hush.Neighbours.ADD_REMOVE)


@dataclass(frozen=True)
class _Disclosure(ComposableStep):
    """A step that declares no more than it must: it publishes the record."""

    def rdp(self, orders: Array) -> Array:
        return np.full(len(orders), np.inf)


def test_a_mechanism_without_a_known_pair_is_never_left_out_of_the_charge() -> None:
    steps: dict[ComposableStep, int] = {SampledGaussian(0.1, 1.0): 1, SampledNoise(0.1, 1.0, 1.0): 1}
    assert not requires_rdp(steps)
    steps[_Disclosure()] = 1
    assert requires_rdp(steps)
    assert epsilon_upper(steps, 1e-5) == math.inf


def test_sampled_laplace_and_selective_steps_compose() -> None:
    """The RDP of subsampled Laplace noise is known at whole orders alone, that of trials at any."""
    laplace = plans.beta(beta=1.0, rate=0.1, multiplier=5.0)
    release = hush.Selective(rate=0.1, clip=1.0, multiplier=1.0, test="mean")
    selective = replace(plans.dpsgd(rate=0.1, multiplier=2.0), release=release)
    composed = compose({laplace: 20, selective: 20}, 1e-5).epsilon.upper
    assert compose({selective: 20}, 1e-5).epsilon.upper < composed
    # basic composition: epsilons and deltas add
    assert composed < sum(compose({plan: 20}, 5e-6).epsilon.upper for plan in (laplace, selective))


@pytest.mark.parametrize("change", [Adjacency(group=2), Adjacency(neighbours=REPLACE)], ids=str)
@pytest.mark.parametrize(
    "charged",
    [
        VOTES,
        plan(release=hush.BestOf(steps=4, mean=3.0)),
        plan(release=replace(MEAN_TEST, accounting="published")),
    ],
    ids=str,
)
def test_a_change_without_a_proved_cost_is_refused(charged: hush.Plan, change: Adjacency) -> None:
    assert hush.epsilon(charged, 1, 1e-5).epsilon.upper > 0
    with pytest.raises(Unproved, match=r"no proved cost for group=.*pass group=1"):
        compose({charged: 1}, 1e-5, None, change)

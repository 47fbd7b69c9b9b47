"""group= and neighbours=: every kind of plan, the group property, and what is refused."""

import math
from collections.abc import Callable

import pytest

import hush
from hush.accounting import attacker, composition
from hush.accounting.attacker import Attacker
from hush.accounting.calibrate import max_rate, max_steps
from hush.accounting.epsilon import compose, delta
from hush.accounting.pld import accountant, analytic_gaussian
from hush.accounting.steps import SampledGaussian
from hush.core.errors import InvalidValue, Unproved
from hush.core.guarantee import Adjacency

REPLACE = hush.Neighbours.REPLACE
BUDGET = hush.Budget(epsilon=3.0, delta=1e-5)
POISSON = hush.Poisson(rate=0.05)
GAUSSIAN = hush.Plan(sampling=POISSON, clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0))
VOTES = hush.Plan(
    sampling=hush.FullBatch(),
    clipping=hush.clipping.Entries(changed=2),
    noise=hush.Laplace(multiplier=20.0),
)
MEAN_TEST = hush.Selective(rate=0.05, clip=0.01, multiplier=3.0, test="mean")


def plan(**parts: object) -> hush.Plan:
    return hush.Plan(**{**{name: getattr(GAUSSIAN, name) for name in _PARTS}, **parts})


_PARTS = ("sampling", "clipping", "noise", "release")
PLANS = [
    GAUSSIAN,
    plan(sampling=hush.FullBatch(), noise=hush.Gaussian(multiplier=20.0)),
    plan(clipping=hush.Lp(p=1.0, norm=1.0), noise=hush.Laplace(multiplier=2.0)),
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
    full = plan(sampling=hush.FullBatch(), noise=hush.Gaussian(multiplier=20.0))
    exact = analytic_gaussian.epsilon(shift * math.sqrt(10) / 20.0, 1e-5)
    found = compose({full: 10}, 1e-5, None, change).epsilon
    assert found.upper == pytest.approx(exact.upper, rel=1e-9)
    assert found.lower == pytest.approx(exact.lower, rel=1e-9)


def test_pairs_do_not_wait_for_the_group_property() -> None:
    for charged in (GAUSSIAN, PLANS[2]):
        bound = hush.epsilon(charged, 10, 1e-5, group=3, neighbours=REPLACE).epsilon
        assert bound.upper - bound.lower < 2e-3


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


def test_the_group_property_ends_where_nothing_is_bounded() -> None:
    assert composition.chained_epsilon(lambda d: math.inf, 2, 1e-5) == math.inf
    assert composition.chained_epsilon(lambda d: 0.0, 2, 1e-5) <= 2e-3
    assert composition.chained_delta(lambda e: 0.3, 5, 2000.0) == 1.0


def test_group_of_one_is_what_it_was() -> None:
    alone = hush.epsilon(GAUSSIAN, 100, 1e-5)
    assert hush.epsilon(GAUSSIAN, 100, 1e-5, group=1) == alone
    added = hush.epsilon(GAUSSIAN, 100, 1e-5, neighbours=hush.Neighbours.ADD_REMOVE)
    assert added.epsilon == alone.epsilon
    assert added.neighbours == "add/remove"


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


def test_rarely_drawn_groups_cost_nothing_at_a_larger_delta() -> None:
    rare = plan(sampling=hush.Poisson(rate=1e-8), noise=hush.Gaussian(multiplier=0.5))
    assert hush.epsilon(rare, 10, 1e-5, group=10).epsilon.upper == 0


@pytest.mark.parametrize("group", [0, -1, 2.5, math.nan, "5", True, None, 10**6])
def test_bad_groups_are_refused(group: object) -> None:
    with pytest.raises(InvalidValue, match="group="):
        hush.epsilon(GAUSSIAN, 10, 1e-5, group=group)  # type: ignore[arg-type]


def test_other_bad_questions_are_refused() -> None:
    with pytest.raises(InvalidValue, match="neighbours='swap'"):
        hush.epsilon(GAUSSIAN, 10, 1e-5, neighbours="swap")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="published"):
        hush.epsilon(GAUSSIAN, 10, 1e-5, mode="published", group=2)
    with pytest.raises(InvalidValue, match="at most the 3 units"):
        Adjacency(group=4).check_records(3)


def test_votes_under_laplace_noise_are_refused_for_groups() -> None:
    assert hush.epsilon(VOTES, 10, 1e-5).epsilon.upper > 0
    for change in (Adjacency(group=2), Adjacency(group=1, neighbours=REPLACE)):
        with pytest.raises(Unproved, match="Gaussian noise"):
            compose({VOTES: 10}, 1e-5, None, change)


def test_ledgers_charge_groups_and_know_how_many_records_there_are() -> None:
    ledger = hush.Ledger()
    ledger.charge(GAUSSIAN, run="run", step=1, release="0" * 64, records=50)
    assert ledger.epsilon(1e-5, group=3).epsilon == hush.epsilon(GAUSSIAN, 1, 1e-5, group=3).epsilon
    swapped = ledger.epsilon(1e-5, neighbours=REPLACE)
    assert swapped.neighbours is REPLACE
    assert swapped.records == 50
    with pytest.raises(InvalidValue, match="at most the 50 units"):
        ledger.epsilon(1e-5, group=51)
    with pytest.raises(Unproved, match="number of slots is public here"):
        ledger.epsilon(1e-5, neighbours=hush.Neighbours.ADD_REMOVE)


def test_an_attacker_without_a_finite_epsilon_is_still_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds by the group property may have no finite end; any epsilon bounds the error rates."""
    expected = Attacker({GAUSSIAN: 20}).true_positive_rate(0.01)
    monkeypatch.setattr(attacker, "upper_epsilon", lambda *_: math.inf)
    bounded = Attacker({GAUSSIAN: 20}).true_positive_rate(0.01)
    assert bounded == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda wrong: hush.calibrate(GAUSSIAN, BUDGET, 10, adjacency=wrong),
        lambda wrong: max_steps(GAUSSIAN, BUDGET, adjacency=wrong),
        lambda wrong: max_rate(GAUSSIAN, BUDGET, 10, adjacency=wrong),
        lambda wrong: compose({GAUSSIAN: 10}, 1e-5, adjacency=wrong),
        lambda wrong: delta({GAUSSIAN: 10}, 1.0, adjacency=wrong),
        lambda wrong: Attacker({GAUSSIAN: 10}, adjacency=wrong),
    ],
)
@pytest.mark.parametrize("wrong", ["replace", 5, None])
def test_what_is_no_adjacency_is_refused_with_one(
    ask: Callable[[object], object], wrong: object
) -> None:
    said = rf'adjacency={wrong!r} must be an Adjacency, .*hush\.Adjacency\(neighbours="replace"\)'
    with pytest.raises(InvalidValue, match=said):
        ask(wrong)

"""Correlated noise in private steps: its law, its charge, and the groups of cyclic sampling."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

import hush
from hush.accounting.epsilon import deltas
from hush.core.errors import InvalidValue, LedgerError, Unproved
from hush.noise.correlated import Banded
from tests import forked
from tests.noise.test_correlated import dense
from tests.training.helpers import plan_of, step_of
from tests.training.test_resume import SCRIPT, assert_same_end, charges

Array = npt.NDArray[np.float64]
STRATEGY = (1.0, 0.6, 0.3)
NOISE = Banded(multiplier=1.5, strategy=STRATEGY)
RECORDS = 12


def banded(rate: float = 1.0, cycle: int = 3, noise: Banded = NOISE) -> hush.Plan:
    return plan_of(hush.CyclicPoisson(rate=rate, cycle=cycle), noise=noise)


def releases(step: hush.PrivateStep, data: Any, steps: int, **options: Any) -> Tensor:
    """Noisy sums of several steps, a row per step."""
    rows = []
    for batch in step.batches(data, steps=steps, **options):
        step(batch)
        assert step.update is not None
        rows.append(step.update * step.plan.sampling.expected(step.records))
    return torch.stack(rows)


def quiet(size: int = 30_000, seed: int | None = 0, **options: Any) -> tuple[hush.PrivateStep, Any]:
    """A step whose clipped sums are zero, and its data."""
    model = nn.Linear(size, 1, bias=False)
    step = step_of(model, banded(), nn.MSELoss(), seed=seed, records=RECORDS, **options)
    return step, (torch.zeros(RECORDS, size), torch.ones(RECORDS, 1))


def covariance(rows: Tensor) -> Array:
    return np.asarray((rows @ rows.T / rows.shape[1]).numpy())


def expected_covariance(steps: int) -> Array:
    inverse = np.linalg.inv(dense(NOISE.strategy, steps))
    return np.asarray(NOISE.multiplier**2 * inverse @ inverse.T)


def test_the_noise_has_the_law_of_the_factorization() -> None:
    step, data = quiet()
    found, expected = covariance(releases(step, data, 8)), expected_covariance(8)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    slack = 6 * (2 / 30_000) ** 0.5
    assert np.abs((found - expected) / scale).max() < slack
    independent = np.diag(np.diag(expected))
    assert np.abs((independent - expected) / scale).max() > 10 * slack


def test_a_resumed_run_continues_its_noise_bit_for_bit() -> None:
    step, data = quiet(50)
    releases(step, data, 4)
    state = step.state_dict()
    rest = releases(step, data, 5)
    other, _ = quiet(50, ledger=step.ledger)
    other.load_state_dict(state)
    assert torch.equal(releases(other, data, 5), rest)
    assert step.ledger.counts == {step.plan: 9}
    # a broken version, which forgets the noise, releases other values under the same noise
    broken, _ = quiet(50, ledger=step.ledger)
    broken.load_state_dict({**state, "past_noise": torch.zeros_like(state["past_noise"])})
    with pytest.raises(LedgerError, match="already released with another value"):
        releases(broken, data, 1)


def test_a_state_is_not_changed_by_later_steps() -> None:
    step, data = quiet(5)
    releases(step, data, 2)
    state = step.state_dict()
    before = state["past_noise"].clone()
    releases(step, data, 3)
    assert torch.equal(state["past_noise"], before)


def test_a_reseeded_run_begins_a_new_matrix_and_a_new_charge() -> None:
    step, data = quiet()
    releases(step, data, 4)
    assert step.ledger.counts == {step.plan: 6}
    step.reseed()
    found, expected = covariance(releases(step, data, 4)), expected_covariance(4)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((found - expected) / scale).max() < 6 * (2 / 30_000) ** 0.5
    assert step.ledger.counts == {step.plan: 6 + 6}


def test_a_step_that_raises_does_not_change_the_noise_of_its_repetition() -> None:
    step, data = quiet()
    rows = [releases(step, data, 2)]
    for batch in step.batches(data, steps=2):
        step.private_gradient(batch)  # interrupted before its charge
        break
    rows.append(releases(step, data, 3))
    found, expected = covariance(torch.cat(rows)), expected_covariance(5)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((found - expected) / scale).max() < 6 * (2 / 30_000) ** 0.5


def test_a_record_moves_the_steps_of_its_group_alone() -> None:
    """The releases with and without one record, under the same noise, differ in every third step."""
    for slot in (0, 4, 11):
        present = torch.zeros(RECORDS, dtype=torch.bool)
        present[slot] = True
        data = torch.ones(RECORDS, 2), torch.full((RECORDS, 1), 100.0)
        rows = []
        for mask in (present, torch.zeros_like(present)):
            torch.manual_seed(0)
            model = nn.Linear(2, 1, bias=False)
            step = step_of(model, banded(), nn.MSELoss(), seed=0, records=RECORDS, lr=1e-9)
            rows.append(releases(step, data, 9, present=mask))
        moved = (rows[0] - rows[1]).norm(dim=1)
        assert torch.equal(moved > 1e-6, torch.arange(9) % 3 == slot % 3)
        # what the record moves in C x: one column per participation, disjoint, of norm 1 at most
        changes = torch.from_numpy(dense(NOISE.strategy, 9)) @ (rows[0] - rows[1])
        blocks = changes[slot % 3 : slot % 3 + 6].reshape(2, -1).norm(dim=1)
        assert (blocks <= 1 + step.rounding).all()
        assert (blocks > 1 - 1e-4).all()


def true_delta(matrix: Array, patterns: list[tuple[int, ...]], rate: float, epsilon: float) -> float:
    """Delta of the explicit mechanism C x + z between no record and one, by Monte Carlo.

    The record has a contribution of 1 in each step of its pattern in which it is drawn. The largest
    over the patterns and both directions.
    """
    generator, largest = np.random.default_rng(0), 0.0
    draws = 400_000
    for pattern in patterns:
        subsets = list(itertools.product((0, 1), repeat=len(pattern)))
        chances = np.array([np.prod([rate if c else 1 - rate for c in s]) for s in subsets])
        shifts = np.array([matrix[:, list(pattern)] @ s for s in subsets])
        for present in (True, False):
            z = NOISE.multiplier * generator.standard_normal((draws, len(matrix)))
            if present:
                z += shifts[generator.choice(len(subsets), draws, p=chances)]
            squares = (shifts**2).sum(1)
            ratios = np.exp((z @ shifts.T - squares / 2) / NOISE.multiplier**2) @ chances
            losses = np.log(ratios) * (1 if present else -1)
            largest = max(largest, float(np.maximum(0, -np.expm1(epsilon - losses)).mean()))
    return largest


PATTERNS = [tuple(range(group, 6, 3)) for group in range(3)]


@pytest.mark.parametrize("rate", [0.5, 1.0])
@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_the_charge_is_that_of_the_explicit_mechanism(rate: float, epsilon: float) -> None:
    matrix = dense(NOISE.strategy, 6)
    charged = deltas({banded(rate): 6}, [epsilon])[0].upper
    true = true_delta(matrix, PATTERNS, rate, epsilon)
    assert true == pytest.approx(charged, rel=0.02)
    # broken versions cost more than the charge: a wider column, groups that are not of slots, and more
    # bands than the cycle
    wide = true_delta(1.05 * matrix, PATTERNS, rate, epsilon)
    every_step = true_delta(matrix, [tuple(range(6))], rate, epsilon)
    short_cycle = true_delta(matrix, [(0, 2, 4)], rate, epsilon)
    halved = deltas({banded(rate): 9}, [epsilon])[0].upper
    assert wide > charged * 1.02
    assert every_step > charged * 1.5
    assert short_cycle > halved * 1.02, "three participations two steps apart, with three bands"


def test_sensitivity_by_enumeration_of_participations() -> None:
    """Every pattern of at most one participation in three steps: disjoint columns of norm at most 1."""
    matrix = dense(NOISE.strategy, 9)
    for pattern in itertools.product((0, 1), repeat=9):
        steps = [step for step, drawn in enumerate(pattern) if drawn]
        if any(later - earlier < 3 for earlier, later in itertools.pairwise(steps)):
            continue
        gram = matrix[:, steps].T @ matrix[:, steps]
        np.testing.assert_array_equal(gram, np.diag(np.diag(gram)))
        assert (np.diag(gram) <= 1 + 1e-15).all()


def test_a_full_batch_cycle_costs_the_gaussian_mechanism() -> None:
    mu = np.sqrt(4) / NOISE.multiplier
    exact = norm.cdf(mu / 2 - 1 / mu) - np.e * norm.cdf(-mu / 2 - 1 / mu)
    assert deltas({banded(): 12}, [1.0])[0].upper == pytest.approx(exact, rel=1e-4)


def test_more_bands_than_the_cycle_raise() -> None:
    with pytest.raises(InvalidValue, match=r"3 steps.*take part again after 2"):
        hush.epsilon(banded(cycle=2), 4, 1e-5)
    with pytest.raises(InvalidValue, match="take part again after 2"):
        step_of(nn.Linear(2, 1), banded(cycle=2), nn.MSELoss(), records=RECORDS)


@pytest.mark.parametrize(
    ("sampling", "clipping", "release"),
    [
        (hush.Poisson(0.1), None, None),
        (hush.FullBatch(), None, None),
        (hush.Twice(rate=0.1, coordinate_rate=0.5), None, None),
        (None, hush.Quantile(0.5), None),
        (None, None, hush.Selective(rate=0.1, clip=1.0, multiplier=1.0)),
    ],
)
def test_combinations_without_a_proof_raise(sampling: Any, clipping: Any, release: Any) -> None:
    cyclic = hush.CyclicPoisson(rate=0.1, cycle=4)
    plan = plan_of(sampling or cyclic, clipping, noise=NOISE, release=release)
    with pytest.raises(Unproved, match="has no proved guarantee"):
        hush.epsilon(plan, 4, 1e-5)


def test_rounding_of_earlier_sums_is_assumed() -> None:
    assert hush.epsilon(banded(), 3, 1e-5).arithmetic == "assumed"
    step, data = quiet(4)
    releases(step, data, 1)
    assert step.spent(1e-5).arithmetic == "assumed"


def test_users_are_slots() -> None:
    """The groups are of users: a user's records take part in one step of a cycle."""
    ids = torch.arange(24) % 8
    model = nn.Linear(2, 1)
    step = step_of(model, banded(cycle=4), nn.MSELoss(), units=hush.Units(owners=ids, per_unit=3))
    taken = []
    for batch in step.batches((torch.rand(24, 2), torch.rand(24, 1)), steps=8):
        taken.append(set(ids[batch.indices.cpu()].tolist()))
        step(batch)
    assert taken == [{0, 4}, {1, 5}, {2, 6}, {3, 7}] * 2


def test_other_trained_parameters_begin_a_new_matrix() -> None:
    step, data = quiet(6)
    releases(step, data, 2)
    step.model.register_parameter("more", nn.Parameter(torch.zeros(3)))
    assert step.past_noise is not None
    total = torch.zeros(9, dtype=torch.float64)
    step.past_noise.mix(total, 2)
    assert step.past_noise.vectors.shape == (3, 9)
    assert not step.past_noise.vectors.any()


CYCLIC_SCRIPT = SCRIPT.replace("hush.Poisson(0.25)", "hush.CyclicPoisson(rate=0.75, cycle=3)").replace(
    "hush.Gaussian(1.0)", "hush.Banded(multiplier=1.0, strategy=(1.0, 0.5, 0.25))"
)


def test_a_killed_run_ends_like_one_that_was_not(tmp_path: Path) -> None:
    assert CYCLIC_SCRIPT != SCRIPT
    whole = tmp_path / "whole"
    events = forked.run(CYCLIC_SCRIPT, str(whole), "0")
    assert events.returncode == 0, events.stderr
    for share in (0.75, 0.85):
        directory = tmp_path / f"run {share}"
        forked.run(CYCLIC_SCRIPT, str(directory), str(int(int(events.stdout) * share)))
        assert (directory / "metrics.jsonl").read_text(), "after a checkpoint within the run"
        assert 0 < len(charges(directory)) < 12
        resumed = forked.run(CYCLIC_SCRIPT, str(directory), "0")
        assert resumed.returncode == 0, resumed.stderr
        assert_same_end(directory, whole)

"""Private selection end to end: what is charged, released and left behind."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from scipy import stats

import hush
from hush.accounting.selection import draw_trials, trial_count
from hush.core.errors import CheckpointError, DataError, InvalidValue, LedgerError, Unproved
from hush.training.trial import TuningTrial
from tests.accounting import selection_oracle as oracle
from tests.training.helpers import plan_of as plan_with
from tests.training.helpers import step_of, train

PLAN = plan_with(hush.Poisson(0.25))
BUDGET = hush.Budget(epsilon=3.0, delta=1e-3)
SPACE = {"learning_rate": hush.LogUniform(0.1, 10.0), "clip": hush.Choice(0.5, 1.0)}
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
Settings = dict[str, Any]
MANY = next(
    seed
    for seed in range(99)
    if (pick := Random(int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed)))))
    and draw_trials(trial_count(hush.BestOf(steps=4, mean=3.0)), pick.randrange) == 4
)
"""A seed of four trials."""


@pytest.fixture(autouse=True)
def calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration has tests of its own; here the same plans come again and again."""

    def cached(plan: hush.Plan, budget: hush.Budget, steps: int, **settings: Any) -> hush.Plan:
        if (plan, budget) not in _CALIBRATED:
            _CALIBRATED[plan, budget] = hush.calibrate(plan, budget, steps, **settings)
        return _CALIBRATED[plan, budget]

    monkeypatch.setattr("hush.training.tune.calibrate", cached)


_CALIBRATED: dict[tuple[hush.Plan, hush.Budget], hush.Plan] = {}


def plan_of(settings: Settings) -> hush.Plan:
    return replace(PLAN, clipping=hush.L2(settings["clip"]))


def trained(settings: Settings, trial: TuningTrial, steps: int | None = None) -> torch.nn.Module:
    model = torch.nn.Linear(3, 2)
    options: dict[str, Any] = {"budget": trial.budget, "ledger": trial.ledger}
    options |= {"lr": settings["learning_rate"], "steps": trial.steps if steps is None else steps}
    train(model, trial.plan, (X[:40], Y[:40]), **options)
    return model


def fit(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
    return trained(settings, trial), settings["learning_rate"]


def fit_privately(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
    model = trained(settings, trial)
    return model, trial.score((model(X[40:]).argmax(1) == Y[40:]).double())


def tune(fit: Any = fit, seed: int | None = 3, **changed: Any) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    settings = {"plan": plan_of, "steps": 4, "budget": BUDGET, "mean": 3.0, "generator": generator}
    return hush.tune(fit, changed.pop("space", SPACE), **{**settings, **changed})


def test_the_best_trial_and_one_charge_come_back() -> None:
    seen: list[tuple[float, torch.nn.Module]] = []

    def remembered(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
        model, score = fit(settings, trial)
        assert trial.plan.clipping == hush.L2(settings["clip"])
        seen.append((score, model))
        return model, score

    ledger = hush.Ledger()
    tuned = tune(remembered, seed=MANY, ledger=ledger)
    assert len(seen) > 1
    assert tuned.model is max(seen, key=lambda each: each[0])[1]
    assert (tuned.score, tuned.settings["learning_rate"]) == (max(seen)[0], max(seen)[0])
    assert ledger.counts == {tuned.plan: 1}
    assert 2.9 < float(tuned.guarantee) <= 3.0
    assert float(tuned.guarantee) == hush.epsilon(tuned.plan, 1, BUDGET.delta).epsilon.upper
    assert tuned.guarantee.randomness == "seeded", "their number can be worked out from the seed"
    # a trial alone costs less than the whole by what the choice costs
    alone = replace(tuned.plan, release=hush.Always())
    assert hush.epsilon(alone, 4, BUDGET.delta).epsilon.upper < 2.5


@pytest.mark.slow
def test_what_is_released_has_the_law_that_is_charged() -> None:
    """Normal scores: the best one's distribution function is E Phi(x)^K, and of no fixed number."""

    def normal(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
        trial.ledger.charge(trial.plan, run="r", step=1, release="x")
        return None, float(torch.randn((), generator=trial.generator))

    released = [tune(normal, seed=seed).score for seed in range(300)]
    number = oracle.law("negative-binomial", 1.0, 3.0)
    assert stats.kstest(released, lambda x: number.generating(stats.norm.cdf(x))).pvalue > 1e-3
    assert stats.kstest(released, lambda x: stats.norm.cdf(x) ** 3).pvalue < 1e-4
    assert stats.kstest(released, stats.norm.cdf).pvalue < 1e-4


def test_a_score_on_held_out_records_is_noisy_and_charged() -> None:
    tuned = tune(fit_privately, score_noise=5.0)
    assert tuned.plan.release.score == 5.0
    assert tuned.score * 20 != round(tuned.score * 20)
    assert tuned.guarantee.randomness == "seeded"

    def silent(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
        return trained(settings, trial), 0.5

    def twice(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
        trial.score(torch.ones(3))
        return trained(settings, trial), trial.score(torch.ones(3))

    def unbounded(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
        return trained(settings, trial), trial.score(torch.full((3,), 1.5))

    for wrong, error in ((silent, LedgerError), (twice, LedgerError), (unbounded, DataError)):
        with pytest.raises(error):
            tune(wrong, score_noise=5.0)
    with pytest.raises(InvalidValue, match="held-out private records have"):
        tune(fit_privately)


def uncharged(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
    return torch.nn.Linear(3, 2), 1.0


def too_many(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
    for step in range(1, 6):
        trial.ledger.charge(trial.plan, run="r", step=step, release="x")
    return None, 1.0


def less_noise(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
    quiet = replace(trial.plan, noise=hush.Gaussian(0.1))
    trial.ledger.charge(quiet, run="r", step=1, release="x")
    return None, 1.0


def voided(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
    trial.ledger.charge(trial.plan, run="r", step=1, release="x")
    trial.ledger.void("the model was moved")
    return None, 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (uncharged, "has no charge"),
        (too_many, "ran 5 steps, but is charged for 4"),
        (less_noise, "differs from its plan"),
        (voided, "is void"),
    ],
)
def test_a_trial_that_does_more_than_is_charged_is_refused(
    wrong: Callable[..., Any], message: str
) -> None:
    ledger = hush.Ledger()
    with pytest.raises(LedgerError, match=message):
        tune(wrong, ledger=ledger)
    assert not ledger.counts


@pytest.mark.parametrize("whole", [True, False])
def test_trials_that_share_a_trained_body_are_refused(whole: bool) -> None:
    """The steps of earlier trials would be in the released weights, and not in the charge."""
    body = torch.nn.Linear(3, 2)
    steps = 0

    def shared(settings: Settings, trial: TuningTrial, *, copied: bool) -> tuple[Any, float]:
        nonlocal steps
        own = copy.deepcopy(body) if copied else body
        model = own if whole else torch.nn.Sequential(own, torch.nn.Linear(2, 2))
        step = step_of(model, trial.plan, lr=settings["learning_rate"], records=60, ledger=trial.ledger)
        for batch in step.batches((X, Y), steps=trial.steps):
            step(batch)
            steps += 1
        return model, settings["learning_rate"]

    ledger = hush.Ledger()
    with pytest.raises(LedgerError, match=r"trials share.*copy\.deepcopy"):
        tune(partial(shared, copied=False), seed=MANY, ledger=ledger)
    assert not ledger.counts
    steps = 0
    tune(partial(shared, copied=True), seed=MANY)
    assert steps == 16, "four trials of four steps"


def test_the_cost_of_a_shared_body_in_the_documentation() -> None:
    """25 trials of 30 steps on one body, as charged and as taken."""
    budget = hush.Budget(epsilon=3.0, delta=1e-5)
    search = replace(PLAN, release=hush.BestOf(steps=30, mean=10))
    search = hush.calibrate(search, budget, 1)
    taken = hush.epsilon(replace(search, release=hush.Always()), 25 * 30, budget.delta).epsilon
    text = (Path(hush.__file__).parents[2] / "docs/pitfalls.md").read_text()
    assert f"charged epsilon 3 and costs {taken.lower:.4g}" in text


def charged_alone(settings: Settings, trial: TuningTrial) -> tuple[Any, float]:
    trial.ledger.charge(trial.plan, run="r", step=1, release="x")
    return torch.nn.Linear(2, 1), settings["learning_rate"]


def test_a_folder_holds_the_winner_and_nothing_of_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    tuned = tune(charged_alone, directory=folder)
    assert {path.name for path in folder.iterdir()} == {
        *("anchor.json", "ledger.jsonl", "plan.toml", "tuned.json", "model.safetensors")
    }
    assert json.loads((folder / "tuned.json").read_text())["settings"] == tuned.settings
    with hush.Ledger(folder / "ledger.jsonl", read_only=True) as ledger:
        assert ledger.epsilon() == tuned.guarantee
        assert sum(ledger.counts.values()) == 1
    with pytest.raises(CheckpointError, match="already holds"):
        tune(charged_alone, directory=folder)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"space": lambda scores: {"lr": 1.0}}, InvalidValue, "Bayesian optimisation"),
        ({"space": {"lr": [1.0, 2.0]}}, InvalidValue, "must be a range with a string name"),
        ({"space": {}}, InvalidValue, "must be a dictionary of ranges"),
        ({"plan": replace(PLAN, release=hush.BestOf(steps=2))}, Unproved, "Leave release out"),
        ({"workers": 0}, InvalidValue, "processes"),
        ({"directory": "run", "ledger": hush.Ledger()}, CheckpointError, "its own ledger"),
        (
            {"plan": lambda each: replace(PLAN, sampling=hush.Poisson(each["clip"] / 2))},
            Unproved,
            "one sampling rate",
        ),
    ],
)
def test_what_is_not_proved_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tune(**{"seed": MANY, **changed})

"""The estimators: budgets kept and charged, refusals, and scikit-learn's own ways of using them."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.ensemble import AdaBoostRegressor, BaggingClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import hush
from hush.core.errors import BudgetExceeded, DataError, InvalidValue, Unsupported
from hush.integrations.sklearn import Categorical, Numeric, PrivateClassifier, PrivateRegressor

UNIT = Numeric(low=-1, high=1)
SGD: dict[str, Any] = {"solver": "sgd", "steps": 20}
SETTINGS: list[dict[str, Any]] = [
    {"solver": "least_squares"},
    SGD,
    {**SGD, "hidden_layer_sizes": (8,)},
]


def numbers(records: int = 3000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, a linear target, and which side of a plane each is on."""
    draw = np.random.default_rng(seed)
    rows = draw.uniform(-1, 1, (records, 3))
    target = rows @ [0.4, -0.3, 0.2] + 0.1
    return rows, target, (target > 0.1).astype(int)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_classifier_learns_within_its_budget(settings: dict[str, Any]) -> None:
    rows, _, labels = numbers()
    model = PrivateClassifier(UNIT, (0, 1), epsilon=2.0, random_state=1, **settings).fit(rows, labels)
    assert model.score(*numbers(seed=9)[::2]) > 0.9
    probabilities = model.predict_proba(rows)
    assert probabilities.sum(1) == pytest.approx(np.ones(len(rows)))
    assert (probabilities > 0).all()
    assert np.array_equal(model.classes_[probabilities.argmax(1)], model.predict(rows))
    assert np.array_equal(model.decision_function(rows) > 0, model.predict(rows) == 1)
    check_charges(model, settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_regressor_learns_within_its_budget(settings: dict[str, Any]) -> None:
    rows, target, _ = numbers()
    model = PrivateRegressor(UNIT, UNIT, epsilon=2.0, random_state=1, **settings).fit(rows, target)
    assert model.score(*numbers(seed=9)[:2]) > 0.8
    check_charges(model, settings)


def check_charges(model: Any, settings: dict[str, Any]) -> None:
    """The guarantee is the ledger's, within the budget, and every release is on the ledger."""
    assert 1.99 < model.guarantee_.epsilon.upper <= 2.0
    assert model.guarantee_ == model.ledger_.epsilon(3e-5)
    assert model.guarantee_.randomness == "seeded"
    assert model.guarantee_.records == 3000
    counts = dict(model.ledger_.counts)
    ((plan, steps),) = counts.items()
    expected = hush.Poisson if settings["solver"] == "sgd" else hush.FullBatch
    assert (type(plan.sampling), steps) == (expected, settings.get("steps", 1))


def test_mixed_columns_and_text_labels() -> None:
    draw = np.random.default_rng(3)
    colours, ages = draw.choice(["red", "green", "blue"], 2000), draw.uniform(18, 90, 2000)
    labels = np.where((colours == "red") ^ (ages > 85), "yes", "no")
    schema = {"colour": Categorical(values=("red", "green", "blue")), "age": Numeric(low=0, high=120)}
    table = pandas.DataFrame({"age": ages, "colour": colours})
    model = PrivateClassifier(schema, ("yes", "no"), epsilon=3.0, random_state=0).fit(table, labels)
    assert model.score(table, labels) > 0.85
    assert model.classes_.tolist() == ["no", "yes"]
    assert set(model.predict(table)) == {"no", "yes"}


def test_the_solver_is_chosen_by_public_numbers() -> None:
    rows, target, _ = numbers(20_000)
    settings: dict[str, Any] = {"steps": 2, "random_state": 0}
    assert PrivateRegressor(UNIT, UNIT, **settings).fit(rows, target).solver_ == "least_squares"
    same_sizes = np.zeros_like(rows), np.zeros_like(target)
    assert PrivateRegressor(UNIT, UNIT, **settings).fit(*same_sizes).solver_ == "least_squares"
    assert PrivateRegressor(UNIT, UNIT, **settings).fit(rows[:500], target[:500]).solver_ == "sgd"
    hidden = PrivateRegressor(UNIT, UNIT, hidden_layer_sizes=(4,), **settings)
    assert hidden.fit(rows[:500], target[:500]).solver_ == "sgd"


@pytest.mark.parametrize("solver", ["least_squares", "sgd"])
def test_rows_beyond_the_bounds_are_clamped(solver: Any, without_noise: None) -> None:
    """A record far outside is the record at the edge, for inputs and for the target."""
    rows, target, _ = numbers(200)
    settings: dict[str, Any] = {"solver": solver, "steps": 5, "rate": 1.0, "random_state": 0}
    fits = []
    for far in (1.0, 1e9):
        rows[0], target[0] = far, far
        fits.append(PrivateRegressor(UNIT, UNIT, **settings).fit(rows, target).model_.layers[0])
    assert np.array_equal(fits[0][0], fits[1][0])
    assert np.array_equal(fits[0][1], fits[1][1])


def test_without_a_seed_fits_differ_and_the_guarantee_is_secret() -> None:
    rows, _, labels = numbers(500)
    model = PrivateClassifier(UNIT, (0, 1, 7), epsilon=5.0, solver="least_squares")
    seeds = (None, None, 5, 5)
    unseeded, again, seeded, repeated = (
        clone(model).set_params(random_state=seed).fit(rows, labels) for seed in seeds
    )
    assert not np.array_equal(unseeded.model_.layers[0][0], again.model_.layers[0][0])
    assert np.array_equal(seeded.predict_proba(rows), repeated.predict_proba(rows))
    assert (unseeded.guarantee_.randomness, seeded.guarantee_.randomness) == ("secret", "seeded")
    assert seeded.classes_.tolist() == [0, 1, 7], "a class without records is kept"
    assert seeded.predict_proba(rows).shape == (500, 3)


def test_fits_with_one_ledger_file_add_up(tmp_path: Path) -> None:
    rows, _, labels = numbers(500)
    first = PrivateClassifier(UNIT, (0, 1), epsilon=1.0, ledger=tmp_path / "ledger.jsonl")
    first.fit(rows, labels)
    with pytest.raises(BudgetExceeded, match="leave less than 1% of epsilon=1"):
        clone(first).fit(rows, labels)
    more = clone(first).set_params(epsilon=2.0).fit(rows, labels)
    assert 1.9 < more.guarantee_.epsilon.upper <= 2.0
    assert sum(more.ledger_.counts.values()) == 2 * sum(first.ledger_.counts.values())
    with hush.Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.epsilon(2e-4).epsilon == more.guarantee_.epsilon


def test_clones_pipelines_and_searches() -> None:
    rows, target, labels = numbers(600)
    model = PrivateRegressor(UNIT, UNIT, epsilon=3.0, solver="least_squares", random_state=0)
    copied = clone(model.fit(rows, target))
    assert copied.get_params() == model.get_params()
    assert not hasattr(copied, "guarantee_")
    pipeline = make_pipeline(
        FunctionTransformer(np.tanh),
        PrivateClassifier(UNIT, (0, 1), epsilon=5.0, solver="least_squares"),
    )
    with pytest.warns(hush.PrivacyWarning, match=r"epsilon=5\.0 covers one fit, not their sum"):
        assert cross_val_score(pipeline, rows, labels, cv=3).mean() > 0.8
    with pytest.warns(hush.PrivacyWarning, match=r"sklearn\.model_selection.*hush\.tune"):
        search = GridSearchCV(model, {"epsilon": [0.01, 100.0]}, cv=2).fit(rows, target)
    assert search.best_params_ == {"epsilon": 100.0}
    pipeline.set_params(privateclassifier__epsilon=1.0)
    assert pipeline[-1].epsilon == 1.0


@pytest.mark.parametrize("solver", ["sgd", "least_squares"])
def test_the_fits_of_a_search_share_the_budget(tmp_path: Path, solver: Any) -> None:
    rows, target, _ = numbers(600)
    file, epsilon = tmp_path / "ledger.jsonl", 4.0
    options: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-4, "solver": solver, "steps": 5}
    model = PrivateRegressor(UNIT, UNIT, ledger=file, **options)
    grid = {"learning_rate": [0.1, 0.2]}
    with pytest.raises(InvalidValue, match=r"the first fit would spend all of epsilon=4"):
        GridSearchCV(model, grid, cv=3, error_score="raise").fit(rows, target)
    with hush.Ledger(file) as ledger:
        assert not ledger.counts, "refused before the first fit"
    search = GridSearchCV(model.set_params(fits=7), grid, cv=3, error_score="raise").fit(rows, target)
    with hush.Ledger(file, read_only=True) as ledger:
        assert ledger.runs == 7
        assert 0.98 * epsilon < ledger.epsilon(1e-4).epsilon.upper <= epsilon
        noise = [plan.noise.to_plain()["multiplier"] for plan in ledger.counts]
    assert max(noise) < 1.1 * min(noise), "equal shares"
    assert search.best_estimator_.guarantee_.epsilon.upper <= epsilon
    with pytest.raises(BudgetExceeded, match=r"fits=7 were planned, and the ledger .* has 7"):
        clone(model).fit(rows, target)
    with pytest.raises(InvalidValue, match="fits=7 needs a ledger"):
        PrivateRegressor(UNIT, UNIT, fits=7, **options).fit(rows, target)


@pytest.mark.parametrize("jobs", [None, 2])
def test_an_ensemble_that_draws_records_several_times_is_refused(
    jobs: int | None, tmp_path: Path
) -> None:
    rows, target, labels = numbers(600)
    model = PrivateClassifier(UNIT, (0, 1), epsilon=3.0, solver="least_squares")
    with pytest.raises(Unsupported, match="with replacement before this fit: one record then counts"):
        BaggingClassifier(make_pipeline(model), 2, n_jobs=jobs).fit(rows, labels)
    with pytest.raises(Unsupported, match="_weight_boosting draws records with replacement"):
        AdaBoostRegressor(PrivateRegressor(UNIT, UNIT, ledger=tmp_path / "l")).fit(rows, target)
    model.set_params(ledger=tmp_path / "ledger.jsonl", epsilon=6.0, fits=1)
    halves = BaggingClassifier(model, 1, bootstrap=False, max_samples=0.5, n_jobs=jobs)
    assert halves.fit(rows, labels).score(rows, labels) > 0.8


def test_a_pickled_model_keeps_its_guarantee_and_not_the_ledger() -> None:
    rows, _, labels = numbers(300)
    model = PrivateClassifier(UNIT, (0, 1), epsilon=3.0).fit(rows, labels)
    loaded = pickle.loads(pickle.dumps(model))
    assert np.array_equal(loaded.predict_proba(rows), model.predict_proba(rows))
    assert loaded.guarantee_ == model.guarantee_
    assert not hasattr(loaded, "ledger_")


def test_labels_outside_the_classes_are_refused_without_being_shown(tmp_path: Path) -> None:
    rows, target, labels = numbers(300)
    names = np.where(labels == 1, "secret-name", "no")
    model = PrivateClassifier(UNIT, ("yes", "no"), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(DataError, match="y holds a value that is not declared in classes=") as refused:
        model.fit(rows, names)
    assert "secret-name" not in str(refused.value)
    assert not (tmp_path / "ledger.jsonl").exists(), "nothing is charged"
    target[3] = math.inf
    with pytest.raises(DataError, match="y contains infinity"):
        PrivateRegressor(UNIT, UNIT).fit(rows, target)


@pytest.mark.parametrize("declared", [None, (), (1,), (1, 1), "01", Categorical(values=(0, 1))])
def test_classes_and_bounds_of_the_target_are_declared(declared: Any) -> None:
    rows, target, labels = numbers(300)
    with pytest.raises(InvalidValue, match="classes="):
        PrivateClassifier(UNIT, declared).fit(rows, labels)
    with pytest.raises(InvalidValue, match="must declare the target's bounds"):
        PrivateRegressor(UNIT, declared).fit(rows, target)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epsilon", each) for each in (0, -1.0, math.nan, "1")),
        *(("delta", each) for each in (0.0, 0.5, 1.0, -1e-5, math.nan)),
        *(("steps", each) for each in (0, 1.5, "many")),
        *(("rate", each) for each in (0.0, 1.5)),
        *(("clip_norm", each) for each in (0.0, math.inf)),
        *(("learning_rate", each) for each in (0.0, math.nan)),
        *(("hidden_layer_sizes", each) for each in (8, "8", (0,))),
        ("solver", "lbfgs"),
    ],
)
def test_parameters_out_of_range_are_named(name: str, value: Any) -> None:
    for solver in ("auto", "sgd"):
        settings: dict[str, Any] = {"solver": solver, "steps": 3, name: value}
        with pytest.raises(ValueError, match=name):
            PrivateClassifier(UNIT, (0, 1), **settings).fit(*numbers(300)[::2])


def test_a_delta_above_one_over_the_records_is_said() -> None:
    model = PrivateClassifier(UNIT, (0, 1), delta=0.05, solver="least_squares")
    with pytest.warns(hush.PrivacyWarning, match="delta=0.05 is above"):
        model.fit(*numbers(300)[::2])
    model.set_params(hidden_layer_sizes=(8,))
    with pytest.raises(InvalidValue, match="for linear models"):
        model.fit(*numbers(300)[::2])


@pytest.mark.parametrize(("records", "epsilon"), [(1, 1.0), (3, 0.3), (30, 0.03)])
def test_too_few_records_for_the_budget_are_refused(records: int, epsilon: float) -> None:
    rows, target, _ = numbers(records)
    with pytest.raises(DataError, match=f"{records} records .* are too few for epsilon={epsilon:g}"):
        PrivateRegressor(UNIT, UNIT, epsilon=epsilon).fit(rows, target)


def test_other_columns_at_prediction_are_refused() -> None:
    rows, target, _ = numbers(300)
    model = PrivateRegressor(UNIT, UNIT).fit(rows, target)
    with pytest.raises(ValueError, match="2 features"):
        model.predict(rows[:, :2])


def test_settings_of_an_estimator_are_tuned() -> None:
    """A trial's plan, steps and ledger are used, and what it is not charged for is refused."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (80, 2))
    y = (x[:, 0] > 0).astype(int)
    plan = hush.plans.dpsgd(rate=0.25, clip_norm=0.5, multiplier=1.0)
    charged: list[Any] = []

    def fit(settings: dict[str, Any], trial: Any) -> tuple[Any, float]:
        model = PrivateClassifier(UNIT, (0, 1), learning_rate=settings["learning_rate"])
        with pytest.raises(Unsupported, match="for its steps of DP-SGD"):
            model.set_params(solver="least_squares").fit(x, y, trial=trial)
        model.set_params(solver="auto").fit(x, y, trial=trial)
        charged.append((trial.plan, dict(trial.ledger.counts)))
        return model, 0.5

    space = {"learning_rate": hush.Uniform(0.5, 2.0)}
    budget = hush.Budget(epsilon=4.0, delta=1e-3)
    tuned = hush.tune(fit, space, plan=plan, steps=3, budget=budget, mean=1.5)
    assert all(counts == {plan: 3} for plan, counts in charged)
    assert 3 < tuned.guarantee.epsilon.upper <= 4
    assert set(tuned.model.predict(x)) <= {0, 1}

"""The comparison of the DPSUR paper: what each kind of run is charged, and which line is the best."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import hush
from hush.core.errors import InvalidValue
from hush_recipes.dpsur import table2 as dpsur_table2
from hush_recipes.dpsur.adaptive import Adaptive
from hush_recipes.dpsur.inputs import normalised
from hush_recipes.dpsur.runs import DELTA, Kind, Method, plan_for, run
from hush_recipes.dpsur.table2 import table2
from hush_recipes.statistics.moments import NoisyMoments, NoisyWhitening

LINEAR = Method(
    name="linear", model="scattering-linear", batch=400, epochs=5, rates=(4.0, 4.0, 4.0, 4.0)
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH_CACHE", str(tmp_path))


@pytest.mark.parametrize("kind", ["plain", "importance", "summed"])
def test_runs_that_are_calibrated_use_the_budget_and_no_more(kind: Kind) -> None:
    method = replace(LINEAR, kind=kind, test_batch=50, threshold=0.0)
    outcome = run(method, "digits", 3.0, 0, "cpu", None)
    assert 2.99 <= outcome.sound <= 3.0
    assert outcome.accuracy > 0.5
    assert (outcome.trials is None) == (kind != "summed")


@pytest.mark.slow
def test_the_selective_runs_against_the_accountant() -> None:
    """What is said of a run within the budget, and of one as the paper has it, is charged anew here."""
    method = replace(
        LINEAR,
        kind="mean",
        batch=100,
        noise=(3.0, 3.0, 3.0, 3.0),
        test_noise=(1.0, 1.0, 1.0, 1.0),
        test_batch=10,
    )
    sound = run(method, "digits", 1.0, 0, "cpu", None)
    printed = run(replace(method, kind="published"), "digits", 1.0, 0, "cpu", None)
    plan = plan_for(method, 1437, 1.0)
    for outcome in (sound, printed):
        assert outcome.trials is not None
        assert outcome.accepted is not None
        assert outcome.published is not None
        assert outcome.sound == pytest.approx(hush.epsilon(plan, outcome.trials, DELTA).epsilon.upper)
        assert 0 < outcome.accepted < outcome.trials
    assert 0.95 <= sound.sound <= 1.0
    # the other one stops by the paper's number
    assert printed.published is not None
    assert 0.95 <= printed.published <= 1.0


def test_the_adaptive_run_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    # fewer and cheaper steps than by default, out of the same budget
    monkeypatch.setattr("hush_recipes.dpsur.runs.Adaptive", partial(Adaptive, splits=15, sizes=10))
    method = replace(LINEAR, kind="adaptive", clip=1.0, rates=(1.0, 1.0, 1.0, 1.0))
    outcome = run(method, "digits", 4.0, 0, "cpu", None)
    assert 3.99 <= outcome.sound <= 4.0
    assert outcome.accuracy > 0.5


def test_the_public_norms_of_normalised_features_hold_for_any_image() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-3, 3, 81)[:, None, None]
    features = normalised(torch.randn(50, 81, 7, 7, generator=generator) ** 3 * scales)
    values = features.double().flatten(2)
    first, second = NoisyMoments(multiplier=1.0, norm=9.0)._vectors(values)
    assert float(first.norms(2).max()) <= 9.0
    assert 9.0 < float(second.norms(2).max()) <= 81 / 27**0.5  # nothing is cut off
    repeated_channels = normalised(torch.randn(50, 1, 7, 7, generator=generator).expand(50, 81, 7, 7))
    for case, smallest in ((features, 0.0), (repeated_channels, 80.9)):
        values = case.double().flatten(2)
        everything, products = NoisyWhitening(multiplier=1.0)._vectors(values)
        assert 62.0 < float(everything.norms(2).max()) <= 63.0 * (1 + 1e-6)
        assert smallest < float(products.norms(2).max()) <= 81.0 * (1 + 1e-6)


def test_the_table_and_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = (replace(LINEAR, quick=True), replace(LINEAR, name="slow"))
    monkeypatch.setattr(dpsur_table2, "METHODS", {"digits": methods, "none": methods[1:]})
    figure = table2("digits", epsilons=(1.0,), epochs=1)
    assert [line[1] for line in figure.rows] == ["linear"]
    assert figure.rows[0][10] == "best"
    assert all(path.exists() for path in figure.save(tmp_path))
    named = table2("digits", epsilons=(1.0,), epochs=1, only="slow")
    assert [line[1] for line in named.rows] == ["slow"]
    for data, part in (("none", ""), ("digits", "slo")):
        with pytest.raises(InvalidValue, match=r"cuda.*slow"):
            table2(data, only=part)
    with pytest.raises(InvalidValue, match="not in the table"):
        run(LINEAR, "digits", 5.0, 0, "cpu", 1)
    monkeypatch.setattr("hush_recipes.dpsur.runs.run", lambda *_: pytest.fail("trained"))
    with pytest.raises(InvalidValue, match="epsilon 5 is not in the table"):
        table2("digits", epsilons=(1.0, 5.0), epochs=1)

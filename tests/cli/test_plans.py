"""`hush plans`, and named plans in other commands."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hush
from hush import plans
from hush.core.plan import read_plan
from hush.data import load, tensors
from hush.models import build
from tests.cli.command import answer, call


def test_plans_are_listed_and_printed_as_files(tmp_path: Path) -> None:
    text = call("plans").stdout
    for name, named in plans.NAMES.items():
        assert f"{name}: {named.summary}" in text
        assert named.paper in text
        path = tmp_path / "plan.toml"
        path.write_text(call("plans", name).stdout)
        assert read_plan(path) == named.make()
    spent = answer("account", "--plan", "dpsgd", "--steps", "10")
    assert spent["charged"] == [{"plan": plans.dpsgd().to_plain(), "steps": 10}]


@pytest.mark.parametrize("name", ["dpsgd", "dpsur", "twice", "beta", "rectified", "banded"])
def test_a_named_plan_trains_within_the_budget(name: str, tmp_path: Path) -> None:
    asked = ("train", "--plan", name, "--epsilon", "2", "--steps", "3", "--run-dir", tmp_path / "run")
    run = answer(*asked)
    own, found = plans.NAMES[name].make(), hush.Plan.from_plain(run["plan"])
    assert replace(found, noise=own.noise) == own
    assert run["steps"] == 3
    assert 1.9 < run["guarantee"]["epsilon"]["upper"] <= 2


def test_correlated_noise_is_fitted_to_the_run(tmp_path: Path) -> None:
    """The coefficients are for the steps and the momentum, and the groups give the expected batch."""
    asked = ("train", "--plan", "banded", "--bands", "4", "--batch-size", "128", "--epsilon", "2")
    run = answer(*asked, "--steps", "8", "--momentum", "0.5", "--run-dir", tmp_path / "run")
    found = hush.Plan.from_plain(run["plan"])
    sampling, noise = found.sampling, found.noise
    assert sampling == hush.CyclicPoisson(rate=4 * 128 / 1437, cycle=4)
    assert isinstance(noise, hush.Banded)
    assert noise == hush.Banded.optimal(bands=4, multiplier=noise.multiplier, steps=8, momentum=0.5)
    ledger = hush.Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True)
    assert ledger.counts == {found: 8}
    spent = hush.epsilon(
        replace(found, sampling=hush.Poisson(sampling.rate), noise=hush.Gaussian(noise.multiplier)),
        2,
        1e-5,
    )
    assert run["guarantee"]["epsilon"]["upper"] == spent.epsilon.upper
    refused = call(*asked, "--bands", "20", "--steps", "8", "--run-dir", tmp_path / "other")
    assert refused.returncode == 2
    assert "Pass at most bands=11" in refused.stderr


def test_subspaces_are_those_of_the_public_records(tmp_path: Path) -> None:
    asked = ("train", "--plan", "subspaces", "--noise", "5", "--steps", "2", "--run-dir", tmp_path)
    refused = call(*asked)
    assert refused.returncode == 2
    assert "no record is public. Pass e.g. --public-records 100" in refused.stderr
    assert not any(tmp_path.iterdir())
    few = call(*asked, "--public-records", "10")
    assert few.returncode == 0
    assert "10 public records span 2 of the paper's 4 subspaces" in few.stderr


def test_subspaces_have_the_norms_of_public_gradients_and_fitted_noise(tmp_path: Path) -> None:
    """The thresholds and the noise are those that the library computes from the same public records."""
    asked = ("train", "--plan", "subspaces", "--rate", "0.5", "--lr", "2", "--public-records", "100")
    run = answer(*asked, "--steps", "200", "--seed", "3", "--run-dir", tmp_path / "run")
    assert run["final"]["accuracy"] > 0.88, "the cap on entries of equal norms reached 0.72 to 0.80"
    found = hush.Plan.from_plain(run["plan"])
    x, y, _, _ = tensors(load("digits"))
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = build("logistic", classes=10, shape=(1, 8, 8))
    ranks = (4, 9, 18, 27, 592)
    public, bases = (x[:100], y[:100]), hush.Principal(groups=4, every=100)
    loss = nn.CrossEntropyLoss()
    clipping = hush.public_thresholds(model, loss, public, ranks=ranks, norm=1.0, bases=bases)
    assert isinstance(found.clipping, hush.Subspaces)
    assert found.clipping.ranks == ranks
    assert found.clipping.linf is None
    assert found.clipping.l2 == pytest.approx(clipping.l2, rel=5e-3)
    assert found == hush.fit_noise(found, hush.Budget(3.0, 1e-5), steps=200)


def test_subspaces_are_resumed_and_capped(tmp_path: Path) -> None:
    asked = ("train", "--plan", "subspaces", "--public-records", "60", "--cap", "0.2", "--run-dir")
    begun = call(*asked, tmp_path, "--steps", "3")
    assert "noise in each subspace and the residual: " in begun.stdout
    again = answer(*asked, tmp_path, "--steps", "3", "--resume")
    assert again["plan"]["clipping"]["linf"] == [0.2] * 5
    assert again["steps"] == 3


def test_the_cap_is_in_the_unit_of_the_clipping_norm(tmp_path: Path) -> None:
    asked = ("train", "--plan", "twice", "--clip", "0.5", "--noise", "2", "--steps", "1", "--run-dir")
    for cap, linf in (((), 0.05), (("--cap", "0.02"), 0.02)):
        clipping = answer(*asked, tmp_path / str(linf), *cap)["plan"]["clipping"]
        assert clipping == {"kind": "L2Linf", "l2": 0.5, "linf": linf}
    wide = call(*asked, tmp_path / "wide", "--cap", "0.5")
    assert "at most 0.5 by --clip, so a cap of 0.5 has no effect" in wide.stderr


def test_a_named_plan_tells_the_expected_batches(tmp_path: Path) -> None:
    asked = ("train", "--plan", "dpsur", "--noise", "3", "--steps", "2", "--run-dir")
    assert (
        "expected batch 49.05 of 1437 records, test batch 6.13 (at the rate of the paper; --batch-size"
        in call(*asked, tmp_path / "a").stdout
    )
    own = call(*asked, tmp_path / "b", "--batch-size", "100", "--test-batch", "10").stdout
    assert "expected batch 100 of 1437 records, test batch 10\n" in own


def test_tests_beyond_the_budget_are_named(tmp_path: Path) -> None:
    refused = call(
        "train", "--plan", "dpsur", "--batch-size", "256", "--test-batch", "128", cwd=tmp_path
    )
    assert refused.returncode == 2
    assert (
        "the acceptance tests of steps=112 alone, at rate 0.0891 with noise 0.8, cost" in refused.stderr
    )
    assert "--test-noise" in refused.stderr


def test_costs_of_watched_records_are_summarised_and_private(tmp_path: Path) -> None:
    asked = ("train", "--plan", "truncated", "--per-instance", "20", "--steps", "1", "--run-dir")
    run = tmp_path / "run"
    printed = call(*asked, run).stdout
    lines = printed.partition("sensitive, of 20 watched")[2].splitlines()[1:7]
    epsilons, any_record, any_data, gaussian, losses, _ = lines
    for_all = 'per-instance epsilon of any record, the paper\'s "for all": at most '
    assert any_record.strip().startswith(for_all)
    assert any_data.startswith("  any records in any data, by the same 16 Rényi orders: at most ")
    assert float(any_record.split()[-1]) <= 3 <= float(any_data.split()[-1])
    assert gaussian.strip().startswith("Gaussian noise of the same scale")
    assert float(gaussian.split()[-1]) > 3, "conditioning on the interval lowers the cost"
    for line, title in ((epsilons, "per-instance epsilon at delta 1e-05"), (losses, "Fisher info")):
        assert line.strip().startswith(title)
        assert "median" in line
        counts = line.partition("records in ten bins of equal width from least to largest: ")[2].split()
        assert len(counts) == 10
        assert sum(map(int, counts)) == 20
    assert (run / "private" / "per_instance.npz").stat().st_mode & 0o777 == 0o600
    noise = read_plan(run / "plan.toml").noise
    assert isinstance(noise, hush.Truncated)
    assert noise.bound == pytest.approx(noise.scale), "calibration keeps it one deviation away"
    assert "arithmetic: assumed, because truncated noise is drawn in double precision" in printed
    refused = call(*asked, tmp_path / "other", "--rate", "0.1")
    assert refused.returncode == 2
    assert "sampling=Poisson has no per-instance cost" in refused.stderr
    assert "leave out --rate and --batch-size" in refused.stderr
    sampled = call("train", "--plan", "rectified", "--rate", "0.5", "--steps", "1", cwd=tmp_path)
    assert "no per-instance epsilon: it needs full batches. Leave out --rate" in sampled.stdout


def test_hyperparameters_replace_those_of_the_plan(tmp_path: Path) -> None:
    asked = ("train", "--plan", "beta", "--beta", "1.2", "--batch-size", "100", "--noise", "9")
    run = answer(*asked, "--clip", "0.5", "--steps", "2", "--run-dir", tmp_path / "run")
    rate = 100 / 1437
    assert run["plan"] == plans.beta(beta=1.2, rate=rate, multiplier=9.0, clip_norm=0.5).to_plain()
    for wrong, message in {
        "--plan dpsgd --beta 1.2": "--beta is not an option of --plan dpsgd: its noise is Gaussian",
        "--plan dpsur --beta -1": "DPSUR's threshold beta is --test-threshold",
        "--plan rectified --linf 0.1 --clip 1": "--clip and --linf set the same value",
        "--plan dpsgd --test-clip 1": "--test-clip is not an option of --plan dpsgd: its release is",
        "--plan nix": "neither a plan file nor a named plan: dpsgd, dpsur",
        "--beta 1.2": "--beta is an option of named plans",
        "--plan beta --beta 0.5": "beta=0.5 must be",
    }.items():
        refused = call("train", *wrong.split(), cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr

"""`hush account`, `hush calibrate` and `hush compare` as a user meets them."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import hush
from hush.accounting.explanation import explain
from hush.cli.options import plan_of
from hush.core.guarantee import at_most
from hush.core.plan import EXAMPLE, plan_text, read_plan
from tests.cli.command import answer, call


def test_account_gives_the_same_number_however_it_is_asked(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    expected = hush.epsilon(plan, steps=1000, delta=1e-6).epsilon.to_plain()
    common = ("--delta", "1e-6")
    by_rate = ("--noise", "1", "--rate", "0.01", "--steps", "1000")
    by_size = ("--noise", "1", "--records", "60000", "--batch-size", "600", "--epochs", "10")
    by_plan = ("--plan", plan_file, "--steps", "1000")
    for asked in (by_rate, by_size, by_plan):
        result = answer("account", *asked, *common)
        assert result["epsilon"] == expected
        assert result["charged"] == [{"plan": plan.to_plain(), "steps": 1000}]
    text = call("account", *by_rate, *common).stdout
    assert f"epsilon <= {at_most(expected['upper'], 5)}" in text
    assert "zero-out one record" in text
    assert f"right at most {100 * result['attacker']['success']:.1f}% of the time" in text


def test_account_of_a_question_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = 'hush account --noise 1 --rate 0.01 --steps 1000'.split()\n"
        "from hush.cli.main import app\n"
        "app(standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_calibrate_prints_a_plan_that_meets_the_budget(tmp_path: Path) -> None:
    asked = ("calibrate", "--epsilon", "2", "--rate", "0.01", "--steps", "500")
    path = tmp_path / "plan.toml"
    path.write_text(call(*asked).stdout)
    plan = read_plan(path)
    assert 0.999 * 2 <= hush.epsilon(plan, steps=500, delta=1e-5).epsilon.upper <= 2
    result = answer(*asked)
    assert (result["plan"], result["steps"]) == (plan.to_plain(), 500)
    again = answer("calibrate", "--epsilon", "2", "--plan", path, "--steps", "500")
    assert again["plan"] == result["plan"]


def test_calibrate_finds_the_steps_of_a_noise() -> None:
    steps = answer("calibrate", "--epsilon", "2", "--noise", "1", "--rate", "0.01")
    assert steps["epsilon"]["upper"] <= 2
    more = str(steps["steps"] + 1)
    beyond = answer("account", "--noise", "1", "--rate", "0.01", "--steps", more, "--delta", "1e-5")
    assert beyond["epsilon"]["upper"] > 2


def test_calibrate_fits_noise_where_it_is_told_the_dimension(tmp_path: Path) -> None:
    capped = tmp_path / "plan.toml"
    capped.write_text(EXAMPLE.replace('"L2"\nnorm = 1.0', '"Linf"\nnorm = 0.1'))
    asked = ("calibrate", "--plan", capped, "--epsilon", "1", "--steps", "10", "--fit")
    assert "Pass dimension= (--dimension)" in call(*asked).stderr
    result = answer(*asked, "--dimension", "500")
    assert result["plan"]["noise"]["kind"] == "Gaussian"  # one block, one deviation
    assert result["epsilon"]["upper"] <= 1


def test_a_plan_whose_cost_grows_with_the_dimension_is_asked_for_it(tmp_path: Path) -> None:
    steep = tmp_path / "plan.toml"
    steep.write_text(
        '[sampling]\nkind = "FullBatch"\n\n[clipping]\nkind = "Lp"\np = 2.5\nnorm = 1.0\n\n'
        '[noise]\nkind = "GeneralizedGaussian"\nbeta = 2.5\nmultiplier = 20.0\n'
    )
    without = call("account", "--plan", steep, "--steps", "1")
    assert without.returncode == 2
    assert "needs the dimension" in without.stderr
    result = answer("account", "--plan", steep, "--steps", "1", "--dimension", "2")
    assert result["basis"] == "proved"
    assert result["epsilon"]["upper"] < 10


@pytest.mark.parametrize(
    "asked",
    ["account --noise 2 --batch-size 10 --steps 9", "calibrate --epsilon 2 --batch-size 10 --steps 9"],
)
def test_a_delta_above_one_over_the_records_is_marked_where_they_are_known(asked: str) -> None:
    marked = call(*asked.split(), "--records", "1000", "--delta", "0.01")
    assert "delta: above 1/1000, which permits publishing one record of 1000" in marked.stdout
    assert "warning: delta=0.01 is above 1/1000" in marked.stderr
    fine = call(*asked.split(), "--records", "1000", "--delta", "1e-5")
    assert fine.returncode == 0
    assert "above 1/" not in fine.stdout + fine.stderr


def test_a_run_is_answered_for_at_its_own_delta(tmp_path: Path) -> None:
    asked = ("train", "--run-dir", "run", "--noise", "2", "--rate", "0.1", "--steps", "3")
    stated = answer(*asked, "--delta", "1e-6", cwd=tmp_path)["guarantee"]["epsilon"]
    for named in (("run",), ("--ledger", "run/ledger.jsonl")):
        result = answer("account", *named, cwd=tmp_path)
        assert (result["delta"], result["epsilon"]) == (1e-6, stated)
        assert result["notes"][0] == "delta 1e-06, the run's own"
        text = call("account", *named, cwd=tmp_path).stdout
        assert "at delta 1e-06 (dp, zero-out one record" in text
        assert "  delta 1e-06, the run's own\n" in text
        other = answer("account", *named, "--delta", "1e-4", cwd=tmp_path)
        assert other["delta"] == 1e-4
        assert other["epsilon"]["upper"] < stated["upper"]
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "run" / "ledger.jsonl").read_bytes())
    alone = answer("account", "--ledger", "copy.jsonl", cwd=tmp_path)["notes"][1]
    assert alone.startswith("there is no checkpoint to compare the ledger with")
    marked = call("account", "run", "--delta", "0.01", cwd=tmp_path)
    assert "delta=0.01 is above 1/1437" in marked.stderr
    assert "delta: above 1/1437, which permits publishing one record of 1437" in marked.stdout


@pytest.mark.slow
def test_compare_has_a_row_for_each_method_and_a_recommendation() -> None:
    asked = ("compare", "--records", 9000, "--dimension", 100, "--batch-size", 90, "--steps", 100)
    found = answer(*asked)
    text = call(*asked).stdout
    lines = text.splitlines()
    for line, row in zip(lines[2:], found["rows"], strict=False):
        assert line.startswith(f"| {row['method']} ")
        plan = hush.Plan.from_plain(row["plan"])
        assert hush.epsilon(plan, row["steps"], 1e-5, dimension=100).epsilon.upper <= 3
    assert "Epsilon 3 at delta 1e-05 (dp, zero-out one record)" in text
    assert lines[-1] == found["recommendation"]
    assert lines[-1].startswith("Recommended: plain DP-SGD")


def test_account_of_groups_and_of_replaced_records() -> None:
    plan = plan_of(hush.Poisson(0.01), 1.0)
    asked = ("account", "--noise", "1", "--rate", "0.01", "--steps", "100")
    replaced = answer(*asked, "--group", "3", "--neighbours", "replace")
    expected = hush.epsilon(plan, 100, 1e-5, group=3, neighbours=hush.Neighbours.REPLACE)
    assert replaced["epsilon"] == expected.epsilon.to_plain()
    assert (replaced["neighbours"], replaced["unit"]) == ("replace", "3 records together")
    assert replaced["attacker"]["advantage"] > answer(*asked)["attacker"]["advantage"]


@pytest.mark.parametrize("option", ["--steps 5", "--rate .3", "--noise 2", "--dimension 9"])
@pytest.mark.parametrize("named", ["run", "--ledger run/ledger.jsonl"])
def test_options_that_a_ledger_would_ignore_are_refused(tmp_path: Path, named: str, option: str) -> None:
    refused = call("account", *named.split(), *option.split(), cwd=tmp_path)
    assert refused.returncode == 2
    assert f"{option.split()[0]} " in refused.stderr
    assert "cannot be combined with" in " ".join(refused.stderr.split())


ASKED = ("--records", "60000", "--batch-size", "600", "--epochs", "5")
FEW = ("--records", "60000", "--batch-size", "6000", "--epochs", "10")


@pytest.mark.parametrize(
    ("options", "risk"),
    [
        ("--tpr .05 --fpr .01", hush.Risk(tpr=0.05, fpr=0.01)),
        ("--advantage .1", hush.Risk(advantage=0.1)),
        ("--posterior .6 --prior .5", hush.Risk(posterior=0.6, prior=0.5)),
    ],
)
def test_calibrate_to_a_risk(options: str, risk: hush.Risk, tmp_path: Path) -> None:
    found = answer("calibrate", *options.split(), *FEW)
    plan = hush.Plan.from_plain(found["plan"])
    assert plan == hush.calibrate(plan, risk, steps=100)
    attained = risk.attained(hush.Attacker({plan: 100}))
    assert found["risk"]["attained"] == attained
    path = tmp_path / "plan.toml"
    path.write_text(call("calibrate", *options.split(), *FEW).stdout)
    assert read_plan(path) == plan
    assert f"# at most {risk}: {at_most(attained, 5)}" in path.read_text()


def test_explain_of_a_tiny_rate_is_quick() -> None:
    plan = plan_of(hush.Poisson(1e-9), 1.0)
    guarantee, began = hush.epsilon(plan, 100, 1e-5), time.process_time()
    assert explain(guarantee, {plan: 100}).attack.advantage < 1e-6
    assert time.process_time() - began < 10


def test_explain_says_what_the_best_attack_achieves() -> None:
    asked = ("explain", "--noise", "1", *ASKED)
    told, plan = answer(*asked), plan_of(hush.Poisson(0.01), 1.0)
    attacker = hush.Attacker({plan: 500})
    accounted = answer("account", "--noise", "1", *ASKED)
    assert told["epsilon"] == accounted["epsilon"] == hush.epsilon(plan, 500, 1e-5).epsilon.to_plain()
    note = "delta 1e-05 by default: set --delta well below 1 / records"
    assert told["notes"] == accounted["notes"] == [note]
    rates = [attacker.true_positive_rate(x) for x in (0.1, 0.01, 0.001)]
    assert told["attack"]["true_positive_rates"] == pytest.approx(rates, rel=1e-3)
    assert told["attack"]["posterior"] == pytest.approx(attacker.success, rel=1e-12)
    assert told["from_epsilon"]["advantage"] > 2 * told["attack"]["advantage"]
    text = call(*asked).stdout
    assert "and tests whether a record took part" in text
    assert "| true positive rate at 1% false positives   | 2.2" in text
    assert f"mu = {at_most(told['gaussian']['mu'])}" in text
    assert "delta 1e-05 by default" in text
    # printed rates are rounded up
    printed = float(text.split("1% false positives")[1].split("|")[1].strip(" %"))
    assert rates[1] <= printed / 100 <= rates[1] * 1.01


def test_a_claim_without_a_proof_has_no_attack_bound_and_its_proved_epsilon_beside_it(
    tmp_path: Path,
) -> None:
    claim = hush.Selective(rate=0.01, clip=0.001, multiplier=1.3, test="mean", accounting="published")
    plan = replace(plan_of(hush.Poisson(0.01), 1.0), release=claim)
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(plan))
    proved = replace(plan, release=replace(claim, accounting="per-acceptance"))
    expected = hush.epsilon(proved, 100, 1e-5)
    for command in ("account", "explain"):
        asked = (command, "--plan", path, "--steps", "100")
        text = call(*asked).stdout
        assert text.startswith(f"epsilon {at_most(float(hush.epsilon(plan, 100, 1e-5)), 5)} at delta")
        assert "not proved" in text.splitlines()[0]
        assert "and >=" not in text.splitlines()[0]
        assert f"  the same accepted updates, proved (per-acceptance accounting): {expected}" in text
        assert "attack" not in text
        told = answer(*asked)
        assert told["proved"]["epsilon"] == expected.epsilon.to_plain()
        assert not {"attack", "attacker", "gaussian"} & told.keys()


def test_plan_prints_a_plan_file_within_the_budget(tmp_path: Path) -> None:
    asked = ("plan", "--records", 2000, "--parameters", "1e4", "--epsilon", 3, "--epochs", 10)
    text = call(*asked).stdout
    (tmp_path / "plan.toml").write_text(text)
    (steps,) = re.findall(r"train with --steps (\d+)", text)
    said = answer("account", "--plan", tmp_path / "plan.toml", "--steps", steps)
    assert 2.99 < said["epsilon"]["upper"] <= 3
    found = answer(*asked)
    assert found["best"] in found["points"]
    assert found["best"]["steps"] == int(steps)
    result = call(*asked, "--parameters", -1)
    assert result.returncode == 2
    assert "--parameters" in result.stderr

"""The command line as a user meets it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hush
from hush.cli.options import MODELS
from hush.cli.train import train
from hush.core.plan import EXAMPLE, read_plan
from tests.cli.command import answer, call


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(EXAMPLE)
    return path


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
    assert f"epsilon <= {expected['upper']:.5g}" in text
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
    assert result["plan"] == plan.to_plain()
    assert result["steps"] == 500
    assert (
        answer("calibrate", "--epsilon", "2", "--plan", path, "--steps", "500")["plan"] == result["plan"]
    )


def test_calibrate_finds_whichever_is_missing() -> None:
    steps = answer("calibrate", "--epsilon", "2", "--noise", "1", "--rate", "0.01")
    assert steps["epsilon"]["upper"] <= 2
    rate = answer("calibrate", "--epsilon", "2", "--noise", "1", "--steps", str(steps["steps"]))
    assert rate["plan"]["sampling"]["rate"] == pytest.approx(0.01, rel=1e-2)


def test_train_without_arguments_and_what_it_leaves(tmp_path: Path) -> None:
    result = call("train", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "accuracy" in result.stdout
    folder = tmp_path / "runs" / "digits-1"
    for name in ("plan.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors"):
        assert (folder / name).exists()
    with hush.Ledger(folder / "ledger.jsonl"):  # it can be asked while somebody writes to it
        spent = answer("account", "--ledger", folder / "ledger.jsonl")
    assert spent["epsilon"]["upper"] <= 3.0
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert spent["epsilon"]["upper"] == metrics[-1]["epsilon"]
    assert metrics[-1]["accuracy"] > 0.8, "ten classes at epsilon 3"


def test_train_on_features_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH_CACHE", str(tmp_path / "cache"))
    asked = ("train", "--features", "scattering", "--steps", "30", "--seed", "0")
    first = answer(*asked, cwd=tmp_path)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    repeated = answer(*asked, cwd=tmp_path)
    assert first["final"]["accuracy"] == repeated["final"]["accuracy"] > 0.85
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == files


def test_train_by_plan_file_repeats_resumes_and_stops(tmp_path: Path, plan_file: Path) -> None:
    asked = ("train", "--plan", plan_file, "--seed", "1", "--run-dir", "run")
    first = answer(*asked, "--steps", "20", cwd=tmp_path)
    assert first["plan"] == read_plan(plan_file).to_plain()
    assert first["steps"] == 20
    assert call(*asked, "--steps", "30", cwd=tmp_path).returncode == 2
    more = answer(*asked, "--steps", "30", "--resume", cwd=tmp_path)
    assert more["steps"] == 30
    whole = answer(*asked[:-1], "whole", "--steps", "30", cwd=tmp_path)
    assert whole["final"] == more["final"]
    stopped = answer(*asked[:-1], "stopped", "--epsilon", "0.7", cwd=tmp_path)
    assert stopped["stopped"] == "budget"
    assert stopped["guarantee"]["epsilon"]["upper"] <= 0.7


def test_resuming_with_other_steps_says_which_and_how_to_go_on(tmp_path: Path) -> None:
    asked = ("train", "--run-dir", "run", "--seed", "1", "--batch-size", "100")
    assert answer(*asked, "--steps", "4", cwd=tmp_path)["steps"] == 4
    refused = call(*asked, "--steps", "8", "--resume", cwd=tmp_path)
    assert refused.returncode == 2
    for part in (
        r"noise\.multiplier is \d.* there and \d.* here",
        "psilon 3 pays for 4 steps of that plan in all",
        r"8 steps of it cost epsilon (\d\.\d+)",
        r"--plan run/plan\.toml --steps 8",
    ):
        assert re.search(part, refused.stderr), refused.stderr
    more = ("train", "--run-dir", "run", "--plan", "run/plan.toml", "--steps", "8", "--resume")
    (needed,) = re.findall(r"--steps 8 --epsilon ([\d.]+),", refused.stderr)
    gone_on = answer(*more, "--epsilon", needed, cwd=tmp_path)
    cost = float(re.findall(r"8 steps of it cost epsilon (\d\.\d+)", refused.stderr)[0])
    assert gone_on["steps"] == 8
    assert gone_on["guarantee"]["epsilon"]["upper"] == pytest.approx(cost, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("account", "nothing to account for"),
        ("account --noise 1 --steps 10", "--records and --batch-size"),
        ("account --noise 1 --rate 0.1", "Pass --steps or --epochs"),
        ("account --noise 0 --rate 0.1 --steps 10", "multiplier=0"),
        ("account --noise 1 --rate 1.5 --steps 10", "rate=1.5 must be"),
        ("account --noise 1 --rate nan --steps 10", "rate=nan must be"),
        ("account --noise 1 --rate 0.1 --steps -1", "steps=-1"),
        ("account --noise 1 --rate 0.1 --steps 10 --delta 0", "delta=0"),
        ("account --noise 1 --rate 0.1 --steps 10 --delta 1", "delta=1"),
        ("account --noise 1 --records 10 --batch-size 20 --steps 1", "<= the 10 records"),
        ("account --noise 1 --rate 0.1 --epochs 0", "--epochs 0"),
        ("account --plan none.toml --steps 1", "cannot read the plan file none.toml"),
        ("account --ledger none.jsonl", "no ledger at none.jsonl"),
        ("calibrate --epsilon -1 --rate 0.1 --steps 1", "epsilon=-1"),
        ("calibrate --epsilon 1 --rate 0.1 --steps 0", "steps=0"),
        ("calibrate --epsilon 1 --noise 1", "pass --steps to find the rate"),
        ("calibrate --epsilon 1 --noise 1 --rate 0.1 --steps 9", "nothing to find"),
        (
            "compare --records 9 --dimension 5 --rate 0.1 --steps 1 --subspaces a:1",
            "--subspaces a:1",
        ),
        (
            "compare --records 9 --dimension 5 --rate 0.1 --steps 1 --linf-ratio 2",
            "--linf-ratio=2.0 must",
        ),
        (
            "compare --records 9 --dimension 100 --rate 0.1 --steps 1 --linf-ratio 0.05",
            "1/sqrt(100) = 0.1",
        ),
        ("train --data none", "--data none must be one of digits, mnist"),
        ("train --model none", "--model none must be one of logistic, mlp"),
        ("train --model imdb-lstm", "token ids, in any number, not 1 x 8 x 8 numbers"),
        ("train --features none", "--features none must be one of scattering, eff"),
        ("train --batch-size 5000", "<= the 1437 records"),
        ("train --epsilon 0", "epsilon=0"),
        ("train --noise 0.3 --epsilon 0.1", "below what one step costs"),
        ("train --device warp", "--device warp must be cpu, cuda or cuda:N"),
        ("train --lr -1", "--lr=-1.0 must be"),
        ("train --lr nan", "--lr=nan must be"),
        ("train --momentum 2", "--momentum=2.0 must be"),
        ("train --noise 0", "multiplier=0"),
        ("train --clip 0", "norm=0"),
        ("train --epochs inf", "--epochs inf"),
        ("train --adam --momentum 0.5", "--adam and --momentum"),
        ("train --plan p.toml --clip 1", "--plan and --clip"),
        ("train --steps 3 --epochs 3", "--steps and --epochs"),
        ("train --resume --run-dir nowhere", "no run in nowhere"),
        ("train --run-dir /proc/hush", "/proc/hush"),
        ("train --views 0", "--views=0 must be"),
        ("train --views 1000000", "<= 1024"),
        ("train --features scattering --views 2", "is for images, and scattering features are none"),
        (
            "train --data mnist --data-dir nowhere --plan none.toml",
            "cannot read the plan file none.toml",
        ),
        ("train --public-records 1437", "--public-records 1437 must be"),
        ("account --noise 1 --rate 0.1 --batch-size 5 --records 9 --steps 1", "--rate and --batch-size"),
        ("train --device meta", "--device meta must be cpu, cuda or cuda:N"),
        ("train --device cuda:99", "numbered from 0"),
        ("train --arithmetic exact", "--arithmetic exact must be one of proved, assumed"),
        ("train --test-batch 9 --test both", "--test both must be one of summed, mean"),
        ("pate --data none", "--data none must be one of digits"),
        ("audit runs --kind all", "--kind all must be one of gradient, input"),
        ("probe --model none", "--model none must be one of logistic"),
        (
            "account --ledger .",
            "is a folder, and a ledger is a file. For a run's folder: hush account .",
        ),
        ("account --noise 1 --rate 0.1 --steps 10000000000000", "must be a whole number"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(arguments: str, message: str, tmp_path: Path) -> None:
    result = call(*arguments.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.safetensors")), "nothing was trained"


def test_values_of_options_are_in_the_help_and_checked_before_torch_is_loaded(tmp_path: Path) -> None:
    """In a process of its own: here torch is loaded already."""
    from hush.models.registry import NAMES

    assert MODELS == NAMES
    wrong = [("--arithmetic", "exact"), ("--data", "x"), ("--device", "x"), ("--features", "x")]
    wrong += [("--model", "x"), ("--test", "x")]
    code = (
        "import sys\nfrom unittest import mock\nfrom hush.cli.main import main\n"
        f"for option in {wrong}:\n"
        "    with mock.patch.object(sys, 'argv', ['hush', 'train', *option]):\n"
        "        try:\n            main()\n        except SystemExit as end:\n"
        "            print(option[0], end.code, 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.splitlines() == [f"{option} 2 False" for option, _ in wrong], result.stderr
    described = " ".join(call("train", "--help").stdout.replace("│", "").split())
    for value in ("proved, or assumed", "summed", "efficientnet-lite0", "wrn-10-2", "fashion-mnist"):
        assert value in described


@pytest.mark.slow
def test_compare_lists_the_mechanisms() -> None:
    asked = (
        "compare",
        "--records",
        "9000",
        "--dimension",
        "100",
        "--batch-size",
        "90",
        "--steps",
        "100",
    )
    rows = answer(*asked)["rows"]
    text = call(*asked).stdout
    assert all(row["mechanism"] in text for row in rows)
    assert text.splitlines()[2].startswith(f"| {rows[0]['mechanism']}")


def test_claims_are_listed_with_their_tests() -> None:
    claims = answer("claims")["claims"]
    text = call("claims").stdout
    assert len(claims) == text.count("  test     tests/accounting/test_claims.py::test_")
    assert all(claim["statement"] in text for claim in claims)


def test_the_version_is_the_packages() -> None:
    assert call("--version").stdout.strip() == hush.__version__


def test_help_names_every_command() -> None:
    text = call("--help").stdout
    for command in ("train", "account", "calibrate", "compare", "claims", "demo", "reproduce"):
        assert command in text


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


def test_calibrate_fits_noise_where_it_is_told_the_dimension(tmp_path: Path) -> None:
    capped = tmp_path / "plan.toml"
    capped.write_text(EXAMPLE.replace('"L2"\nnorm = 1.0', '"Linf"\nnorm = 0.1'))
    asked = ("calibrate", "--plan", capped, "--epsilon", "1", "--steps", "10", "--fit")
    assert "Pass dimension=" in call(*asked).stderr
    result = answer(*asked, "--dimension", "500")
    assert result["plan"]["noise"]["kind"] == "Gaussian"  # one block, one deviation
    assert result["epsilon"]["upper"] <= 1


def test_a_run_that_is_interrupted_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hush.training.progress.RunProgress.advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run_dir=tmp_path / "run", noise=2.0, steps=2, as_json=True)
    assert f"--run-dir {tmp_path / 'run'} --resume" in capsys.readouterr().err


def test_views_leave_small_images_in_sight(tmp_path: Path) -> None:
    asked = "train --views 2 --epsilon 50 --steps 40 --seed 0"
    run = answer(*asked.split(), cwd=tmp_path)
    assert run["final"]["accuracy"] > 0.5, "shifts by half of an image leave about 0.1"


def test_a_secure_run_has_no_seed(tmp_path: Path) -> None:
    assert call("train", "--epochs", "1", "--secure", cwd=tmp_path).returncode == 0
    seeded = call("train", "--epochs", "1", "--secure", "--seed", "1", cwd=tmp_path)
    assert seeded.returncode == 2
    assert "Pass one of the two" in seeded.stderr


def test_noise_that_drowns_the_records_is_said(tmp_path: Path) -> None:
    usual = ("train", "--batch-size", "200", "--steps", "2", "--run-dir")
    drowned = call(*usual, tmp_path / "a", "--epsilon", "1e-9")
    assert drowned.returncode == 0
    assert "the noise drowns the records: over 2 steps they can move the 650 " in drowned.stderr
    assert "drowns" not in call(*usual, tmp_path / "b").stderr


def test_a_run_is_resumed_with_the_settings_it_began_with(tmp_path: Path) -> None:
    begun = ("train", "--run-dir", "run", "--noise", "2", "--rate", "0.1", "--seed", "3", "--steps")
    answer(*begun, "2", cwd=tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    more = (*begun, "3", "--resume")
    for changed, message in (
        (("--model", "mlp"), "model is logistic there and mlp here"),
        (("--lr", "0.5"), "learning_rate is 1.0 there and 0.5 here"),
        (("--features", "scattering"), "features is not set there and scattering here"),
        (("--views", "2"), "views is not set there and 2 here"),
        (("--delta", "1e-6"), "delta is 1e-05 there and 1e-06 here"),
        (("--data", "mnist", "--data-dir", "nowhere"), "data is digits there and mnist here"),
        (("--seed", "4"), "began with another seed, not with the seed 4"),
    ):
        refused = call(*more, *changed, cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    (tmp_path / "run/checkpoint.safetensors").unlink()
    refused = call(*more, cwd=tmp_path)
    assert refused.returncode == 2
    assert "charges of 2 steps" in refused.stderr
    assert "--run-dir" in refused.stderr


@pytest.mark.parametrize(
    "asked",
    ["account --noise 2 --batch-size 10 --steps 9", "calibrate --epsilon 2 --batch-size 10 --steps 9"],
)
def test_a_delta_above_one_over_the_records_is_marked_where_they_are_known(asked: str) -> None:
    marked = call(*asked.split(), "--records", "1000", "--delta", "0.01")
    assert "delta: above 1/1000, one record of 1000 published" in marked.stdout
    assert "warning: delta=0.01 is above 1/1000" in marked.stderr
    fine = call(*asked.split(), "--records", "1000", "--delta", "1e-5")
    assert fine.returncode == 0
    assert "above 1/" not in fine.stdout + fine.stderr


def test_resuming_with_another_epsilon_says_why_the_plan_is_another(tmp_path: Path) -> None:
    asked = ("train", "--run-dir", "run", "--seed", "1", "--batch-size", "100", "--steps", "4")
    answer(*asked, cwd=tmp_path)
    refused = call(*asked, "--epsilon", "6", "--resume", cwd=tmp_path).stderr
    assert (
        "without --noise or --plan the noise is chosen for --epsilon, --delta and the steps" in refused
    )
    (allowed,) = re.findall(r"psilon 6 pays for (\d+) steps of that plan in all", refused)
    (advice,) = re.findall(r"--plan run/plan\.toml --steps \d+ --epsilon [\d.]+", refused)
    assert f"--steps {allowed} --epsilon 6" in advice
    more = ("train", "--run-dir", "run", "--seed", "1", "--resume", *advice.split())
    assert answer(*more, cwd=tmp_path)["steps"] == int(allowed) > 4

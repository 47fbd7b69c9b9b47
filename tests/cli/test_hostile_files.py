"""Files and numbers that break a parser or a message: a sentence of a few lines, never a traceback."""

import json
from pathlib import Path

import pytest

import hush
from hush.core.plan import EXAMPLE
from hush.report.signal_to_noise import signal_to_noise
from tests.cli.command import Result, call

LONGEST = 3000
LONG = 10**5


def is_refused(result: Result, *words: str) -> None:
    assert result.returncode == 2
    assert result.stderr.startswith("hush: ")
    assert len(result.stderr) < LONGEST, "a message is to be read"
    for word in words:
        assert word in result.stderr


def account(folder: Path, text: str) -> Result:
    path = folder / "plan.toml"
    path.write_text(text)
    return call("account", "--plan", path, "--steps", "1")


@pytest.mark.parametrize("setting", ["rate", "kind"])
def test_lists_nested_too_deeply_in_a_plan(tmp_path: Path, setting: str) -> None:
    nested = f"{setting} = {'[' * 5000}{']' * 5000}"
    is_refused(account(tmp_path, EXAMPLE.replace("rate = 0.01", nested)), "plan.toml", "nested")


def test_lists_nested_as_deeply_as_can_be_read(tmp_path: Path) -> None:
    for depth in (50, 100, 200, 400):
        nested = f"rate = {'[' * depth}{']' * depth}"
        is_refused(account(tmp_path, EXAMPLE.replace("rate = 0.01", nested)), "plan.toml")


@pytest.mark.parametrize("number", ["1" * 5000, "0x" + "f" * 5000, "-" + "9" * 4299])
def test_integers_of_thousands_of_digits_in_a_plan(tmp_path: Path, number: str) -> None:
    is_refused(account(tmp_path, EXAMPLE.replace("0.01", number)), "plan.toml")
    blocks = EXAMPLE.replace('"Gaussian"\nmultiplier = 1.0', f'"BlockGaussian"\nmultipliers = {number}')
    is_refused(account(tmp_path, blocks), "plan.toml")


@pytest.mark.parametrize(
    ("find", "replace"),
    [
        ("rate = 0.01", 'rate = "{}"'),
        ('"Poisson"', '"{}"'),
        ("rate = 0.01", "{} = 0.01"),
        ("[noise]", "[{}]"),
        ("rate = 0.01", '{} = "unfinished'),
    ],
)
def test_a_long_value_is_not_echoed_whole(tmp_path: Path, find: str, replace: str) -> None:
    text = EXAMPLE.replace(find, replace.format("a" * LONG))
    is_refused(account(tmp_path, text), "plan.toml")


def test_a_name_that_the_system_refuses_is_not_echoed_whole() -> None:
    is_refused(call("account", "--plan", "x" * LONG, "--steps", "1"), "plan file")
    is_refused(call("account", "--ledger", "x" * LONG), "too long")
    is_refused(call("train", "--data", "x" * LONG), "digits, adult")


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000, "5", "null", "[]", '{"data": []}'])
def test_settings_that_are_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.json").write_text(content)
    is_refused(call("audit", tmp_path), "settings.json", "hush train")


@pytest.mark.parametrize("name", ["settings.json", "tuned.json", "metrics.jsonl", "audit.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000, "null", "[]", '{"settings": 1}'])
def test_a_report_of_files_that_hush_did_not_write(run: Path, name: str, content: str) -> None:
    path = run / name
    before = path.read_bytes() if path.exists() else None
    path.write_text(content + "\n")
    audit = ("--audit", path) if name == "audit.json" else ()
    result = call("report", run, *audit, "--json")
    if before is None:
        path.unlink()
    else:
        path.write_bytes(before)
    if (name, content) == ("settings.json", '{"settings": 1}'):  # settings are anybody's own
        assert json.loads(result.stdout)["settings"] == {"settings": 1}
    else:
        is_refused(result, name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step without evaluation, which costs little to report on."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = call("train", "--steps", "1", "--delta", "1e-4", "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", ["data", "model", "features", "views"])
def test_settings_of_another_kind(tmp_path: Path, name: str) -> None:
    usual = {"data": "digits", "model": "logistic", "delta": 1e-5, "learning_rate": 1.0}
    (tmp_path / "settings.json").write_text(json.dumps({**usual, name: ["digits"]}))
    is_refused(call("audit", tmp_path), name)


def test_a_ledger_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path):
        pass
    path.write_bytes(path.read_bytes() + b"[" * 100_000 + b"\n")
    is_refused(call("account", "--ledger", path), "damaged")


@pytest.mark.parametrize("multiplier", [1e-300, 1e-13, 5e-324])
def test_noise_of_no_size_is_refused_before_it_is_divided_by(tmp_path: Path, multiplier: float) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(EXAMPLE.replace("multiplier = 1.0", f"multiplier = {multiplier}"))
    for command in (
        ("train", "--plan", path, "--steps", "2", "--run-dir", tmp_path / "run"),
        ("account", "--plan", path, "--steps", "2"),
        ("calibrate", "--epsilon", "1", "--noise", str(multiplier), "--rate", "0.1"),
    ):
        is_refused(call(*command), f"multiplier={multiplier!r} must be", ">= 1e-12", "private")
    assert not (tmp_path / "run").exists()


def test_the_least_noise_under_the_least_norm_is_still_divided_by() -> None:
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1e-12), noise=hush.Gaussian(multiplier=1e-12)
    )
    assert signal_to_noise(plan, records=1, steps=1, dimension=1) == pytest.approx(1e12)


@pytest.mark.parametrize("device", ["meta", "hpu", "cuda:99", "vulkan", "x" * 10_000])
@pytest.mark.parametrize("command", ["train", "probe"])
def test_a_device_that_cannot_train(tmp_path: Path, command: str, device: str) -> None:
    result = call(command, "--device", device, cwd=tmp_path)
    is_refused(result, f"--device {device[:100]}", "--device cpu")
    assert not list(tmp_path.iterdir())


def test_a_recipe_checks_its_device_before_it_runs(tmp_path: Path) -> None:
    is_refused(call("reproduce", "gg-table1", "--device", "meta", cwd=tmp_path), "--device meta")
    assert not list(tmp_path.iterdir())

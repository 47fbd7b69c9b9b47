"""`hush train` with owners, and with a number of records that is private."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hush.data
from tests.cli.command import answer, call

RECORDS, OWNERS = 1437, 240
ASKED = ("train", "--steps", "4", "--seed", "1", "--run-dir", "run", "--noise", "3")


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """Owners of the digits: six records each, and three of the last one."""
    path = tmp_path / "ids.txt"
    path.write_text("".join(f"u{record // 6}\n" for record in range(RECORDS)))
    return path


def test_owners_are_drawn_counted_and_named(tmp_path: Path, ids: Path) -> None:
    asked = ("--units", ids, "--per-unit", "3", "--batch-size", "60")
    result = answer(*ASKED, *asked, cwd=tmp_path)
    assert result["guarantee"]["unit"] == "one user, at most 3 records a step"
    assert result["guarantee"]["records"] == OWNERS
    assert result["plan"]["sampling"]["rate"] == 60 / OWNERS
    spent = answer("account", tmp_path / "run")
    assert spent["unit"] == "one user, at most 3 records a step"
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["per_unit"] == 3
    assert "u17" not in "".join(
        path.read_text() for path in (tmp_path / "run").rglob("*.*") if path.suffix != ".safetensors"
    )


def test_by_default_a_batch_is_of_owners_too(tmp_path: Path, ids: Path) -> None:
    """256 records are a rate of 0.18; of 240 owners all take part."""
    result = answer(*ASKED, "--units", ids, "--per-unit", "1", cwd=tmp_path)
    assert result["plan"]["sampling"]["kind"] == "FullBatch"
    assert answer(*ASKED[:-3], "records", cwd=tmp_path)["plan"]["sampling"]["rate"] == 256 / RECORDS


def published(folder: Path) -> dict[str, Any]:
    """Settings in the published files of a run, without noise and random names."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    kept = ("plan", "records", "protects")
    charges = [{name: line[name] for name in kept if name in line} for line in lines]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "plan": (folder / "plan.toml").read_text(),
        "settings": (folder / "settings.json").read_text(),
        "charges": charges,
        "steps": [(line["step"], line["epsilon"]) for line in metrics],
    }


@pytest.mark.parametrize("relation", ["add/remove", "zero-out"])
@pytest.mark.parametrize("owned", [False, True], ids=["records", "owners"])
def test_nothing_that_may_be_published_follows_a_private_number(
    tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch, relation: str, owned: bool
) -> None:
    """Rate, steps, evaluations, test batch, calibrated noise and ledger of true neighbours.

    Under zero-out they do follow the length, which is public there: the comparison can fail.
    """
    whole = hush.data.load("digits")
    gone = 6 if owned else 1
    shorter = replace(whole, x_train=whole.x_train[:-gone], y_train=whole.y_train[:-gone])
    fewer = tmp_path / "fewer.txt"
    fewer.write_text("".join(ids.read_text().splitlines(keepends=True)[:-gone]))
    asked = ["train", "--epochs", "1", "--batch-size", "60", "--seed", "1"]
    asked += ["--plan", "dpsur", "--test-batch", "30"]
    asked += ["--neighbours", relation]
    if relation == "add/remove":
        asked += ["--records", "250" if owned else "1500"]
    runs = []
    for name, dataset, file in (("all", whole, ids), ("fewer", shorter, fewer)):
        monkeypatch.setattr(hush.data, "load", lambda *_, dataset=dataset: dataset)
        options = ["--units", str(file), "--per-unit", "2"] if owned else []
        done = call(*asked, *options, "--run-dir", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if relation == "add/remove":  # under zero-out the number is public, and printed
            assert not {"1437", "1436"} & set(re.findall(r"\d+", done.stdout))
        runs.append(published(tmp_path / name))
    assert (runs[0] == runs[1]) == (relation == "add/remove")


def test_other_owners_are_refused_when_a_run_is_resumed(tmp_path: Path, ids: Path) -> None:
    own = ("--units", ids, "--per-unit", "3")
    answer(*ASKED, *own, cwd=tmp_path)
    lines = ids.read_text().splitlines(keepends=True)
    exchanged = tmp_path / "exchanged.txt"
    exchanged.write_text("".join([lines[6], *lines[1:6], lines[0], *lines[7:]]))
    for options, said in {
        ("--units", exchanged, "--per-unit", "3"): "record-to-user maps differ",
        ("--units", ids, "--per-unit", "2"): "per_unit was 3 and is now 2",
        (): "per_unit was 3 and is now not set",
        (*own, "--neighbours", "add/remove", "--records", "240"): "neighbours was not set",
    }.items():
        refused = call(*ASKED, *options, "--resume", cwd=tmp_path)
        assert refused.returncode == 2
        assert said in refused.stderr, refused.stderr
    array = tmp_path / "ids.npy"
    np.save(array, np.array(ids.read_text().split()))
    assert answer(*ASKED, "--units", array, "--per-unit", "3", "--resume", cwd=tmp_path)["steps"] == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--per-unit 2", "--per-unit N limits the records of one"),
        ("--units IDS", "e.g. with --per-unit 1"),
        ("--units IDS --per-unit 0", "per_unit=0 must be a whole number >= 1"),
        ("--units IDS --per-unit 7", "no user has more than 6 records"),
        ("--units IDS --per-unit 2 --records 7", "records=7, but there are 240 distinct user ids"),
        ("--units IDS --per-unit 2 --batch-size 300", "300 must be > 0 and <= the 240 owners"),
        (
            "--units IDS --per-unit 2 --plan dpsur --test-batch 300",
            "300 must be > 0 and <= the 240 owners",
        ),
        ("--units IDS --per-unit 3 --public-records 62", "62 makes only some records of a user"),
        ("--units SHORT --per-unit 2", "there are 1437 training records"),
        ("--units missing.txt --per-unit 2", "missing.txt cannot be read"),
        ("--neighbours add/remove", "by a public estimate under ADD_REMOVE"),
        ("--neighbours both", "'both' is not one of 'zero-out', 'add/remove'"),
        ("--records 12", "neighbours=hush.Neighbours.ADD_REMOVE"),
    ],
)
def test_options_that_do_not_say_who_is_protected_are_refused(
    tmp_path: Path, ids: Path, options: str, said: str
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("\n".join(ids.read_text().splitlines()[:-1]))
    words = options.replace("IDS", str(ids)).replace("SHORT", str(short)).split()
    refused = call(*ASKED, *words, cwd=tmp_path)
    assert refused.returncode == 2
    assert said in refused.stderr, refused.stderr
    assert "u10" not in refused.stderr, "owners are private"
    assert not (tmp_path / "run").exists(), "no step was charged"

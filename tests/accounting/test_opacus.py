"""Runs of Opacus: their certified epsilon, their gaps, and files of other structures.

Opacus is not needed: the files have the structure that its version 1.6 writes.
"""

import json
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dp_accounting import dp_event, pld

import hush
from hush.accounting.opacus import GAPS
from hush.core.errors import DataError
from tests.cli.command import answer, call

ROOT = Path(__file__).parents[2]
HISTORY = [(1.0, 0.01, 300), (1.2, 0.02, 100), (1.0, 0.01, 200)]
STATE = OrderedDict(history=HISTORY, mechanism="prv")


def checkpoint(path: Path) -> Path:
    module = torch.nn.Linear(2, 2)
    whole = {
        "module_state_dict": module.state_dict(),
        "privacy_accountant_state_dict": STATE,
        "optimizer_state_dict": torch.optim.Adam(module.parameters()).state_dict(),
    }
    torch.save(whole, path)
    return path


def test_epsilon_is_a_tight_bound_for_the_whole_history() -> None:
    oracle = pld.PLDAccountant()
    for multiplier, rate, steps in HISTORY:
        gaussian = dp_event.GaussianDpEvent(multiplier)
        oracle.compose(dp_event.PoissonSampledDpEvent(rate, gaussian), steps)
    bound = hush.from_opacus(STATE).epsilon(1e-5).epsilon
    expected = oracle.get_epsilon(1e-5)  # pessimistic
    assert bound.lower <= expected
    assert 0.99 * expected < bound.upper < 1.001 * expected
    missing = hush.from_opacus({**STATE, "history": HISTORY[:2]}).epsilon(1e-5).epsilon
    assert missing.upper < 0.9 * bound.upper, "the last entry counts"


def test_all_forms_of_a_run_are_the_same_run(tmp_path: Path) -> None:
    accountant = SimpleNamespace(history=HISTORY, mechanism=lambda: "prv")
    (tmp_path / "accountant.json").write_text(json.dumps(STATE))
    (tmp_path / "history.json").write_text(json.dumps({"history": HISTORY}))
    torch.save(STATE, tmp_path / "accountant.pt")
    forms: list[Any] = [
        accountant,
        SimpleNamespace(accountant=accountant),
        checkpoint(tmp_path / "c.pt"),
    ]
    forms += [str(tmp_path / name) for name in ("accountant.json", "history.json", "accountant.pt")]
    for form in forms:
        assert hush.from_opacus(form) == hush.from_opacus(STATE)
    assert sum(hush.from_opacus(STATE).counts.values()) == 600


def test_the_statement_is_weaker_than_that_of_a_run_of_hush() -> None:
    run = hush.from_opacus(STATE)
    guarantee = run.epsilon(1e-5)
    assert (guarantee.arithmetic, guarantee.neighbours) == ("assumed", "zero-out")
    replaced = run.epsilon(1e-5, neighbours=hush.Neighbours.REPLACE)
    assert guarantee.epsilon.upper < replaced.epsilon.upper
    full = hush.from_opacus({"history": [(2.0, 1, 3)]})
    assert list(full.counts) == [hush.plans.dpsgd(rate=1.0, clip_norm=1.0, multiplier=2.0)]


def test_every_gap_has_a_section_of_the_documentation() -> None:
    gaps = hush.from_opacus({**STATE, "mechanism": "gdp"}).gaps
    assert gaps[:-1] == GAPS
    assert "not a bound" in gaps[-1].text
    for gap in gaps:
        page, anchor = gap.page.split("#")
        titles = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "no history of steps"),
        ({"history": []}, "an empty history"),
        (
            {"steps": 100, "max_grad_norm": 1.0},
            r"no history of steps.*versions 1\.2 and later.*json\.dump",
        ),
        ({"privacy_accountant_state_dict": [1]}, "no history of steps"),
        ({"history": [(1.0, 0.01)]}, r"entry 1 .*\(1\.0, 0\.01\).* must be three numbers"),
        ({"history": [(1.0, 0.01, 1), (0.0, 0.01, 10)]}, r"entry 2 .*multiplier=0\.0 must be"),
        ({"history": [(1.0, 1.5, 10)]}, r"entry 1 .*rate=1\.5 must be .*<= 1"),
        ({"history": [(1.0, 0.1, 2.5)]}, r"entry 1 .*steps=2\.5 must be"),
        ({"history": [("1", None, 5)]}, "entry 1 "),
        (None, "NoneType has no history"),
    ],
)
def test_other_structures_raise(state: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        hush.from_opacus(state)


def test_files_of_other_kinds_raise(tmp_path: Path) -> None:
    """Before version 1.6, Opacus stored a method as the mechanism."""
    older = tmp_path / "older.pt"
    torch.save({"history": HISTORY, "mechanism": test_other_structures_raise}, older)
    torn = tmp_path / "torn.pt"
    torn.write_bytes(checkpoint(tmp_path / "c.pt").read_bytes()[:700])
    text = tmp_path / "text.pt"
    text.write_text("hello")
    for path in (older, torn, text):
        with pytest.raises(DataError, match=rf"{path.name} is not .*before 1\.6 have.*json\.dump"):
            hush.from_opacus(path)
    text = text.rename(tmp_path / "text.json")
    with pytest.raises(DataError, match=r"text\.json is not JSON"):
        hush.from_opacus(text)
    with pytest.raises(FileNotFoundError):
        hush.from_opacus(tmp_path / "none.pt")


def test_the_command_prints_epsilon_attack_and_gaps(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c.pt")
    result = answer("account", "--opacus", path, "--delta", "1e-6")
    assert result["epsilon"] == hush.from_opacus(STATE).epsilon(1e-6).epsilon.to_plain()
    assert (result["arithmetic"], result["notes"]) == ("assumed", [f"check: {gap}" for gap in GAPS])
    text = call("account", "--opacus", path).stdout
    assert "500 steps of Plan(sampling=Poisson(rate=0.01)" in text
    assert "delta 1e-05 by default" in text
    assert "Gaussian DP" in call("explain", "--opacus", path).stdout
    both = call("account", "--opacus", path, "--steps", "5")
    assert both.returncode == 2
    assert "--steps 5 cannot be combined with" in both.stderr
    wrong = call("account", "--opacus", tmp_path / "none.pt")
    assert wrong.returncode == 2
    assert "No such file" in wrong.stderr

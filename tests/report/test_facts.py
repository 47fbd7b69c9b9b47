"""Facts of a report: what they are computed from, and what is refused."""

import json
from pathlib import Path

import pytest

import hush
from hush.accounting.epsilon import compose
from hush.core.errors import CheckpointError, LedgerError
from hush.report.facts import RunFacts, run_facts
from hush.report.wording import protection
from hush.training.run_folder import step_file
from tests.report.conftest import STATISTICS, TRAINING, charge


def test_the_guarantee_is_of_everything_on_the_ledger(facts: RunFacts) -> None:
    assert facts.guarantee.epsilon == compose({STATISTICS: 2, TRAINING: 30}, 1e-5).epsilon
    assert (facts.kind, facts.name) == ("ledger", "whitened")
    alone = {each.plan: each.epsilon_alone for each in facts.plans}
    assert alone[STATISTICS] == hush.epsilon(STATISTICS, steps=2, delta=1e-5).epsilon
    assert [each.proof for each in facts.plans] == ["poisson-gaussian.md"] * 2
    assert sum(bound.upper for bound in alone.values()) > facts.guarantee.epsilon.upper


def test_the_key_beside_a_ledger_of_another_librarys_run_is_named_as_secret(tmp_path: Path) -> None:
    path = charge(tmp_path / "ledger.jsonl", (TRAINING, 1))
    step_file(path).write_bytes(b"key")
    facts = run_facts(path)
    assert {file.name: file.publishable for file in facts.files} == {
        "ledger.jsonl": True,
        "_ledger.jsonl.secret": False,
    }
    hidden = next(item.text for item in protection(facts) if item.term == "Nobody else may see")
    assert "_ledger.jsonl.secret" in hidden


def pate_folder(folder: Path, settings: dict[str, object]) -> Path:
    """What `hush pate` leaves, as far as a report reads it: two of three planned votes were used."""
    folder.mkdir()
    charge(folder / "ledger.jsonl", (STATISTICS, 2))
    (folder / "settings.json").write_text(json.dumps({"teachers": 5, "query": {}, **settings}))
    return folder


def test_pate_is_reported_for_all_that_was_planned(tmp_path: Path) -> None:
    """How many answers there were follows from the records: the charges alone would be too little."""
    planned: dict[str, object] = {"planned": [{"plan": STATISTICS.to_plain(), "steps": 3}]}
    facts = run_facts(pate_folder(tmp_path / "run", planned))
    assert facts.kind == "PATE"
    assert facts.guarantee.epsilon == hush.epsilon(STATISTICS, steps=3, delta=1e-5).epsilon
    assert not facts.finished


@pytest.mark.parametrize("planned", [{}, {"planned": 3}, {"planned": [{"plan": {}, "steps": 1}]}])
def test_pate_without_its_plan_is_refused(planned: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="which the guarantee also covers"):
        run_facts(pate_folder(tmp_path / "run", planned))


def test_a_ledger_without_a_charge_promises_nothing(tmp_path: Path) -> None:
    hush.Ledger(tmp_path / "ledger.jsonl").close()
    with pytest.raises(LedgerError, match="has no charge"):
        run_facts(tmp_path / "ledger.jsonl")


def test_a_damaged_or_void_ledger_is_not_reported_on(tmp_path: Path) -> None:
    path = charge(tmp_path / "ledger.jsonl", (TRAINING, 3))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(LedgerError, match="damaged"):
        run_facts(path)
    path.write_bytes(whole)
    with hush.Ledger(path) as ledger:
        ledger.void("the model was moved")
    with pytest.raises(LedgerError, match="is void"):
        run_facts(path)

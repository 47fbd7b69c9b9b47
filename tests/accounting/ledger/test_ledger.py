"""Charges, repeated releases and the guarantee of a ledger."""

import copy
import gc
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hush
from hush.core.errors import HushError, LedgerError, Unsupported
from tests.accounting.ledger.charged import OTHER, PLAN, STEEP, charge, counts


def test_reopening_continues(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    charge(path, PLAN, range(4, 6))
    assert counts(path) == {PLAN: 5}
    with hush.Ledger(path) as ledger:
        assert ledger.last_step("r") == 5
        assert ledger.last_step("another") == 0


def test_a_plan_is_stored_once_and_named_by_its_digest(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    charge(path, OTHER, range(1, 3), run="s")
    charge(path, PLAN, range(4, 6))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["plan"] for line in lines if "plan" in line] == [PLAN.digest, OTHER.digest]
    assert [line["charge"] for line in lines if "charge" in line].count(PLAN.digest) == 5


def test_epsilon_adds_up_different_plans(path: Path) -> None:
    charge(path, PLAN, range(1, 101))
    charge(path, OTHER, range(1, 4), run="s")
    with hush.Ledger(path) as ledger:
        together = ledger.epsilon(1e-5).epsilon
    alone = hush.epsilon(PLAN, steps=100, delta=1e-5).epsilon
    separate = alone.upper + hush.epsilon(OTHER, steps=3, delta=1e-5).epsilon.upper
    assert alone.upper < together.lower
    assert together.upper < separate


def test_the_order_of_the_charges_is_kept() -> None:
    ledger = hush.Ledger()
    for step, plan in enumerate((PLAN, OTHER, OTHER, PLAN), start=1):
        ledger.charge(plan, run="a", step=step, release=f"{step}")
    assert ledger.sequence == [(PLAN, 1), (OTHER, 2), (PLAN, 1)]
    ledger._journal.fold("a", 2)
    assert ledger.sequence == [(PLAN, 1), (OTHER, 1), (OTHER, 1), (PLAN, 1)], "none is lost"


def test_a_ledger_in_memory_counts_too() -> None:
    ledger = hush.Ledger()
    ledger.charge(PLAN, run="r", step=1, release="a")
    assert ledger.counts == {PLAN: 1}


def test_the_same_release_is_charged_once_and_another_is_refused(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=3, release="3")
        assert ledger.counts == {PLAN: 3}
        with pytest.raises(LedgerError, match="already released"):
            ledger.charge(PLAN, run="r", step=3, release="4")
        with pytest.raises(LedgerError, match="already released"):
            ledger.charge(OTHER, run="r", step=3, release="3")
        ledger.charge(PLAN, run="another", step=3, release="4")
        assert ledger.counts == {PLAN: 4}


def test_a_cost_that_grows_with_the_dimension_is_kept_with_its_dimension(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        ledger.charge(STEEP, run="a", step=1, release="x", dimension=10)
        ledger.charge(STEEP, run="a", step=2, release="y", dimension=10)
        assert ledger.epsilon(1e-5) == hush.epsilon(STEEP, steps=2, delta=1e-5, dimension=10)
    assert sum('"dimension": 10' in line for line in path.read_text().splitlines()) == 1
    with hush.Ledger(path) as ledger:
        assert ledger.dimensions == {STEEP: 10}
        assert ledger.epsilon(1e-5) == hush.epsilon(STEEP, steps=2, delta=1e-5, dimension=10)
        # a larger model under the same plan: all its steps are charged for the larger one
        ledger.charge(STEEP, run="b", step=1, release="z", dimension=1000)
        ledger.charge(STEEP, run="c", step=1, release="z", dimension=10)
    read = hush.Ledger(path, read_only=True)
    assert read.dimensions == {STEEP: 1000}
    three = hush.epsilon(STEEP, steps=4, delta=1e-5, dimension=1000)
    assert read.epsilon(1e-5) == three
    assert three.epsilon.upper > 1.5 * hush.epsilon(STEEP, 4, 1e-5, dimension=10).epsilon.upper


def test_without_the_dimension_such_a_step_is_not_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with (
        hush.Ledger(path) as ledger,
        pytest.raises(LedgerError, match=r"dimension=None.*a guess.*Pass dim"),
    ):
        ledger.charge(STEEP, run="a", step=1, release="x")
    assert len(path.read_text().splitlines()) == 1
    with hush.Ledger(path) as ledger:
        ledger.charge(STEEP, run="a", step=1, release="x", dimension=10)
    lost = path.read_text().replace(', "dimension": 10', "")
    path.write_text(lost)
    with pytest.raises(LedgerError, match="damaged at line 2"):
        hush.Ledger(path)


def test_a_dimension_says_nothing_about_other_plans(tmp_path: Path) -> None:
    gentle = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.Lp(p=1.5, norm=1.0),
        noise=hush.GeneralizedGaussian(beta=1.5, multiplier=20.0),
    )
    with hush.Ledger() as ledger:
        ledger.charge(gentle, run="a", step=1, release="x", dimension=3)
        assert ledger.dimensions == {}
        assert ledger.epsilon(1e-5) == hush.epsilon(gentle, steps=1, delta=1e-5)
        ledger.charge(STEEP, run="b", step=1, release="y", dimension=5)
        assert ledger.dimensions == {STEEP: 5}


def test_a_charge_that_would_read_as_damage_is_refused(tmp_path: Path) -> None:
    with hush.Ledger(tmp_path / "ledger") as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x")
        for wrong in (0, 3, 1.5, True, "2"):
            with pytest.raises(HushError):
                ledger.charge(PLAN, run="a", step=wrong, release="y")  # type: ignore[arg-type]
        ledger.charge(PLAN, run="a", step=2, release="y")
    assert hush.Ledger(tmp_path / "ledger", read_only=True).counts == {PLAN: 2}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_close_the_file_of_the_original(
    path: Path, duplicate: Callable[[Any], Any]
) -> None:
    with hush.Ledger(path) as ledger:
        with pytest.raises(Unsupported, match=r"a Ledger cannot be copied or pickled.*state_dict"):
            duplicate(ledger)
        gc.collect()
        with (path.parent / "log").open("w"):  # would get the number of a file that was closed
            ledger.charge(PLAN, run="r", step=1, release="a")
        assert not (path.parent / "log").read_bytes()
    assert counts(path) == {PLAN: 1}


def test_one_charge_of_assumed_arithmetic_marks_the_guarantee(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="a")
        assert ledger.epsilon(1e-5).arithmetic == "proved"
        ledger.charge(PLAN, run="r", step=2, release="b", arithmetic="assumed")
        ledger.charge(PLAN, run="r", step=3, release="c")
        with pytest.raises(HushError, match="arithmetic='exact' must be"):
            ledger.charge(PLAN, run="r", step=4, release="d", arithmetic="exact")  # type: ignore[arg-type]
    read = hush.Ledger(path, read_only=True).epsilon(1e-5)
    assert read.arithmetic == "assumed"
    assert read.epsilon == hush.epsilon(PLAN, steps=3, delta=1e-5).epsilon


def test_a_void_ledger_gives_no_epsilon_and_takes_no_charge(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    with hush.Ledger(path) as ledger:
        assert ledger.voided is None
        ledger.void("the model was moved outside of a private step")
        with pytest.raises(LedgerError, match=r"void \(the model was moved .*new model on a new ledger"):
            ledger.charge(PLAN, run="r", step=4, release="4")
    with hush.Ledger(path) as ledger:
        assert ledger.voided == "the model was moved outside of a private step"
        assert ledger.counts == {PLAN: 3}
        for refused in (
            lambda: ledger.epsilon(1e-5),
            lambda: ledger.charge(PLAN, run="r", step=4, release="4"),
            lambda: ledger.counts_repeating(PLAN, "r", 4),
        ):
            with pytest.raises(LedgerError, match="is void"):
                refused()
        ledger.void("and once more")
        assert ledger.voided == "the model was moved outside of a private step"


def test_it_keeps_that_noise_was_seeded_and_how_many_slots_there_are(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x")
        assert (ledger.epsilon(1e-3).randomness, ledger.epsilon(1e-3).records) == ("secret", None)
        ledger.charge(PLAN, run="a", step=2, release="y", randomness="seeded", records=900)
        ledger.charge(PLAN, run="a", step=3, release="z", records=2000)
        ledger.charge(PLAN, run="a", step=4, release="z", records=1000)
    for view in (hush.Ledger(path, read_only=True), ledger):
        guarantee = view.epsilon(1e-3)
        assert (guarantee.randomness, guarantee.records, view.counts) == ("seeded", 2000, {PLAN: 4})
        assert "randomness: seeded, delta: above 1/2000" in str(guarantee)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"randomness": "known"}, "secret"), ({"records": 0}, "records=0")]
)
def test_a_charge_that_says_nonsense_is_refused(wrong: Any, message: str) -> None:
    ledger = hush.Ledger()
    with pytest.raises(HushError, match=message):
        ledger.charge(PLAN, run="a", step=1, release="x", **wrong)
    assert not ledger.counts


def test_streams_of_a_ledger_have_labels_of_their_own(tmp_path: Path) -> None:
    path, used = tmp_path / "ledger.jsonl", set()
    for opened in range(3):
        with hush.Ledger(path) as ledger:
            labels = [ledger.stream_label() for _ in range(3)]
            assert (labels[0] == b"") == (opened == 0)
            # the second of the three is used, and the others are not: they may come again
            ledger.charge(PLAN, run=f"run {opened}", step=1, release="x")
            assert len(set(labels)) == 3
            assert labels[1] not in used
            used |= {labels[1]}
            assert not used & {ledger.stream_label()}
    memory = hush.Ledger()
    assert memory.stream_label() == b"", "a run in memory draws what one on disk does"


def test_a_folder_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"is a folder, and a ledger is a file.*/ledger\.jsonl"):
        hush.Ledger(tmp_path)

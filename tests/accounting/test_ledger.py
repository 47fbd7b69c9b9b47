"""Charges, repeated releases, adjacency, delta and the guarantee of a ledger."""

import copy
import gc
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hush
from hush.accounting.ledger import Ledger
from hush.core.errors import HushError, InvalidValue, LedgerError, Unsupported
from hush.core.guarantee import Adjacency, Neighbours
from tests.accounting.charged import OTHER, PLAN, STEEP, charge, counts


def test_a_plan_is_stored_once_and_named_by_its_digest(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    charge(path, OTHER, range(1, 3), run="s")
    charge(path, PLAN, range(4, 6))
    assert counts(path) == {PLAN: 5, OTHER: 2}
    with hush.Ledger(path) as ledger:
        assert (ledger.last_step("r"), ledger.last_step("another")) == (5, 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["plan"] for line in lines if "plan" in line] == [PLAN.digest, OTHER.digest]
    assert [line["charge"] for line in lines if "charge" in line].count(PLAN.digest) == 5


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
        pytest.raises(LedgerError, match=r"dimension=None is not supported.*Pass dim"),
    ):
        ledger.charge(STEEP, run="a", step=1, release="x")
    assert len(path.read_text().splitlines()) == 1
    with hush.Ledger(path) as ledger:
        ledger.charge(STEEP, run="a", step=1, release="x", dimension=10)
    lost = path.read_text().replace(', "dimension": 10', "")
    path.write_text(lost)
    with pytest.raises(LedgerError, match="damaged at line 2"):
        hush.Ledger(path)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_close_the_file_of_the_original(
    path: Path, duplicate: Callable[[Any], Any]
) -> None:
    with hush.Ledger(path) as ledger:
        with pytest.raises(Unsupported, match=r"a Ledger.*cannot be copied or pickled.*state_dict"):
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
        with pytest.raises(
            LedgerError, match=r"void \(the model was moved .*new model with a new ledger"
        ):
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


def test_a_ledger_answers_at_the_newest_delta_which_is_written_once(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        assert ledger.delta is None
        for delta in (1e-6, 1e-6, 1e-5, 1e-5):
            ledger.store_delta(delta)
            ledger.charge(PLAN, run="r", step=ledger.last_step("r") + 1, release="x", records=500)
    stored = [json.loads(line).get("delta") for line in path.read_text().splitlines()]
    assert [delta for delta in stored if delta is not None] == [1e-6, 1e-5]
    for read_only in (True, False):
        with hush.Ledger(path, read_only=read_only) as ledger:
            assert ledger.delta == 1e-5
            assert ledger.epsilon() == hush.epsilon(PLAN, steps=4, delta=1e-5)
            assert ledger.epsilon(1e-3) == hush.epsilon(PLAN, steps=4, delta=1e-3)


@pytest.mark.parametrize(
    ("adjacency", "said"),
    [
        (Adjacency(group=3), r"ledger\.epsilon\(group=3\)"),
        ("zero-out", "must be an Adjacency, not a str"),
    ],
)
def test_a_charge_is_for_one_unit(path: Path, adjacency: Any, said: str) -> None:
    with hush.Ledger(path) as ledger:
        for ask in (ledger.check_adjacency, partial(ledger.charge, PLAN, run="r", step=1, release="x")):
            with pytest.raises(InvalidValue, match=said):
                ask(adjacency=adjacency)
        assert not ledger.counts


def test_another_number_of_records_a_step_is_refused_for_what_the_guarantee_names() -> None:
    ledger = hush.Ledger()
    ledger.charge(PLAN, run="r", step=1, release="x", adjacency=Adjacency(per_unit=2))
    with pytest.raises(LedgerError, match=r"a ledger has one per_unit\. Pass per_unit=2") as k:
        ledger.check_adjacency(Adjacency(per_unit=3))
    assert "add up" not in str(k.value)
    for other in (
        Adjacency(),
        Adjacency(per_unit="all"),
        Adjacency(per_unit=2, neighbours=Neighbours.REPLACE),
    ):
        with pytest.raises(LedgerError, match="do not add up"):
            ledger.check_adjacency(other)


def test_a_copy_is_the_ledger_line_by_line_and_takes_no_charge(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x", arithmetic="assumed", records=100)
        ledger.store_delta(1e-5)
        copy = Ledger()
        copy.mirror(ledger.snapshot())
        assert (copy.head, copy.identity, copy.counts) == (ledger.head, ledger.identity, ledger.counts)
        for step in (2, 3):
            ledger.charge(PLAN, run="a", step=step, release=str(step), records=100)
            copy.follow(PLAN, run="a", step=step, release=str(step), records=100)
        assert copy.head == ledger.head
        assert copy.epsilon() == ledger.epsilon()
        assert copy.digest_at("a", 3) == ledger.digest_at("a", 3) is not None
        with pytest.raises(LedgerError, match="copy of the ledger of rank 0"):
            copy.charge(PLAN, run="a", step=4, release="x")
        with pytest.raises(LedgerError, match="is not a copy"):
            ledger.follow(PLAN, run="a", step=4, release="x")

"""Words of a report: each kind of run and of neighbours says what it is."""

from dataclasses import replace

import pytest

import hush
from hush.core.guarantee import Adjacency
from hush.report.facts import PlanCharge, RunFacts
from hush.report.wording import (
    caveats,
    for_engineers,
    for_lawyers,
    model_card,
    protection,
)

SELECTION = hush.Plan(
    sampling=hush.Poisson(0.2),
    clipping=hush.L2(1.0),
    noise=hush.Gaussian(6.0),
    release=hush.BestOf(steps=100, mean=10.0),
)


def under(facts: RunFacts, adjacency: Adjacency) -> RunFacts:
    stated = replace(facts.guarantee, neighbours=adjacency.neighbours, unit=adjacency.unit)
    return replace(facts, adjacency=adjacency, guarantee=stated)


def charged(facts: RunFacts, plan: hush.Plan) -> RunFacts:
    first = facts.plans[0]
    only = PlanCharge(plan=plan, steps=1, epsilon_alone=first.epsilon_alone, proof=first.proof)
    return replace(facts, plans=(only,))


@pytest.mark.parametrize(
    ("adjacency", "lawyer", "unit", "relation"),
    [
        (Adjacency(), "any one record", "One record", "empty slot"),
        (
            Adjacency(per_unit=3),
            "any one user, with all of their records,",
            "One user, at most 3 records a step",
            "empty slot",
        ),
        (
            Adjacency(per_unit="all", neighbours=hush.Neighbours.ADD_REMOVE),
            "any one user",
            "One user",
            "the number is private",
        ),
        (
            Adjacency(neighbours=hush.Neighbours.REPLACE),
            "whichever of two records",
            "One record",
            "The data sets differ in one record",
        ),
    ],
)
def test_neighbours_and_units_are_named(
    facts: RunFacts, adjacency: Adjacency, lawyer: str, unit: str, relation: str
) -> None:
    seen = under(facts, adjacency)
    assert lawyer in for_lawyers(seen)
    said = {item.term: item.text for item in protection(seen)}
    assert said["Unit of privacy"].startswith(unit)
    assert relation in said["Neighbouring data sets"]
    assert f"{adjacency.neighbours} adjacency, unit of privacy {adjacency.unit}" in for_engineers(seen)
    assert adjacency.unit in model_card(seen)


def test_what_is_not_certified_from_below_is_not_said_to_be(facts: RunFacts) -> None:
    assert "certified: epsilon is at least" in for_engineers(facts)
    bound = replace(facts.guarantee, epsilon=replace(facts.guarantee.epsilon, lower=0.0))
    assert "certified" not in for_engineers(replace(facts, guarantee=bound))


def stated(facts: RunFacts, term: str) -> tuple[str, str]:
    caveat = next(each for each in caveats(facts) if each.term == term)
    return caveat.state, caveat.text


def test_assumptions_follow_the_run(facts: RunFacts) -> None:
    assert stated(facts, "Tuning")[0] == "assumed"
    assert stated(charged(facts, SELECTION), "Tuning")[0] == "covered"
    assert stated(facts, "Arithmetic")[0] == "covered"
    loose = replace(facts, guarantee=replace(facts.guarantee, arithmetic="assumed"))
    assert stated(loose, "Arithmetic")[0] == "attention"
    assert "ChaCha20" in stated(facts, "Randomness")[1]
    scored = replace(facts, metrics=({"step": 1, "epsilon": 1.0, "accuracy": 0.9},))
    used = "The run used data without protection: the evaluation records."
    assert stated(scored, "Public data") == ("assumed", used)
    unfinished = stated(replace(facts, finished=False), "Unfinished")
    assert unfinished == ("attention", unfinished[1])
    assert stated(facts, "Ledger")[0] == "assumed", "nothing is beside it to check it against"


def test_what_stays_hidden_is_named(facts: RunFacts) -> None:
    hidden = {
        "private selection": "the number of trials",
        "PATE": "the teachers, their votes and their accuracy",
    }
    for kind, words in hidden.items():
        said = {item.term: item.text for item in protection(replace(facts, kind=kind))}
        assert words in said["Nobody else may see"]


def test_a_model_card_has_the_accuracy(facts: RunFacts) -> None:
    measured = replace(facts, metrics=({"step": 1, "epsilon": 1.0, "accuracy": 0.912},), baseline=0.95)
    assert "- Accuracy: 91.20% (95.00% without privacy)." in model_card(measured)

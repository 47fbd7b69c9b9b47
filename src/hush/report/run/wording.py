"""A run's facts in words: the guarantee for a lawyer and for an engineer, who sees what, caveats."""

from dataclasses import dataclass
from typing import Literal

from hush.clipping import Subspaces
from hush.core.best_of import BestOf
from hush.core.guarantee import Neighbours
from hush.core.plan import Plan
from hush.report.rounding import at_least, at_most, percent
from hush.report.run.facts import RunFacts
from hush.sampling import FullBatch

State = Literal["covered", "assumed", "attention"]

_RELATIONS = {
    Neighbours.ZERO_OUT: "Two data sets are neighbours if one has an empty slot where the other has "
    "{unit}; the number of slots is public (zero-out).",
    Neighbours.ADD_REMOVE: "Two data sets are neighbours if one has {unit} more than the other; how "
    "many there are is private (add/remove).",
    Neighbours.REPLACE: "Two data sets are neighbours if {unit} of one is another one in the other; how "
    "many there are is public (replace).",
}
_NOTHING_PROMISED = (
    "Nothing is promised here: the run is charged as a paper claims it, which is not proved, and its "
    "numbers are for comparison only."
)
_KEPT = "the records, and every gradient, batch and draw of noise"


@dataclass(frozen=True)
class Item:
    """A term and what is said of it."""

    term: str
    text: str


@dataclass(frozen=True)
class Caveat:
    """Something that the guarantee covers, or rests on, or that its reader should look at."""

    term: str
    state: State
    text: str


def for_lawyers(facts: RunFacts) -> str:
    """The guarantee in one sentence, without a formula."""
    if facts.guarantee.basis != "proved":
        return _NOTHING_PROMISED
    who = _who(facts)
    right = percent(facts.explanation.attack.posterior)
    question = f"which of two {facts.one}s" if facts.adjacency.replaced else f"whether {who}"
    return (
        f"What is published here comes out almost the same {_either_way(facts)}: someone who sees all "
        "of it, knows everything else in the data and has unlimited computing power can guess "
        f"{question} was used, from even odds, and is right at most {right} of the time, where blind "
        "guessing is right 50% of the time."
    )


def for_engineers(facts: RunFacts) -> str:
    """The guarantee in one sentence, with everything that its epsilon means nothing without."""
    stated, curve = facts.guarantee, facts.explanation.trade_off
    plans = "; ".join(f"{each.steps} x {mechanism(each.plan)}" for each in facts.plans)
    lower = stated.epsilon.lower
    certified = f"certified: epsilon is at least {at_least(lower)}; " if lower else ""
    return (
        f"({at_most(stated.epsilon.upper)}, {stated.delta:g})-differential privacy of the composition "
        f"of {plans}, {stated.neighbours} adjacency, unit of privacy {stated.unit}; "
        f"{certified}{at_most(curve.mu)}-GDP for error rates of 1e-10 or more, regret at most "
        f"{at_most(curve.regret, 2)}; {stated.basis}, arithmetic {stated.arithmetic}, randomness "
        f"{stated.randomness}."
    )


def mechanism(plan: Plan) -> str:
    """A plan in a few words: its parts and their settings."""
    parts = (plan.sampling, plan.clipping, plan.noise, plan.release)
    return ", ".join(_part(part.to_plain()) for part in parts if part.to_plain()["kind"] != "Always")


def _part(plain: dict[str, object]) -> str:
    settings = ", ".join(f"{name} {_short(value)}" for name, value in plain.items() if name != "kind")
    return f"{plain['kind']}({settings})" if settings else str(plain["kind"])


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} {_short(each)}" for name, each in value.items()) + "}"
    return str(value)


def protection(facts: RunFacts) -> list[Item]:
    """What is protected, and who sees what."""
    unit = facts.guarantee.unit
    secret = [file.name for file in facts.files if not file.publishable]
    public = [file.name for file in facts.files if file.publishable]
    known = facts.guarantee.records
    items = [
        Item("Unit of privacy", f"{sentence(unit)}.{_per_unit(facts)}"),
        Item("Neighbouring data sets", _RELATIONS[facts.adjacency.neighbours].format(unit=unit)),
    ]
    if known is not None:
        items.append(Item(f"Number of {facts.one}s", f"{known}, a public number."))
    items += [
        Item(
            "Whoever runs it sees",
            f"Everything: {_KEPT}. The curator is trusted (central differential privacy).",
        ),
        Item("Everyone may see", f"{sentence(released(facts))}. Files to publish: {', '.join(public)}."),
        Item(
            "Nobody else may see",
            sentence(_KEPT)
            + (f"; {', '.join(secret)} of the files" if secret else "")
            + _hidden(facts)
            + ".",
        ),
        Item(
            "What is not limited",
            "What the data as a whole teach about the world, and so about people who are like those "
            "in it, whether they are in it or not.",
        ),
    ]
    return items


def caveats(facts: RunFacts) -> list[Caveat]:
    """What the guarantee covers, what it assumes, and what a reader should look at."""
    stated = facts.guarantee
    found = []
    if not facts.finished:
        text = "The run is not finished: this is the cost of what was charged so far."
        found.append(Caveat("Unfinished", "attention", text))
    if facts.audit is not None:
        text = (
            "This report holds the result of an audit, which used the records and is charged nowhere: "
            "do not publish it. Without --audit it may be published."
        )
        found.append(Caveat("Sensitive", "attention", text))
    found += [_proof(facts), _arithmetic(facts), _randomness(facts), _tuning(facts), _public_data(facts)]
    if stated.records is not None:
        share = stated.delta * stated.records
        text = (
            f"Delta {stated.delta:g} is {at_most(share, 2)} times one over the number of {facts.one}s, "
        )
        text += "which is public: " + (
            "publishing one of them outright would satisfy it."
            if share > 1
            else "below 1, as it should be."
        )
        found.append(Caveat("Delta", "attention" if share > 1 else "covered", text))
    checked = "; ".join(facts.notes)
    state: State = "assumed" if "may be missing" in checked else "covered"
    found.append(Caveat("Ledger", state, f"{sentence(checked)}."))
    other = (
        "Charged is what is on this ledger. Other runs on the same records add to it, on their own "
        "ledgers; the time that the run took, its memory and the power it drew are not covered."
    )
    return [*found, Caveat("Beyond this ledger", "assumed", other)]


def _who(facts: RunFacts) -> str:
    group = facts.adjacency.group
    return f"a {facts.one}" if group == 1 else f"{group} {facts.one}s together"


def _either_way(facts: RunFacts) -> str:
    one = facts.one
    if facts.adjacency.replaced:
        return f"whichever of two {one}s was in the data"
    owned = "" if one == "record" else ", with all of their records,"
    return f"with or without any one {one}{owned} in the data"


def _per_unit(facts: RunFacts) -> str:
    if facts.adjacency.per_unit is None:
        return " A person with several records is protected less; group privacy says by how much."
    if facts.adjacency.per_unit == "all":
        return " All records of a user are covered, however many they are."
    return " All records of a user are covered: no step takes more of them than that."


def released(facts: RunFacts) -> str:
    """What everyone may see of a run, in words."""
    return {
        "training": "every noisy update, and so the model after each step",
        "selective "
        "training": "every accepted noisy update, and so the model after each; which proposals "
        "were accepted, where that is charged per trial",
        "private selection": "the best trial's model, settings and score",
        "PATE": "the noisy answers, how many there are, and the student that was trained on them",
        "ledger": "the noisy value of every charge",
    }[facts.kind]


def _hidden(facts: RunFacts) -> str:
    if facts.kind == "private selection":
        return "; how many trials there were, how long they took, and how all but the best scored"
    if facts.kind == "PATE":
        return "; the teachers, their votes and their accuracy"
    return ""


def _proof(facts: RunFacts) -> Caveat:
    if facts.guarantee.basis != "proved":
        return Caveat("Proof", "attention", _NOTHING_PROMISED)
    pages = dict.fromkeys(f"docs/guarantees/{each.proof}" for each in facts.plans)
    return Caveat("Proof", "covered", f"Statement, assumptions, proof and tests: {', '.join(pages)}.")


def _arithmetic(facts: RunFacts) -> Caveat:
    if facts.guarantee.arithmetic == "proved":
        text = (
            "Noise is drawn exactly, in floating-point numbers, and the rounding of sums is bounded and "
            "paid for; what is assumed of the matrix kernels is in docs/guarantees/tape.md."
        )
        return Caveat("Arithmetic", "covered", text)
    text = (
        "Real-number arithmetic is assumed: the rounding of noise or sums is not part of the proof, and "
        "attacks on the low bits of released numbers are not excluded."
    )
    return Caveat("Arithmetic", "attention", text)


def _randomness(facts: RunFacts) -> Caveat:
    if facts.guarantee.randomness == "seeded":
        text = (
            "The noise came from a seed that was given: the guarantee holds only while nobody knows the "
            "seed and no other run uses it. For tests."
        )
        return Caveat("Randomness", "attention", text)
    stream = "a ChaCha20 stream under a key from the operating system"
    system = "the operating system's cryptographic source throughout"
    source = {None: f"{stream}, or {system}", False: stream, True: system}[facts.secure]
    return Caveat("Randomness", "covered", f"Sampling and noise: {source}; a known seed was not used.")


def _tuning(facts: RunFacts) -> Caveat:
    if any(isinstance(each.plan.release, BestOf) for each in facts.plans):
        text = "Settings were chosen by private selection, and epsilon covers all of its trials."
        return Caveat("Tuning", "covered", text)
    text = (
        "Epsilon covers this run alone. Settings are assumed to have been chosen without looking at the "
        "private records; earlier runs on them would have to be added (hush tune charges for a search)."
    )
    return Caveat("Tuning", "assumed", text)


def _public_data(facts: RunFacts) -> Caveat:
    used = []
    count = facts.settings.get("public_records")
    if isinstance(count, int) and count > 0:
        used.append(f"{count} training records were given up as public")
    if any(_public_bases(each.plan) for each in facts.plans):
        used.append("gradients of public records chose the subspaces of the clipping")
    features = facts.settings.get("features")
    if isinstance(features, str):
        trained = " (a network trained on ImageNet)" if features.startswith("efficientnet") else ""
        used.append(f"inputs are {features} features{trained}")
    if facts.kind == "PATE":
        used.append("the queries are public inputs")
    if any("accuracy" in entry or "loss" in entry for entry in facts.metrics):
        used.append("accuracy was measured on records without protection")
    if used:
        text = "; ".join(used) + ": public data have no protection here."
        return Caveat("Public data", "assumed", sentence(text))
    recorded = "None is on record" if facts.settings else "Not recorded"
    return Caveat("Public data", "assumed", f"{recorded}: what else was used had no protection.")


def _public_bases(plan: Plan) -> bool:
    return isinstance(plan.clipping, Subspaces) and plan.clipping.bases is not None


def sampling_in_words(plan: Plan) -> str:
    """How records are drawn for a step, in words."""
    if isinstance(plan.sampling, FullBatch):
        return "every record takes part in every step"
    share = plan.sampling.participation
    return f"each record takes part in a step with probability {share:.4g}, independently"


def sentence(text: str) -> str:
    """The text with a capital letter."""
    return text[:1].upper() + text[1:]

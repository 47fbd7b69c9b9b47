"""Sentences of the privacy report: guarantee, visibility, caveats and model card."""

import re
from typing import Any, NamedTuple

from hush import __version__
from hush.clipping import Subspaces
from hush.core.guarantee import Neighbours, at_least, at_most, percent
from hush.core.plan import Plan
from hush.core.release import BestOf
from hush.report.facts import RunFacts

_RELATIONS = {
    Neighbours.ZERO_OUT: "One data set has an empty slot where the other has {unit}; the number of "
    "slots is public (zero-out).",
    Neighbours.ADD_REMOVE: "One data set has {unit} more than the other; the number is private "
    "(add/remove).",
    Neighbours.REPLACE: "The data sets differ in {unit}; the number is public (replace).",
}
_RELEASED = {
    "training": "every noisy update, and therefore the model after each step",
    "selective training": "every accepted noisy update, and therefore the model after each of them; the "
    "result of every test, if the accounting is per trial",
    "private selection": "the best trial's model, settings and score",
    "PATE": "the noisy answers, their number, and the student trained on them",
    "ledger": "the noisy value of every charge",
}
_HIDDEN = {
    "private selection": "; the number of trials, their run time, and the scores of all but the best",
    "PATE": "; the teachers, their votes and their accuracy",
}
_RAW = "the records, gradients, batches and noise"
_CAVEATS = {
    "Unfinished": ("", "The run is not finished. The report covers the charges so far."),
    "Proof": ("Statement, assumptions, proof and tests: {pages}.", ""),
    "Arithmetic": (
        "Noise is sampled exactly in floating-point arithmetic, and the sensitivity includes the "
        "rounding of sums. Assumptions on the matrix kernels: docs/guarantees/tape.md.",
        "Real-number arithmetic is assumed: the proof does not cover the rounding of noise or sums, so "
        "attacks on the low bits of released numbers are not excluded.",
    ),
    "Randomness": (
        "Sampling and noise use a ChaCha20 stream under a key from the operating system, not a known "
        "seed.",
        "The run used a given seed, which is meant for tests: the guarantee is valid only if the seed "
        "is secret and no other run uses it.",
    ),
    "Tuning": (
        "Private selection chose the hyperparameters; epsilon covers all of its trials.",
        "Epsilon covers this run alone and assumes that the hyperparameters do not depend on the "
        "private records. Earlier runs on the same records increase it. `hush tune` accounts for a "
        "hyperparameter search.",
    ),
    "Public data": ("", "{data}"),
    "Delta": (
        "{delta}, which is below 1.",
        "{delta}, which is above 1: publishing one random record would satisfy this delta.",
    ),
    "Ledger": ("{checked}.", "{checked}."),
    "Beyond this ledger": (
        "",
        "Other runs on the same records have their own ledgers and increase the total privacy cost. "
        "Side channels such as run time, memory and power consumption are not covered.",
    ),
}
"""Two sentences per term: one if the guarantee covers it, and one if it does not."""
_ASSUMED = ("Tuning", "Public data", "Ledger", "Beyond this ledger")
"""Terms that are assumptions if they are not covered; other uncovered terms need attention."""


class Item(NamedTuple):
    """Term with a sentence. The state of a caveat is covered, assumed or attention."""

    term: str
    text: str
    state: str = ""


def statements(facts: RunFacts) -> dict[str, Any]:
    """All sentences of the report by name."""
    parts = (for_lawyers, for_engineers, model_card, protection, caveats)
    return {part.__name__: part(facts) for part in parts}


def for_lawyers(facts: RunFacts) -> str:
    """Guarantee in one sentence without formulas."""
    one, group = facts.one, facts.adjacency.group
    owned = "" if one == "record" else ", with all of their records,"
    either = f"with or without any one {one}{owned} in the data"
    secret = f"whether {f'a {one}' if group == 1 else f'{group} {one}s together'} was used"
    if facts.adjacency.replaced:
        either, secret = f"whichever of two {one}s is in the data", f"which of two {one}s was used"
    return (
        f"The published results are almost the same {either}: an attacker who sees all of them, knows "
        f"everything else in the data and has unlimited computing power guesses {secret} from even "
        f"odds, and is right at most {percent(facts.explanation.attack.posterior)} of the time (blind "
        "guessing: 50%)."
    )


def for_engineers(facts: RunFacts) -> str:
    """Guarantee in one sentence with all its qualifiers."""
    stated, lower = facts.guarantee, facts.guarantee.epsilon.lower
    certified = f"certified: epsilon is at least {at_least(lower)}; " if lower else ""
    certified += f"{at_most(facts.explanation.trade_off.mu)}-GDP for error rates of 1e-10 or more; "
    charged = "; ".join(f"{charge.steps} x {mechanism(charge.plan)}" for charge in facts.plans)
    return (
        f"({at_most(stated.epsilon.upper)}, {stated.delta:g})-differential privacy of the "
        f"composition of {charged}, {stated.neighbours} adjacency, unit of privacy {stated.unit}; "
        f"{certified}{stated.basis}, arithmetic {stated.arithmetic}, randomness {stated.randomness}."
    )


def mechanism(plan: Plan) -> str:
    short = re.sub(r"\d+\.\d{4,}(e-?\d+)?", lambda found: f"{float(found[0]):.4g}", str(plan)[5:-1])
    return short.removesuffix(", release=Always()")


def protection(facts: RunFacts) -> list[Item]:
    """Unit of privacy, and the visibility of inputs and outputs."""
    unit, per_unit = facts.guarantee.unit, facts.adjacency.per_unit
    secret = [file.name for file in facts.files if not file.publishable]
    public = [file.name for file in facts.files if file.publishable]
    covered = " A person with several records has weaker protection, by group privacy."
    if per_unit is not None:
        covered = " All records of a user are covered" + (
            "." if per_unit == "all" else ", and no step uses more of them than stated."
        )
    records = facts.guarantee.records
    known = [] if records is None else [Item(f"Number of {facts.one}s", f"{records}, a public number.")]
    hidden = f"; the files {', '.join(secret)}" if secret else ""
    return [
        Item("Unit of privacy", f"{_sentence(unit)}.{covered}"),
        Item("Neighbouring data sets", _RELATIONS[facts.adjacency.neighbours].format(unit=unit)),
        *known,
        Item("The curator sees", f"Everything: {_RAW}. The curator is trusted (central model)."),
        Item(
            "Everyone may see",
            f"{_sentence(_RELEASED[facts.kind])}. Files to publish: {', '.join(public)}.",
        ),
        Item("Nobody else may see", f"{_sentence(_RAW)}{hidden}{_HIDDEN.get(facts.kind, '')}."),
        Item(
            "Not limited",
            "Conclusions about a population, which also apply to people who are not in the data.",
        ),
    ]


def caveats(facts: RunFacts) -> list[Item]:
    """Caveats: covered terms, assumptions and warnings."""
    stated = facts.guarantee
    share = stated.delta * (stated.records or 0)
    checked = "; ".join(facts.notes)
    values = {
        "pages": ", ".join(dict.fromkeys(f"docs/guarantees/{charge.proof}" for charge in facts.plans)),
        "delta": f"Delta {stated.delta:g} times the number of {facts.one}s is {at_most(share, 2)}",
        "data": _public_data(facts),
        "checked": _sentence(checked),
    }
    holds = {
        "Unfinished": facts.finished,
        "Proof": True,
        "Arithmetic": stated.arithmetic == "proved",
        "Randomness": stated.randomness == "secret",
        "Tuning": any(isinstance(charge.plan.release, BestOf) for charge in facts.plans),
        "Public data": False,
        "Delta": share <= 1,
        "Ledger": "may be missing" not in checked,
        "Beyond this ledger": False,
    }
    items = []
    for term, covered in holds.items():
        state = "covered" if covered else "assumed" if term in _ASSUMED else "attention"
        if text := _CAVEATS[term][not covered]:
            items.append(Item(term, text.format(**values), state))
    return [item for item in items if item.term != "Delta" or stated.records is not None]


def _public_data(facts: RunFacts) -> str:
    used = []
    count, features = facts.settings.get("public_records"), facts.settings.get("features")
    if isinstance(count, int) and count > 0:
        used.append(f"{count} training records declared public")
    if any(isinstance(c.plan.clipping, Subspaces) and c.plan.clipping.bases for c in facts.plans):
        used.append("gradients of public records, which determined the subspaces for clipping")
    if isinstance(features, str):
        used.append(f"{features} features, and the training data of the network that computes them")
    if facts.kind == "PATE":
        used.append("public inputs as queries")
    if any("accuracy" in line or "loss" in line for line in facts.metrics):
        used.append("the evaluation records")
    if used:
        return f"The run used data without protection: {'; '.join(used)}."
    recorded = "None recorded" if facts.settings else "Not recorded"
    return f"{recorded}. The guarantee does not protect other data."


def _utility(facts: RunFacts) -> str:
    without = "" if facts.baseline is None else f" ({100 * facts.baseline:.2f}% without privacy)"
    return "not measured" if facts.accuracy is None else f"{100 * facts.accuracy:.2f}%{without}"


def model_card(facts: RunFacts) -> str:
    """Privacy section of a model card, in Markdown."""
    stated, attack = facts.guarantee, facts.explanation.attack
    ten, one, tenth = map(percent, attack.true_positive_rates)
    named = ("Unfinished", "Arithmetic", "Randomness", "Tuning", "Public data")
    lines = [
        f"## Privacy\n\n{for_lawyers(facts)}\n",
        f"- Guarantee: {for_engineers(facts)}",
        f"- Unit of privacy: {stated.unit} ({stated.neighbours}).",
        f"- Best membership attack: true positive rate at most {ten}, {one} and {tenth} at 10%, 1% "
        f"and 0.1% false positives; advantage at most {percent(attack.advantage)}.",
        *(f"- {each.term}: {each.text}" for each in caveats(facts) if each.term in named),
        f"- Accuracy: {_utility(facts)}.",
        f"- Computed by hush {__version__} from the run's ledger.",
    ]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]

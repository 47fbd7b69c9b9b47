"""Facts of a run in words: guarantee, visibility, caveats, reporting lists, model card."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from hush.clipping import Subspaces
from hush.core.guarantee import Neighbours
from hush.core.plan import Plan
from hush.core.release import BestOf
from hush.report.facts import RunFacts
from hush.report.text import at_least, at_most, percent
from hush.sampling import FullBatch

_RELATIONS = {
    Neighbours.ZERO_OUT: "One data set has an empty slot where the other has {unit}; the number of "
    "slots is public (zero-out).",
    Neighbours.ADD_REMOVE: "One data set has {unit} more than the other; the number is private "
    "(add/remove).",
    Neighbours.REPLACE: "The data sets differ in {unit}; the number is public (replace).",
}
_RELEASED = {
    "training": "every noisy update, and so the model after each step",
    "selective training": "every accepted noisy update, and so the model after each; which proposals "
    "were accepted, if tests are accounted for per trial",
    "private selection": "the best trial's model, settings and score",
    "PATE": "the noisy answers, their number, and the student trained on them",
    "ledger": "the noisy value of every charge",
}
_HIDDEN = {
    "private selection": "; the number of trials, their run time, and the scores of all but the best",
    "PATE": "; the teachers, their votes and their accuracy",
}
_UNPROVED = (
    "No guarantee: the charge follows a published claim that is not proved. The numbers are for "
    "comparison only."
)
_RAW = "the records, and every gradient, batch and draw of noise"
_ON_THE_CARD = ("Unfinished", "Arithmetic", "Randomness", "Tuning", "Public data")

State = Literal["covered", "assumed", "attention"]
_CAVEATS: dict[tuple[str, State | None], str] = {
    ("Unfinished", None): "The run is not finished: this is the cost of the charges so far.",
    (
        "Sensitive",
        None,
    ): "This report contains the result of an audit, which used the records and is not "
    "charged. Do not publish it. A report without --audit may be published.",
    ("Proof", "attention"): _UNPROVED,
    ("Proof", "covered"): "Statement, assumptions, proof and tests: {pages}.",
    ("Arithmetic", "covered"): "Noise is sampled exactly in floating-point numbers, and the rounding of "
    "sums is part of the sensitivity. Assumptions on the matrix kernels: docs/guarantees/tape.md.",
    ("Arithmetic", "attention"): "Real-number arithmetic is assumed: the proof does not cover the "
    "rounding of noise or sums, so attacks on the low bits of released numbers are not excluded.",
    ("Randomness", "covered"): "Sampling and noise use {source}, not a known seed.",
    ("Randomness", "attention"): "The noise came from a given seed: the guarantee holds only while "
    "nobody knows the seed and no other run uses it. For tests.",
    ("Tuning", "covered"): "Private selection chose the hyperparameters; epsilon covers all of its "
    "trials.",
    ("Tuning", "assumed"): "Epsilon covers this run alone and assumes that the hyperparameters do not "
    "depend on the private records. Earlier runs on the same records add to it (`hush tune` accounts "
    "for a search).",
    ("Public data", None): "{data}",
    ("Delta", "covered"): "{delta}, below 1.",
    ("Delta", "attention"): "{delta}, above 1, so publishing one of them outright would satisfy it.",
    ("Ledger", None): "{checked}.",
    ("Beyond this ledger", None): "Other runs on the same records have their own ledgers and add to the "
    "cost. Run time, memory and power consumption are not covered.",
}
"""Sentence for each term and state; None: for any state."""


@dataclass(frozen=True)
class Item:
    """A term and a sentence about it."""

    term: str
    text: str


@dataclass(frozen=True)
class Caveat(Item):
    """A term, whether the guarantee covers it, and a sentence about it."""

    state: State


def statements(facts: RunFacts) -> dict[str, Any]:
    """All sentences of the report by name, as plain data."""
    return {
        "for_lawyers": for_lawyers(facts),
        "for_engineers": for_engineers(facts),
        "protection": [asdict(item) for item in protection(facts)],
        "caveats": [asdict(item) for item in caveats(facts)],
        "reporting_lists": [asdict(item) for item in reporting_lists(facts)],
        "model_card": model_card(facts),
    }


def for_lawyers(facts: RunFacts) -> str:
    """The guarantee in one sentence without formulas."""
    if facts.guarantee.basis != "proved":
        return _UNPROVED
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
    """The guarantee in one sentence with all of its qualifiers."""
    stated, curve = facts.guarantee, facts.explanation.trade_off
    lower = stated.epsilon.lower
    certified = f"certified: epsilon is at least {at_least(lower)}; " if lower else ""
    return (
        f"({at_most(stated.epsilon.upper)}, {stated.delta:g})-differential privacy of the composition "
        f"of {_charged(facts)}, {stated.neighbours} adjacency, unit of privacy {stated.unit}; "
        f"{certified}{at_most(curve.mu)}-GDP for error rates of 1e-10 or more, regret at most "
        f"{at_most(curve.regret, 2)}; {stated.basis}, arithmetic {stated.arithmetic}, randomness "
        f"{stated.randomness}."
    )


def _charged(facts: RunFacts) -> str:
    return "; ".join(f"{charge.steps} x {mechanism(charge.plan)}" for charge in facts.plans)


def mechanism(plan: Plan) -> str:
    """A plan in a few words: its parts and their settings."""
    parts = [part.to_plain() for part in (plan.sampling, plan.clipping, plan.noise, plan.release)]
    return ", ".join(_short(part) for part in parts if part["kind"] != "Always")


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    if isinstance(value, dict):
        settings = ", ".join(f"{name} {_short(each)}" for name, each in value.items() if name != "kind")
        return f"{value.get('kind', '')}({settings})" if settings else str(value["kind"])
    return str(value)


def protection(facts: RunFacts) -> list[Item]:
    """Unit of privacy, and the visibility of inputs and outputs."""
    unit, per_unit = facts.guarantee.unit, facts.adjacency.per_unit
    secret = [file.name for file in facts.files if not file.publishable]
    public = [file.name for file in facts.files if file.publishable]
    covered = " A person with several records has weaker protection, by group privacy."
    if per_unit is not None:
        covered = " All records of a user are covered" + (
            "." if per_unit == "all" else "; no step uses more of them than that."
        )
    items = [
        Item("Unit of privacy", f"{_sentence(unit)}.{covered}"),
        Item("Neighbouring data sets", _RELATIONS[facts.adjacency.neighbours].format(unit=unit)),
        Item("The curator sees", f"Everything: {_RAW}. The curator is trusted (central model)."),
        Item(
            "Everyone may see",
            f"{_sentence(_RELEASED[facts.kind])}. Files to publish: {', '.join(public)}.",
        ),
        Item(
            "Nobody else may see",
            _sentence(_RAW)
            + (f"; the files {', '.join(secret)}" if secret else "")
            + f"{_HIDDEN.get(facts.kind, '')}.",
        ),
        Item(
            "Not limited",
            "What the data as a whole reveal about the world, and so about similar people, in the data "
            "or not.",
        ),
    ]
    if facts.guarantee.records is not None:
        items.insert(2, Item(f"Number of {facts.one}s", f"{facts.guarantee.records}, a public number."))
    return items


def caveats(facts: RunFacts) -> list[Caveat]:
    """Coverage, assumptions and warnings of the guarantee."""
    stated = facts.guarantee
    stream = "a ChaCha20 stream under a key from the operating system"
    system = "the operating system's cryptographic source"
    share = stated.delta * (stated.records or 0)
    selected = any(isinstance(charge.plan.release, BestOf) for charge in facts.plans)
    checked = "; ".join(facts.notes)
    values = {
        "pages": ", ".join(dict.fromkeys(f"docs/guarantees/{charge.proof}" for charge in facts.plans)),
        "source": {None: f"{stream}, or {system}", False: stream, True: system}[facts.secure],
        "delta": f"Delta {stated.delta:g} times the number of {facts.one}s is {at_most(share, 2)}",
        "data": _public_data(facts),
        "checked": _sentence(checked),
    }
    states: dict[str, State | None] = {
        "Unfinished": None if facts.finished else "attention",
        "Sensitive": None if facts.audit is None else "attention",
        "Proof": "covered" if stated.basis == "proved" else "attention",
        "Arithmetic": "covered" if stated.arithmetic == "proved" else "attention",
        "Randomness": "attention" if stated.randomness == "seeded" else "covered",
        "Tuning": "covered" if selected else "assumed",
        "Public data": "assumed",
        "Delta": None if stated.records is None else "attention" if share > 1 else "covered",
        "Ledger": "assumed" if "may be missing" in checked else "covered",
        "Beyond this ledger": "assumed",
    }
    return [
        Caveat(term, _CAVEATS.get((term, state), _CAVEATS.get((term, None), "")).format(**values), state)
        for term, state in states.items()
        if state is not None
    ]


def _public_data(facts: RunFacts) -> str:
    """Data that were used without protection."""
    used = []
    count, features = facts.settings.get("public_records"), facts.settings.get("features")
    if isinstance(count, int) and count > 0:
        used.append(f"{count} training records declared public")
    if any(isinstance(c.plan.clipping, Subspaces) and c.plan.clipping.bases for c in facts.plans):
        used.append("gradients of public records, which chose the subspaces of the clipping")
    if isinstance(features, str):
        trained = " (a network trained on ImageNet)" if features.startswith("efficientnet") else ""
        used.append(f"{features} features{trained}")
    if facts.kind == "PATE":
        used.append("public inputs as queries")
    if any("accuracy" in line or "loss" in line for line in facts.metrics):
        used.append("evaluation records")
    if used:
        return f"Used without protection: {'; '.join(used)}."
    recorded = "None recorded" if facts.settings else "Not recorded"
    return f"{recorded}. Any other data used have no protection."


def _utility(facts: RunFacts) -> str:
    without = "" if facts.baseline is None else f" ({100 * facts.baseline:.2f}% without privacy)"
    return "not measured" if facts.accuracy is None else f"{100 * facts.accuracy:.2f}%{without}"


def reporting_lists(facts: RunFacts) -> list[Item]:
    """Answers to "How to DP-fy ML" (Ponomareva et al. 2023), section 5.3, and NIST SP 800-226 (2025).

    Common factors of both lists have one answer.
    """
    caveat = {item.term: item.text for item in caveats(facts)}
    stated, attack = facts.guarantee, facts.explanation.attack
    drawn = "; ".join(dict.fromkeys(_sampling(charge.plan) for charge in facts.plans))
    answers = {
        "DP setting": "Central: a trusted curator has the records; only the listed results are "
        "released.",
        "Data accesses covered, and budget across releases": caveat["Tuning"],
        "Final mechanism's output": f"{_sentence(_RELEASED[facts.kind])}.",
        "Unit of privacy": f"{_sentence(stated.unit)}.",
        "Adjacency": f"{_sentence(stated.neighbours)}.",
        "Mechanism": f"{_charged(facts)}.",
        "Type of accounting": "Privacy-loss distributions with certified lower and upper ends; Rényi "
        "divergences if no dominating pair is known.",
        "Accounting assumptions, and whether they hold": f"{_sentence(drawn)}. The plan that ran is the "
        f"plan that was charged. {caveat['Proof']}",
        "Privacy parameter": f"Epsilon at most {at_most(stated.epsilon.upper)} (at least "
        f"{at_least(stated.epsilon.lower)}) at delta {stated.delta:g}; membership advantage at most "
        f"{percent(attack.advantage)}.",
        "Formal statement": for_engineers(facts),
        "Transparency and verifiability": f"hush {facts.version}, open source. The plan, ledger and "
        "report may be published, and `hush account` recomputes epsilon from the ledger.",
        "Utility and bias": f"Accuracy {_utility(facts)}. Noise and clipping may cost small groups more "
        "accuracy than large ones; this report does not measure it.",
        "Correctness of the implementation": f"{caveat['Arithmetic']} {caveat['Randomness']}",
        "Side channels": "Run time, memory and power are not covered. Training records are not logged.",
        "Security and access control": "Secret files must stay with the curator, who is trusted.",
        "Data collection and other exposure": caveat["Beyond this ledger"],
    }
    return [Item(term, text) for term, text in answers.items()]


def _sampling(plan: Plan) -> str:
    if isinstance(plan.sampling, FullBatch):
        return "every record takes part in every step"
    share = plan.sampling.participation
    return f"each record takes part in a step with probability {share:.4g}, independently"


def model_card(facts: RunFacts) -> str:
    """Privacy section of a model card, in Markdown."""
    stated, attack = facts.guarantee, facts.explanation.attack
    ten, one, tenth = map(percent, attack.true_positive_rates)
    lines = [
        "## Privacy",
        "",
        for_lawyers(facts),
        "",
        f"- Guarantee: {for_engineers(facts)}",
        f"- Unit of privacy: {stated.unit} ({stated.neighbours}).",
        f"- Best membership attack: true positive rate at most {ten}, {one} and {tenth} at 10%, 1% and "
        f"0.1% false positives; advantage at most {percent(attack.advantage)}.",
        *(f"- {each.term}: {each.text}" for each in caveats(facts) if each.term in _ON_THE_CARD),
        f"- Accuracy: {_utility(facts)}.",
        f"- Computed by hush {facts.version} from the run's ledger.",
    ]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]

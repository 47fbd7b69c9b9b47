"""Answers to published reporting lists, and a model card's paragraph, from a run's facts.

The lists: "How to DP-fy ML" (Ponomareva et al. 2023), section 5.3, and NIST SP 800-226, "Guidelines for
Evaluating Differential Privacy Guarantees" (2025).
"""

from hush.report.rounding import at_least, at_most, percent
from hush.report.run.facts import RunFacts
from hush.report.run.wording import (
    Item,
    caveats,
    for_engineers,
    for_lawyers,
    mechanism,
    released,
    sampling_in_words,
    sentence,
)


def dp_fy_ml(facts: RunFacts) -> list[Item]:
    """Answers to the list of "How to DP-fy ML", section 5.3."""
    said = {caveat.term: caveat.text for caveat in caveats(facts)}
    drawn = "; ".join(dict.fromkeys(sampling_in_words(each.plan) for each in facts.plans))
    return [
        Item(
            "DP setting",
            "Central: a trusted curator holds the records; only what is listed is released.",
        ),
        Item("Data accesses covered", said["Tuning"]),
        Item("Final mechanism's output", f"{sentence(released(facts))}."),
        Item("Unit of privacy", f"{sentence(facts.guarantee.unit)}."),
        Item("Adjacency", f"{sentence(facts.adjacency.neighbours)}."),
        Item(
            "Type of accounting",
            "Privacy-loss distributions, with certified lower and upper ends; Rényi divergences where "
            "no dominating pair is known.",
        ),
        Item(
            "Accounting assumptions, and whether they hold",
            f"{sentence(drawn)}, as the accounting has it: what runs is the plan that is charged. "
            f"{said['Proof']}",
        ),
        Item("Formal statement", for_engineers(facts)),
        Item(
            "Transparency and verifiability",
            f"hush {facts.version}, open source; plan, ledger and report can be published, and "
            "`hush account` computes epsilon from the ledger again.",
        ),
    ]


def nist_800_226(facts: RunFacts) -> list[Item]:
    """Answers to the factors of NIST SP 800-226, from the top of its pyramid to the bottom."""
    said = {caveat.term: caveat.text for caveat in caveats(facts)}
    stated, attack = facts.guarantee, facts.explanation.attack
    accuracy = "not measured" if facts.accuracy is None else f"accuracy {100 * facts.accuracy:.2f}%"
    without = "" if facts.baseline is None else f", {100 * facts.baseline:.2f}% without privacy"
    return [
        Item(
            "Privacy parameter",
            f"epsilon at most {at_most(stated.epsilon.upper)} (at least "
            f"{at_least(stated.epsilon.lower)}) at delta {stated.delta:g}; membership advantage at "
            f"most {percent(attack.advantage)}.",
        ),
        Item("Unit of privacy", f"{sentence(stated.unit)}, {stated.neighbours}."),
        Item(
            "Mechanism",
            "; ".join(f"{each.steps} x {mechanism(each.plan)}" for each in facts.plans) + ".",
        ),
        Item(
            "Utility and bias",
            f"{sentence(accuracy)}{without}. Noise and clipping may cost small groups more accuracy "
            "than large ones; this report does not measure it.",
        ),
        Item("Correctness of the implementation", f"{said['Arithmetic']} {said['Randomness']}"),
        Item(
            "Side channels",
            "Time, memory and power are not covered; nothing of the training records is logged.",
        ),
        Item(
            "Security and access control",
            "Files marked as secret must stay with the curator; who holds the records is trusted.",
        ),
        Item("Data collection and other exposure", said["Beyond this ledger"]),
        Item("Privacy budget across releases", said["Tuning"]),
    ]


def model_card(facts: RunFacts) -> str:
    """A paragraph on privacy for a model card, in Markdown."""
    stated, attack = facts.guarantee, facts.explanation.attack
    ten, one, tenth = map(percent, attack.true_positive_rates)
    lines = [
        "## Privacy",
        "",
        for_lawyers(facts),
        "",
        f"- Guarantee: {for_engineers(facts)}",
        f"- Unit of privacy: {stated.unit} ({stated.neighbours}).",
        f"- Best membership attack: at most {ten}, {one} and {tenth} of members found at 10%, 1% and "
        f"0.1% false positives; advantage at most {percent(attack.advantage)}.",
        *(f"- {each.term}: {each.text}" for each in caveats(facts) if each.term in _ON_THE_CARD),
    ]
    if facts.accuracy is not None:
        without = "" if facts.baseline is None else f" ({100 * facts.baseline:.2f}% without privacy)"
        lines.append(f"- Accuracy: {100 * facts.accuracy:.2f}%{without}.")
    lines.append(f"- Computed by hush {facts.version} from the run's ledger.")
    return "\n".join(lines) + "\n"


_ON_THE_CARD = ("Unfinished", "Arithmetic", "Randomness", "Tuning", "Public data")

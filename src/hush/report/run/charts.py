"""Charts of a report: lines on two axes, and what is read off them at each place of the cursor."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hush.accounting.attacker.explanation import FALSE_POSITIVE_RATES, PRIORS
from hush.report.rounding import at_least, at_most, percent
from hush.report.run.axes import Axis
from hush.report.run.facts import RunFacts

Point = tuple[float, float]
_MIN_DELTA, _MIN_RATE = 1e-12, 1e-4


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve; `style` is its class in the page's style sheet."""

    label: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read off a chart at one place: the place, the curves' heights there, and the text."""

    x: float
    heights: tuple[float, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart as data; `page.py` says where its points are on the paper."""

    name: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    readings: tuple[Reading, ...]
    start: int
    """The reading that is shown before the cursor moves."""
    how: str
    """How the numbers were computed."""


def charts(facts: RunFacts) -> dict[str, Chart]:
    """The charts of a run by name; those without at least two points are left out."""
    drawn = [
        epsilon_at_delta(facts),
        trade_off(facts),
        power(facts),
        posterior(facts),
        build_up(facts),
        accuracy(facts),
    ]
    return {chart.name: chart for chart in drawn if chart is not None}


def epsilon_at_delta(facts: RunFacts) -> Chart | None:
    """Epsilon against delta, with both certified ends."""
    profile = facts.explanation.profile
    rows = [
        row
        for row in zip(profile.epsilons, profile.lower, profile.upper, strict=True)
        if row[2] >= _MIN_DELTA
    ][::-1]
    if len(rows) < 2:
        return None
    delta, epsilon = facts.guarantee.delta, min(facts.epsilon.upper, rows[0][0])
    lower = [(low, e) for e, low, _ in rows if low >= _MIN_DELTA]
    own = Reading(
        x=delta,
        heights=(epsilon,),
        text=f"this run: epsilon at most {at_most(epsilon)} at delta {delta:g}"
        + (f", at least {at_least(facts.epsilon.lower)}" if facts.epsilon.lower else ""),
    )
    others = [
        Reading(
            x=high,
            heights=(e,),
            text=f"epsilon {at_most(e)} holds at delta {at_most(high, 3)}"
            + (f", and at no delta below {at_least(low, 3)}" if low > 0 else ""),
        )
        for e, low, high in rows
    ]
    readings = sorted([own, *others], key=lambda reading: reading.x)
    return Chart(
        name="epsilon-at-delta",
        title="Epsilon at each delta",
        x=Axis(label="delta", low=_MIN_DELTA, high=1.0, log=True),
        y=Axis(label="epsilon", low=0.0, high=1.05 * rows[0][0]),
        lines=(
            Line(label="holds", style="holds", points=[(high, e) for e, _, high in rows]),
            *([Line(label="no smaller holds", style="bound", points=lower)] if lower else []),
            Line(label="this run", style="mark", points=[(delta, epsilon)]),
        ),
        readings=tuple(readings),
        start=readings.index(own),
        how="Privacy profile of everything charged, composed as privacy-loss distributions (or by Rényi "
        "divergences where no dominating pair is known) with rounding outward at both ends.",
    )


def trade_off(facts: RunFacts) -> Chart:
    """The trade-off curve against the ideal and mu-GDP."""
    curve = facts.explanation.trade_off
    columns = (curve.false_positive_rates, curve.lower, curve.upper, curve.gaussian)
    rows = list(zip(*columns, strict=True))
    mu, known = at_most(curve.mu), any(facts.explanation.profile.lower)
    upper = [(x, u) for x, _, u, _ in rows]
    return Chart(
        name="trade-off",
        title="Trade-off curve: errors of the best attack",
        x=Axis(label="false positive rate", low=0.0, high=1.0, percent=True),
        y=Axis(label="false negative rate", low=0.0, high=1.0, percent=True),
        lines=(
            Line(label="ideal: nothing learned", style="ideal", points=[(0.0, 1.0), (1.0, 0.0)]),
            Line(label=f"mu-GDP, mu = {mu}", style="gaussian", points=[(x, g) for x, _, _, g in rows]),
            *([Line(label="no larger curve holds", style="bound", points=upper)] if known else []),
            Line(label="holds", style="holds", points=[(x, low) for x, low, _, _ in rows]),
        ),
        readings=tuple(
            Reading(
                x=x,
                heights=(low, g),
                text=f"at {_share(x)} false positives every attack misses at least {_down(low)} of "
                f"members ({f'the best one at most {_share(u)}; ' if known else ''}ideal "
                f"{_share(1 - x)}; mu-GDP {_share(g)})",
            )
            for x, low, u, g in rows
        ),
        start=_nearest(curve.false_positive_rates, 0.1),
        how="Tangents of the privacy profile at its certified ends; mu is the smallest for which "
        "Gaussian DP follows, for error rates of 1e-10 or more; docs/guarantees/risk.md.",
    )


def power(facts: RunFacts) -> Chart:
    """True positive rates at small false positive rates, both axes logarithmic."""
    curve, attack = facts.explanation.trade_off, facts.explanation.attack
    columns = (curve.false_positive_rates, curve.lower, curve.upper, curve.gaussian)
    rows = [row for row in zip(*columns, strict=True) if row[0] >= _MIN_RATE]
    known = any(facts.explanation.profile.lower)
    attained = [(x, 1 - u) for x, _, u, _ in rows]
    marks = list(zip(FALSE_POSITIVE_RATES, attack.true_positive_rates, strict=True))
    powers = sorted([*((x, 1 - low) for x, low, _, _ in rows if x not in FALSE_POSITIVE_RATES), *marks])
    return Chart(
        name="power",
        title="True positives of the best attack",
        x=Axis(label="false positive rate", low=_MIN_RATE, high=1.0, log=True, percent=True),
        y=Axis(label="true positive rate", low=_MIN_RATE, high=1.0, log=True, percent=True),
        lines=(
            Line(label="blind guessing", style="ideal", points=[(_MIN_RATE, _MIN_RATE), (1.0, 1.0)]),
            Line(label="mu-GDP", style="gaussian", points=[(x, 1 - g) for x, _, _, g in rows]),
            *([Line(label="some attack attains", style="bound", points=attained)] if known else []),
            Line(label="at most", style="holds", points=powers),
            Line(label="10%, 1% and 0.1%", style="mark", points=marks),
        ),
        readings=tuple(
            Reading(
                x=x,
                heights=(found,),
                text=f"at {_share(x)} false positives no attack finds more than {percent(found)} of "
                "members",
            )
            for x, found in powers
        ),
        start=_nearest([x for x, _ in powers], 0.01),
        how="The trade-off curve, read as 1 less the false negative rate; the marked rates come from a "
        "search at that false positive rate.",
    )


def posterior(facts: RunFacts) -> Chart:
    """Chance that the best guess of membership is right, from each prior."""
    rows = list(zip(PRIORS, facts.explanation.posteriors, strict=True))
    return Chart(
        name="posterior",
        title="From prior to posterior",
        x=Axis(label="prior probability of membership", low=0.0, high=1.0, percent=True),
        y=Axis(label="right guesses", low=0.5, high=1.0, percent=True),
        lines=(
            Line(label="before", style="ideal", points=[(p, max(p, 1 - p)) for p in PRIORS]),
            Line(label="after, at most", style="holds", points=rows),
        ),
        readings=tuple(
            Reading(
                x=prior,
                heights=(right, max(prior, 1 - prior)),
                text=f"from a prior of {_share(prior)} the best guess is right "
                f"{_share(max(prior, 1 - prior))} of the time before, and at most {percent(right)} "
                "after",
            )
            for prior, right in rows
        ),
        start=_nearest(PRIORS, 0.5),
        how="m + (1 - m) delta(log(m/(1 - m))), m the likelier case beforehand: one less the Bayes "
        "risk, a mean over what may be released; docs/guarantees/risk.md.",
    )


def build_up(facts: RunFacts) -> Chart | None:
    """Epsilon against the number of charges so far."""
    spent = [each for each in facts.build_up if math.isfinite(each.epsilon.upper)]
    if len(spent) < 2 or not spent[-1].epsilon.upper:
        return None
    lower = [(each.charges, each.epsilon.lower) for each in spent]
    end, charged = float(spent[-1].charges), max(each.epsilon.upper for each in spent)
    # a guarantee of more than was charged is that of what was planned: PATE
    planned = facts.epsilon.upper if charged < facts.epsilon.upper * (1 - 1e-9) else None
    return Chart(
        name="build-up",
        title="How the charge built up",
        x=Axis(label="charges so far", low=0.0, high=end),
        y=Axis(label="epsilon", low=0.0, high=1.05 * (charged if planned is None else planned)),
        lines=(
            *(
                [Line(label="guarantee", style="ideal", points=[(0.0, planned), (end, planned)])]
                if planned is not None
                else []
            ),
            Line(
                label=f"epsilon at delta {facts.guarantee.delta:g}",
                style="holds",
                points=[(each.charges, each.epsilon.upper) for each in spent],
            ),
            *([Line(label="no smaller holds", style="bound", points=lower)] if lower[-1][1] else []),
        ),
        readings=tuple(
            Reading(
                x=float(each.charges),
                heights=(each.epsilon.upper,),
                text=f"after {each.charges} charges: epsilon at most {at_most(each.epsilon.upper)}"
                + (f", at least {at_least(each.epsilon.lower)}" if each.epsilon.lower else ""),
            )
            for each in spent
        ),
        start=len(spent) - 1,
        how="The first charges on the ledger, composed anew for each point.",
    )


def accuracy(facts: RunFacts) -> Chart | None:
    """Accuracy against the epsilon spent so far."""
    rows = facts.measured
    if len(rows) < 2:
        return None
    heights = [right for _, right in rows] + ([] if facts.baseline is None else [facts.baseline])
    end = max(epsilon for epsilon, _ in rows)
    known = "" if facts.baseline is None else f" (without privacy {_share(facts.baseline)})"
    baseline = [] if facts.baseline is None else [(0.0, facts.baseline), (end, facts.baseline)]
    return Chart(
        name="accuracy",
        title="Accuracy for epsilon",
        x=Axis(label="epsilon spent so far", low=0.0, high=end),
        y=Axis(
            label="accuracy",
            low=min(0.9, int(10 * min(heights)) / 10),
            high=min(1.0, (int(10 * max(heights)) + 1) / 10),
            percent=True,
        ),
        lines=(
            *([Line(label="without privacy", style="ideal", points=baseline)] if baseline else []),
            Line(label="this run", style="holds", points=rows),
        ),
        readings=tuple(
            Reading(
                x=epsilon,
                heights=(right,),
                text=f"accuracy {_share(right)} at epsilon {at_most(epsilon)}{known}",
            )
            for epsilon, right in rows
        ),
        start=len(rows) - 1,
        how="metrics.jsonl: measured as the run went on, on records without protection.",
    )


def _nearest(values: Iterable[float], wanted: float) -> int:
    """Index of the value that is nearest to a wanted one."""
    listed = list(values)
    return min(range(len(listed)), key=lambda k: abs(listed[k] - wanted))


def _share(value: float) -> str:
    """A share in percent, to four digits."""
    return f"{100 * value:.4g}%"


def _down(value: float) -> str:
    return f"{at_least(100 * value)}%"

"""The report as one self-contained HTML page with charts, and as JSON."""

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hush import __version__
from hush.accounting.explanation import Explanation
from hush.core.atomic_files import replace_file
from hush.core.guarantee import at_least, at_most, percent
from hush.report import wording
from hush.report.facts import RunFacts, attack_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIN_DELTA = 1e-12
_STYLES: dict[str, dict[str, Any]] = {
    "holds": {"color": "#0b5fb0", "linewidth": 2},
    "bound": {"color": "#b3541e", "linestyle": "--"},
    "gaussian": {"color": "#6d3fb0", "linestyle": ":"},
    "ideal": {"color": "#6b7683", "linewidth": 1},
    "mark": {"color": "#0b5fb0", "linestyle": "", "marker": "o"},
}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart as data.

    Args:
        title: Title.
        axes: Labels of the x and the y axis.
        curves: Label, key of `_STYLES` and points of each curve.
        caption: One value of the chart, and how the curves were computed.
        log: Whether the x axis has a logarithmic scale.
        percent: Axes labelled in percent, of "xy".
    """

    title: str
    axes: tuple[str, str]
    curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]
    caption: str = ""
    log: bool = False
    percent: str = ""

    def draw(self) -> "Figure":
        """The chart as a matplotlib figure."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for label, style, points in self.curves:
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **_STYLES[style])
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            if name in self.percent:
                axis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        axes.set(xlabel=self.axes[0], ylabel=self.axes[1], xscale="log" if self.log else "linear")
        if "y" not in self.percent:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
        return figure

    def image(self) -> str:
        """The chart as the data URI of an SVG."""
        from matplotlib import rc_context

        drawn = BytesIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hush"}):  # the same file each time
            self.draw().savefig(drawn, format="svg", metadata={"Date": None})
        return "data:image/svg+xml;base64," + b64encode(drawn.getvalue()).decode()


def charts(facts: RunFacts) -> dict[str, Chart]:
    """The charts of a run by name; a curve with a single point has none."""
    drawn = {"build-up": _build_up(facts), "accuracy": _accuracy(facts)}
    if facts.explanation is not None:
        drawn["epsilon-at-delta"] = _epsilon_at_delta(facts, facts.explanation)
        drawn["trade-off"] = _trade_off(facts.explanation)
    return {name: chart for name, chart in drawn.items() if chart is not None}


def _epsilon_at_delta(facts: RunFacts, explanation: Explanation) -> Chart | None:
    """Epsilon against delta, with both certified ends."""
    profile, delta = explanation.profile, facts.guarantee.delta
    rows = list(zip(profile.epsilons, profile.lower, profile.upper, strict=True))
    upper = [(high, epsilon) for epsilon, _, high in rows if high >= _MIN_DELTA]
    if len(upper) < 2:
        return None
    return Chart(
        title="Epsilon at each delta",
        axes=("delta", "epsilon"),
        curves=[
            ("guarantee", "holds", upper),
            ("certified lower bound", "bound", [(low, e) for e, low, _ in rows if low >= _MIN_DELTA]),
            ("this run", "mark", [(delta, min(facts.epsilon.upper, upper[-1][1]))]),
        ],
        caption="Privacy profile of all charges, composed as privacy-loss distributions (or Rényi "
        "divergences) and rounded outward.",
        log=True,
    )


def _trade_off(explanation: Explanation) -> Chart:
    """Trade-off curve against the ideal and mu-GDP."""
    curve = explanation.trade_off
    rates = curve.false_positive_rates
    return Chart(
        title="Trade-off curve",
        axes=("false positive rate", "false negative rate"),
        curves=[
            ("no information", "ideal", [(0.0, 1.0), (1.0, 0.0)]),
            (
                f"mu-GDP, mu = {at_most(curve.mu)}",
                "gaussian",
                [*zip(rates, curve.gaussian, strict=True)],
            ),
            ("guarantee", "holds", [*zip(rates, curve.lower, strict=True)]),
        ],
        caption="Smallest false negative rate of any membership attack. Tangents of the privacy "
        "profile; mu is the smallest for which Gaussian DP follows, for error rates of 1e-10 or more.",
        percent="xy",
    )


def _build_up(facts: RunFacts) -> Chart | None:
    """Epsilon against the number of charges so far."""
    spent = [(float(count), bound) for count, bound in facts.build_up if math.isfinite(bound.upper)]
    if len(spent) < 2:
        return None
    level = [(0.0, facts.epsilon.upper), (spent[-1][0], facts.epsilon.upper)]
    return Chart(
        title="Privacy spending",
        axes=("charges so far", f"epsilon at delta {facts.guarantee.delta:g}"),
        curves=[
            ("whole plan", "ideal", level),
            ("upper bound", "holds", [(count, bound.upper) for count, bound in spent]),
            ("lower bound", "bound", [(count, bound.lower) for count, bound in spent if bound.lower]),
        ],
        caption="Each point composes the first charges on the ledger.",
    )


def _accuracy(facts: RunFacts) -> Chart | None:
    """Accuracy against the epsilon spent so far."""
    rows, baseline = facts.measured, facts.baseline
    if len(rows) < 2:
        return None
    level = [] if baseline is None else [(0.0, baseline), (max(spent for spent, _ in rows), baseline)]
    return Chart(
        title="Accuracy",
        axes=("epsilon spent so far", "accuracy"),
        curves=[("without privacy", "ideal", level), ("this run", "holds", rows)],
        caption="On records without protection.",
        percent="y",
    )


def render(facts: RunFacts) -> str:
    """The report as a self-contained HTML page.

    Args:
        facts: Facts of the run. All of their strings are escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        facts=facts,
        version=__version__,
        words=wording.statements(facts),
        charts=charts(facts),
        attacks=attack_rows(facts.explanation) if facts.explanation else [],
        style=(folder / "page.css").read_text(encoding="utf-8"),
        at_most=at_most,
        at_least=at_least,
        percent=percent,
        mechanism=wording.mechanism,
    )


def report_json(facts: RunFacts) -> dict[str, Any]:
    """The facts and the sentences of the report, as plain data."""
    return {**facts.to_plain(), "statements": wording.statements(facts)}


def write_report(page: Path, facts: RunFacts) -> Path:
    """Write the page, and JSON of the same facts beside it.

    Args:
        page: Path of the HTML file.
        facts: Facts of the run.

    Returns:
        Path of the JSON file.
    """
    plain = page.with_suffix(".json")
    replace_file(page, render(facts).encode())
    replace_file(plain, (json.dumps(report_json(facts), indent=1) + "\n").encode())
    return plain

"""Privacy report as one self-contained HTML page with charts."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import Any

from hush import __version__
from hush.core.atomic_files import replace_file
from hush.core.guarantee import at_most, percent
from hush.report import wording
from hush.report.facts import RunFacts, attack_rows

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
    """Data of a chart."""

    title: str
    axes: tuple[str, str]
    """Labels of the x and the y axis."""
    curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]
    """Label, key of `_STYLES` and points of each curve."""
    caption: str
    log: bool = False
    percent: str = ""
    """Axes labelled in percent: a subset of "xy"."""

    def image(self) -> str:
        """Chart as a data URI with an SVG."""
        from matplotlib import rc_context
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
        drawn = BytesIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hush"}):  # reproducible output
            figure.savefig(drawn, format="svg", metadata={"Date": None})
        return "data:image/svg+xml;base64," + b64encode(drawn.getvalue()).decode()


def charts(facts: RunFacts) -> dict[str, Chart]:
    """Charts of a run by name. A chart with a single point is omitted."""
    delta, epsilon, drawn = facts.guarantee.delta, facts.guarantee.epsilon.upper, {}
    if len(facts.measured) > 1:
        ends, baseline = (0.0, max(spent for spent, _ in facts.measured)), facts.baseline
        drawn["accuracy"] = Chart(
            title="Accuracy",
            axes=("epsilon spent so far", "accuracy"),
            curves=[
                ("without privacy", "ideal", [] if baseline is None else [(x, baseline) for x in ends]),
                ("this run", "holds", facts.measured),
            ],
            caption="Measured on unprotected records.",
            percent="y",
        )
    profile, curve = facts.explanation.profile, facts.explanation.trade_off
    low, upper = (
        [(d, e) for d, e in zip(deltas, profile.epsilons, strict=True) if d >= _MIN_DELTA]
        for deltas in (profile.lower, profile.upper)
    )
    if len(upper) > 1:
        drawn["epsilon-at-delta"] = Chart(
            title="Epsilon at each delta",
            axes=("delta", "epsilon"),
            curves=[
                ("guarantee", "holds", upper),
                ("certified lower bound", "bound", low),
                ("this run", "mark", [(delta, min(epsilon, upper[-1][1]))]),
            ],
            caption="Privacy profile of all charges, from certified composition of privacy loss "
            "distributions (or Rényi divergences).",
            log=True,
        )
    rates, gaussian = curve.false_positive_rates, f"mu-GDP, mu = {at_most(curve.mu)}"
    drawn["trade-off"] = Chart(
        title="Trade-off curve",
        axes=("false positive rate", "false negative rate"),
        curves=[
            ("no information", "ideal", [(0.0, 1.0), (1.0, 0.0)]),
            (gaussian, "gaussian", [*zip(rates, curve.gaussian, strict=True)]),
            ("guarantee", "holds", [*zip(rates, curve.lower, strict=True)]),
        ],
        caption="Smallest false negative rate of any membership attack. mu is the smallest parameter of "
        "Gaussian DP that the run satisfies, for error rates of 1e-10 or more.",
        percent="xy",
    )
    return drawn


def render(facts: RunFacts) -> str:
    """Render the report as a self-contained HTML page. All strings of the facts are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        facts=facts,
        version=__version__,
        words=wording.statements(facts),
        attention=[item for item in wording.caveats(facts) if item.state == "attention"],
        day=date.today().isoformat(),
        charts=charts(facts),
        attacks=attack_rows(facts.explanation),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        at_most=at_most,
        percent=percent,
        mechanism=wording.mechanism,
    )


def write_report(page: Path, facts: RunFacts) -> None:
    """Write the report to the file `page`."""
    replace_file(page, render(facts).encode())

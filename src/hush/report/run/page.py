"""The report as one self-contained HTML page, from the template beside this file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from hush.accounting.attacker.explanation import FALSE_POSITIVE_RATES
from hush.core.atomic_files import replace_file
from hush.report.rounding import at_least, at_most, percent
from hush.report.run import disclosure, wording
from hush.report.run.charts import Chart, charts
from hush.report.run.facts import RunFacts

_HERE = Path(__file__).parent
# The drawing's units: about the pixels of a narrow screen, so that text keeps its size there.
WIDTH, HEIGHT = 400, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 20, 26, 40


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A chart with its places on the paper."""

    chart: Chart
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM

    def across(self, value: float) -> float:
        """Horizontal place of a value."""
        return round(self.left + self.chart.x.place(value) * (self.right - self.left), 1)

    def up(self, value: float) -> float:
        """Vertical place of a value, counted from the top."""
        return round(self.bottom - self.chart.y.place(value) * (self.bottom - self.top), 1)

    def path(self, points: list[tuple[float, float]]) -> str:
        """A line through points, as SVG writes it."""
        return "M" + " L".join(f"{self.across(x):g},{self.up(y):g}" for x, y in points)

    @property
    def readings(self) -> list[list[Any]]:
        """Place, heights and text of each reading, in order from left to right."""
        return [
            [self.across(each.x), [self.up(height) for height in each.heights], each.text]
            for each in self.chart.readings
        ]


def render(facts: RunFacts) -> str:
    """The report of a run as HTML, with style, script, drawings and the facts themselves in it.

    Args:
        facts: Of the run. Every string of them is escaped.
    """
    meaning = facts.explanation
    attack, implied = meaning.attack, meaning.from_epsilon
    rates = zip(
        FALSE_POSITIVE_RATES, attack.true_positive_rates, implied.true_positive_rates, strict=True
    )
    return _template().render(
        facts=facts,
        plain=facts.to_plain(),
        words=statements(facts),
        drawings={name: Drawing(chart=chart) for name, chart in charts(facts).items()},
        attacks=[(f"{100 * rate:g}%", percent(own), percent(alone)) for rate, own, alone in rates],
        style=_text("page.css"),
        script=_text("page.js"),
        at_most=at_most,
        at_least=at_least,
        percent=percent,
        mechanism=wording.mechanism,
        size=(WIDTH, HEIGHT),
    )


def statements(facts: RunFacts) -> dict[str, Any]:
    """The report's sentences by name, as plain data."""
    lists: dict[str, Sequence[wording.Item | wording.Caveat]] = {
        "protection": wording.protection(facts),
        "caveats": wording.caveats(facts),
        "how_to_dp_fy_ml": disclosure.dp_fy_ml(facts),
        "nist_sp_800_226": disclosure.nist_800_226(facts),
    }
    return {
        "for_lawyers": wording.for_lawyers(facts),
        "for_engineers": wording.for_engineers(facts),
        **{name: [vars(item) for item in items] for name, items in lists.items()},
        "model_card": disclosure.model_card(facts),
    }


def report_json(facts: RunFacts) -> dict[str, Any]:
    """The facts and the sentences made of them, as plain data."""
    return {**facts.to_plain(), "statements": statements(facts)}


@cache
def _template() -> Template:
    # every value is escaped, in text and in attributes; `tojson` escapes for scripts
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def write_report(page: Path, facts: RunFacts) -> Path:
    """Write the page and, beside it, its facts as JSON; returns the path of the JSON.

    Args:
        page: the HTML file.
        facts: of the run.
    """
    plain = page.with_suffix(".json")
    replace_file(page, render(facts).encode())
    replace_file(plain, (json.dumps(report_json(facts), indent=1) + "\n").encode())
    return plain

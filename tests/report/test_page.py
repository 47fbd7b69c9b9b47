"""The page: complete, escaped, and in need of nothing beside it."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import hush
from hush.accounting.attacker import Attacker
from hush.accounting.epsilon import compose
from hush.accounting.explanation import FALSE_POSITIVE_RATES
from hush.report.facts import RunFacts, attack_rows, run_facts
from hush.report.page import charts, render
from hush.report.wording import statements
from tests.report.conftest import STATISTICS, TRAINING, charge


class Page(HTMLParser):
    """Elements of a page, and the text of those with an id or a class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.elements.append((tag, found))
        if tag not in ("meta", "link", "img"):
            self._open.append((tag, found.get("id") or ""))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, "every element is closed in its turn"

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            self.texts[name] = self.texts.get(name, "") + data


def test_everything_is_said(facts: RunFacts) -> None:
    page, said = Page(render(facts)), statements(facts)
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {"guarantee", "protected", "attacks", "spent", "caveats"} <= ids
    for text in (said["for_lawyers"], said["for_engineers"]):
        assert text in page.texts["guarantee"]
    for item in (*said["protection"], *said["caveats"]):
        assert item.text in "".join(page.texts.values())
    assert page.texts["card"] == said["model_card"]
    assert f"{facts.guarantee.delta:g}" in page.texts["guarantee"]
    assert all(chart.caption in page.texts[name] for name, chart in charts(facts).items())


def test_nothing_is_fetched(facts: RunFacts) -> None:
    text = render(facts)
    page = Page(text)
    for _, found in page.elements:
        for name in ("src", "href", "action", "data", "srcset"):
            assert (found.get(name) or "data:").startswith("data:")
    policies = [found["content"] for _, found in page.elements if found.get("http-equiv")]
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", text)


COUNTS = {STATISTICS: 2, TRAINING: 30}


def points(facts: RunFacts, chart: str, label: str) -> list[tuple[float, float]]:
    """Points of the curve with this label."""
    return list(next(points for name, _, points in charts(facts)[chart].curves if name == label))


def test_epsilon_at_a_delta_is_between_the_certified_ends(facts: RunFacts) -> None:
    small = [(delta, epsilon) for delta, epsilon in points(facts, "epsilon-at-delta", "guarantee")]
    assert len(small) > 60
    for delta, epsilon in [point for point in small if point[0] <= 0.1][::15]:
        bound = compose(COUNTS, delta).epsilon
        assert bound.lower <= epsilon <= bound.upper * 1.01, "valid, and within 1% of the least"
    assert points(facts, "epsilon-at-delta", "this run") == [(1e-5, facts.guarantee.epsilon.upper)]


def test_the_rates_of_attacks_are_the_attackers(facts: RunFacts) -> None:
    attacker = Attacker(COUNTS)
    rates = [attacker.posterior(0.5), attacker.advantage]
    rates += [attacker.true_positive_rate(rate) for rate in FALSE_POSITIVE_RATES]
    printed = [float(own.removesuffix("%")) / 100 for _, own, _ in attack_rows(facts.explanation)]
    for rate, shown in zip(rates, printed, strict=True):
        assert rate * (1 - 1e-9) <= shown <= rate * 1.02, "rounded up"


def test_a_published_claim_is_reported_by_proved_accounting(tmp_path: Path) -> None:
    claim = hush.Selective(rate=0.1, clip=0.1, multiplier=3.0, test="mean", accounting="published")
    proved = replace(TRAINING, release=replace(claim, accounting="per-acceptance"))
    claimed = replace(TRAINING, release=claim)
    facts = run_facts(charge(tmp_path / "ledger.jsonl", (claimed, 10), (proved, 5)))
    assert facts.guarantee.epsilon == hush.epsilon(proved, steps=15, delta=1e-5).epsilon
    assert facts.guarantee.basis == "proved"
    assert float(facts.guarantee) > hush.epsilon(claimed, steps=15, delta=1e-5).epsilon.upper
    assert [(each.plan, each.steps) for each in facts.plans] == [(proved, 15)]
    page = Page(render(facts))
    assert "used published accounting" in page.texts["caveats"].lower()
